"""Darknet's region layer in plain loops: the loss and its gradient by region_layer.c's own formulas."""

import math

import torch
from torch import Tensor

from tests.detection.scenes import ANCHORS, NUM_CLASSES, overlap

Box = list[float]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def from_center(x: float, y: float, width: float, height: float) -> Box:
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def region(output: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """The loss of a batch and its gradient, both divided by the number of images."""
    gradient, loss = torch.zeros_like(output), 0.0
    for image, truths, part in zip(output, targets.tolist(), gradient, strict=True):
        channels = 5 + NUM_CLASSES
        values, deltas = image.unflatten(0, (-1, channels)), part.unflatten(0, (-1, channels))
        loss += one_image(values, [t for t in truths if t[0] >= 0], deltas)
    return loss / len(output), gradient / len(output)


def one_image(values: Tensor, truths: list[list[float]], deltas: Tensor) -> float:
    """The loss of one image; the gradient goes to `deltas`. Both are (anchors, channels, rows, columns)."""
    _, _, rows, columns = values.shape
    losses: dict[tuple[int, int, int], float] = {}
    in_cells = [(int(t[0]), [value / 32 for value in t[1:]]) for t in truths]
    for anchor in range(len(ANCHORS)):
        for row in range(rows):
            for column in range(columns):
                box = guess(values[anchor, :, row, column], anchor, row, column)
                if all(overlap(box, truth) <= 0.6 for _, truth in in_cells):
                    confidence = sigmoid(float(values[anchor, 4, row, column]))
                    deltas[anchor, 4, row, column] = confidence * confidence * (1 - confidence)
                    losses[anchor, row, column] = confidence**2 / 2
    for label, truth in in_cells:
        anchor, row, column = answering(truth)
        here = values[anchor, :, row, column]
        loss, slope = one_object(here, label, truth, (anchor, row, column), rows * columns)
        deltas[anchor, :, row, column] = slope
        losses[anchor, row, column] = loss
    return sum(losses.values())


def guess(values: Tensor, anchor: int, row: int, column: int) -> Box:
    x, y, width, height = values[:4].tolist()
    sizes = math.exp(width) * ANCHORS[anchor][0], math.exp(height) * ANCHORS[anchor][1]
    return from_center(column + sigmoid(x), row + sigmoid(y), *sizes)


def answering(truth: Box) -> tuple[int, int, int]:
    """Anchor, row and column of the guess that answers for an object."""
    width, height = truth[2] - truth[0], truth[3] - truth[1]
    likeness = [overlap([0, 0, width, height], [0, 0, *anchor]) for anchor in ANCHORS]
    return likeness.index(max(likeness)), int((truth[1] + truth[3]) / 2), int((truth[0] + truth[2]) / 2)


def one_object(
    values: Tensor, label: int, truth: Box, place: tuple[int, int, int], num_cells: int
) -> tuple[float, Tensor]:
    """Loss and gradient of the guess that answers for one object."""
    anchor, row, column = place
    width, height = truth[2] - truth[0], truth[3] - truth[1]
    scale = 2 - width * height / num_cells
    wanted = [(truth[0] + truth[2]) / 2 - column, (truth[1] + truth[3]) / 2 - row]
    slope, loss = torch.zeros_like(values), 0.0
    for index in range(2):
        value = sigmoid(float(values[index]))
        slope[index] = scale * (value - wanted[index]) * value * (1 - value)
        loss += scale * (value - wanted[index]) ** 2 / 2
        wrong = float(values[2 + index]) - math.log((width, height)[index] / ANCHORS[anchor][index])
        slope[2 + index] = scale * wrong
        loss += scale * wrong**2 / 2
    confidence = sigmoid(float(values[4]))
    wrong = confidence - overlap(guess(values, anchor, row, column), truth)
    slope[4] = 5 * wrong * confidence * (1 - confidence)
    loss += 5 * wrong**2 / 2
    likelihoods = [math.exp(value) for value in values[5:].tolist()]
    for index, likelihood in enumerate(likelihoods):
        slope[5 + index] = likelihood / sum(likelihoods) - (index == label)
    return loss - math.log(likelihoods[label] / sum(likelihoods)), slope
