"""What the last layer of YOLOv2 means: boxes when reading it, a loss when learning it.

The output (N, A * (5 + C), H, W) holds for every cell of a grid and every anchor, in Darknet's order: the
centre's offset in the cell (before a sigmoid), the size in anchors (before an exponential), the confidence
that there is an object (before a sigmoid) and a score for each class (before a softmax). A cell is 32 pixels.

Targets (N, M, 5) are label, x1, y1, x2, y2 in pixels of the input; images with fewer boxes are filled up
with the label -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from manyhands.detection.anchors import Anchors, size_overlaps
from manyhands.detection.boxes import (
    Detections,
    intersection_over_union,
    non_maximum_suppression,
    paired_intersection_over_union,
    to_centers,
    to_corners,
)
from manyhands.errors import RequestError

CELL_PIXELS = 32
PADDING = -1  # the label of a row that fills up a target
GOOD_OVERLAP = 0.6  # a guess that overlaps an object this much is not told that it found nothing
MAX_OVERLAP = 0.45  # Darknet's, for suppression
LARGEST_LOG = 10.0  # exp of it, in anchors, is beyond any image; what an untrained layer says may overflow

OBJECT_SCALE = 5.0
NO_OBJECT_SCALE = 1.0
COORDINATE_SCALE = 1.0
CLASS_SCALE = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """The output taken apart, each (N, A, H, W, ...): all as the layer gave it but the confidence, 0 to 1."""

    offsets: Tensor
    log_sizes: Tensor
    confidences: Tensor
    class_scores: Tensor

    def boxes(self, anchors: Tensor) -> Tensor:
        """Corners in cells: (N, A, H, W, 4)."""
        rows, columns = (torch.arange(size).to(self.offsets) for size in self.offsets.shape[2:4])
        cells = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
        sizes = self.log_sizes.clamp(max=LARGEST_LOG).exp() * anchors[:, None, None]
        return to_corners(torch.cat([self.offsets.sigmoid() + cells, sizes], dim=-1))


def _take_apart(output: Tensor, num_anchors: int, num_classes: int) -> Guesses:
    expected = num_anchors * (5 + num_classes)
    if output.ndim != 4 or output.shape[1] != expected:
        raise RequestError(
            f"a layer of shape {tuple(output.shape)} does not give {num_anchors} anchors with {num_classes} "
            f"classes: that takes {expected} channels, {num_anchors} * (5 + {num_classes})."
        )
    batch, _, rows, columns = output.shape
    parts = output.view(batch, num_anchors, 5 + num_classes, rows, columns).permute(0, 1, 3, 4, 2)
    return Guesses(parts[..., :2], parts[..., 2:4], parts[..., 4].sigmoid(), parts[..., 5:])


def decode(output: Tensor, anchors: Anchors, num_classes: int, threshold: float) -> list[Detections]:
    """For each image every guess with confidence times class above the threshold, clipped to the image.

    A guess sure of two classes counts for both, as in Darknet; nothing is suppressed yet.
    """
    guesses = _take_apart(output.detach(), len(anchors), num_classes)
    rows, columns = output.shape[2:]
    limits = torch.tensor([columns, rows, columns, rows]).to(output)
    boxes = torch.minimum(guesses.boxes(output.new_tensor(anchors)).clamp(min=0), limits) * CELL_PIXELS
    scores = guesses.confidences[..., None] * guesses.class_scores.softmax(dim=-1)
    found = []
    for image_boxes, image_scores in zip(boxes.flatten(1, 3), scores.flatten(1, 3), strict=True):
        places, labels = torch.nonzero(image_scores > threshold, as_tuple=True)
        found.append(Detections(image_boxes[places], image_scores[places, labels], labels))
    return found


def detect(
    output: Tensor, anchors: Anchors, num_classes: int, threshold: float, max_overlap: float = MAX_OVERLAP
) -> list[Detections]:
    """For each image what `decode` gives, without the second guesses of one object; the surest first."""
    decoded = decode(output, anchors, num_classes, threshold)
    return [non_maximum_suppression(found, max_overlap) for found in decoded]


@dataclass(frozen=True, slots=True, eq=False)
class Truths:
    """The targets in cells, one row an object that is to be learned: T in all, over the whole batch."""

    places: tuple[Tensor, Tensor, Tensor, Tensor]  # image, anchor, row, column of the guess that answers
    centers: Tensor  # (T, 4)
    labels: Tensor  # (T)


@dataclass(frozen=True, slots=True)
class RegionLoss:
    """YOLOv2's loss, a scalar: `RegionLoss(anchors, num_classes)(output, targets)`.

    Every object is answered for by one guess: in the cell of its centre, the anchor of the likest shape. That
    guess learns the box, the class, and as its confidence the overlap it has; all guesses that overlap no
    object well learn the confidence 0. The gradient is Darknet's (region_layer.c), divided by the images of
    the batch. Two objects for one guess: the later wins. Left out is Darknet's pull of every box to its
    anchor in the first 12,800 images: the same batch gives the same loss at any time.
    """

    anchors: Anchors
    num_classes: int

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        guesses = _take_apart(output, len(self.anchors), self.num_classes)
        self._check(output, targets)
        targets = _in_cells(targets.to(output), *output.shape[2:])
        anchors = output.new_tensor(self.anchors)
        truths = _truths(targets, anchors, *output.shape[2:])
        with torch.no_grad():
            boxes = guesses.boxes(anchors)
        losses = (
            _empty_loss(guesses, boxes, targets, truths),
            _object_loss(guesses, boxes, truths),
            _box_loss(guesses, truths, anchors),
            _class_loss(guesses, truths),
        )
        return torch.stack(losses).sum() / len(output)

    def _check(self, output: Tensor, targets: Tensor) -> None:
        if targets.ndim != 3 or targets.shape[2] != 5 or len(targets) != len(output):
            raise RequestError(
                f"targets of shape {tuple(targets.shape)} for {len(output)} images: they must be "
                f"{len(output)} x boxes x 5 (label, x1, y1, x2, y2)."
            )
        if targets.numel() and float(targets[..., 0].max()) >= self.num_classes:
            label = int(targets[..., 0].max())
            raise RequestError(
                f"a box has the label {label}, and there are {self.num_classes} classes, 0 to "
                f"{self.num_classes - 1}. Ask for {label + 1} classes."
            )


def _in_cells(targets: Tensor, rows: int, columns: int) -> Tensor:
    """Targets in cells, clipped to the image; what has no area left there is padding."""
    limits = torch.tensor([columns, rows, columns, rows]).to(targets)
    corners = torch.minimum((targets[..., 1:] / CELL_PIXELS).clamp(min=0), limits)
    empty = (corners[..., 2:] <= corners[..., :2]).any(dim=-1) | (targets[..., 0] < 0)
    labels = torch.where(empty, float(PADDING), targets[..., 0])
    return torch.cat([labels[..., None], corners], dim=-1)


def _truths(targets: Tensor, anchors: Tensor, rows: int, columns: int) -> Truths:
    """Each object and the guess that answers for it; of two for one guess, the later."""
    centers, labels = to_centers(targets[..., 1:]), targets[..., 0].long()
    column = centers[..., 0].long().clamp(max=columns - 1)
    row = centers[..., 1].long().clamp(max=rows - 1)
    anchor = size_overlaps(centers[..., 2:], anchors).argmax(dim=-1)
    real = labels != PADDING
    guess = (anchor * rows + row) * columns + column
    same = (guess[:, :, None] == guess[:, None, :]) & real[:, None, :]
    overtaken = same.triu(diagonal=1).any(dim=2)
    image, position = torch.nonzero(real & ~overtaken, as_tuple=True)
    places = (image, anchor[image, position], row[image, position], column[image, position])
    return Truths(places, centers[image, position], labels[image, position])


def _empty_loss(guesses: Guesses, boxes: Tensor, targets: Tensor, truths: Truths) -> Tensor:
    """Confidence 0 for all guesses but those that answer for an object or overlap one well."""
    overlaps = intersection_over_union(boxes.flatten(1, 3), targets[..., 1:])
    overlaps = overlaps.masked_fill((targets[..., 0] == PADDING)[:, None, :], 0.0)
    empty = (overlaps <= GOOD_OVERLAP).all(dim=2).view(boxes.shape[:4])
    empty[truths.places] = False
    return NO_OBJECT_SCALE * guesses.confidences[empty].square().sum() / 2


def _object_loss(guesses: Guesses, boxes: Tensor, truths: Truths) -> Tensor:
    """The confidence of a guess that answers for an object is to be the overlap it has by now."""
    overlaps = paired_intersection_over_union(boxes[truths.places], to_corners(truths.centers))
    return OBJECT_SCALE * (guesses.confidences[truths.places] - overlaps).square().sum() / 2


def _box_loss(guesses: Guesses, truths: Truths, anchors: Tensor) -> Tensor:
    """Offsets in the cell and logarithms of sizes, which count up to double where the object is small."""
    _, anchor, row, column = truths.places
    rows, columns = guesses.offsets.shape[2:4]
    offsets = truths.centers[:, :2] - torch.stack([column, row], dim=-1)
    log_sizes = (truths.centers[:, 2:] / anchors[anchor]).log()
    weights = 2 - truths.centers[:, 2] * truths.centers[:, 3] / (rows * columns)
    wrong_offsets = (guesses.offsets[truths.places].sigmoid() - offsets).square().sum(dim=-1)
    wrong_sizes = (guesses.log_sizes[truths.places] - log_sizes).square().sum(dim=-1)
    return COORDINATE_SCALE * (weights * (wrong_offsets + wrong_sizes)).sum() / 2


def _class_loss(guesses: Guesses, truths: Truths) -> Tensor:
    """Cross entropy of the guesses that answer for an object."""
    return CLASS_SCALE * cross_entropy(guesses.class_scores[truths.places], truths.labels, reduction="sum")
