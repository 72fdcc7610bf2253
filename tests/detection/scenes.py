"""Random scenes for the tests of detection: boxes in pixels, padded targets, and what a layer might say."""

import torch
from torch import Tensor

from manyhands.detection.anchors import Anchors

ANCHORS: Anchors = ((0.8, 1.1), (2.0, 1.5), (1.2, 3.0))
NUM_CLASSES = 4


def random_boxes(generator: torch.Generator, count: int, width: float, height: float) -> Tensor:
    """Boxes of some size inside an image."""
    limits = torch.tensor([width, height], dtype=torch.float64)
    centers = torch.rand(count, 2, generator=generator, dtype=torch.float64) * limits
    halves = (0.05 + 0.3 * torch.rand(count, 2, generator=generator, dtype=torch.float64)) * limits
    low, high = (centers - halves).clamp(min=0), torch.minimum(centers + halves, limits)
    return torch.cat([low, high], dim=1)


def random_targets(generator: torch.Generator, batch: int, rows: int, columns: int) -> Tensor:
    """Targets of three boxes an image and two rows of padding among them."""
    targets = torch.full((batch, 5, 5), -1.0, dtype=torch.float64)
    for image in targets:
        places = torch.randperm(5, generator=generator)[:3]
        image[places, 0] = torch.randint(NUM_CLASSES, (3,), generator=generator).double()
        image[places, 1:] = random_boxes(generator, 3, columns * 32.0, rows * 32.0)
    return targets


def random_output(generator: torch.Generator, batch: int, rows: int, columns: int) -> Tensor:
    shape = (batch, len(ANCHORS) * (5 + NUM_CLASSES), rows, columns)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def overlap(left: list[float], right: list[float]) -> float:
    """Intersection over union of two boxes, in plain arithmetic."""
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (left, right)]
    return shared / (sum(areas) - shared)
