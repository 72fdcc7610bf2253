"""Boxes as tensors: x1, y1, x2, y2 in pixels, how much two of them overlap, and the best of many.

    >>> intersection_over_union(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[1.0, 0, 3, 2]]))
    tensor([[0.3333]])

Read aloud: two squares of area 4 share an area of 2 and together cover 6, so they overlap by a third.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """What was found in one image: boxes (K, 4), scores (K) from 0 to 1, labels (K)."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.scores)

    def pick(self, chosen: Tensor) -> Detections:
        """Those that a mask or a list of positions chooses."""
        return Detections(self.boxes[chosen], self.scores[chosen], self.labels[chosen])


def to_centers(corners: Tensor) -> Tensor:
    """Boxes x1, y1, x2, y2 as centre x, centre y, width, height."""
    low, high = corners[..., :2], corners[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def to_corners(centers: Tensor) -> Tensor:
    """Boxes centre x, centre y, width, height as x1, y1, x2, y2."""
    middle, half = centers[..., :2], centers[..., 2:] / 2
    return torch.cat([middle - half, middle + half], dim=-1)


def intersection_over_union(left: Tensor, right: Tensor) -> Tensor:
    """The overlap of every box of `left` (..., L, 4) with every box of `right` (..., R, 4): (..., L, R)."""
    return paired_intersection_over_union(left[..., :, None, :], right[..., None, :, :])


def paired_intersection_over_union(left: Tensor, right: Tensor) -> Tensor:
    """The overlap of boxes at the same place of both; 0 where one has no area or is turned inside out."""
    low = torch.maximum(left[..., :2], right[..., :2])
    high = torch.minimum(left[..., 2:], right[..., 2:])
    shared = (high - low).clamp(min=0).prod(dim=-1)
    together = _areas(left) + _areas(right) - shared
    return shared / together.clamp(min=torch.finfo(together.dtype).tiny)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).prod(dim=-1)


def non_maximum_suppression(found: Detections, max_overlap: float) -> Detections:
    """The best first, without those that overlap a better one of the same label by more than that."""
    kept = [torch.empty(0, dtype=torch.long, device=found.scores.device)]
    for label in found.labels.unique():
        places = torch.nonzero(found.labels == label).flatten()
        kept.append(places[_best(found.boxes[places], found.scores[places], max_overlap)])
    places = torch.cat(kept)
    order = torch.argsort(found.scores[places], descending=True, stable=True)
    return found.pick(places[order])


def _best(boxes: Tensor, scores: Tensor, max_overlap: float) -> Tensor:
    """Positions of the boxes that no better kept box overlaps too much.

    Whether a box is kept depends on better ones alone, so after n rounds at least the n best are decided,
    and a round that changes nothing has decided all. Chains of overlaps are short: a few rounds do.
    """
    order = torch.argsort(scores, descending=True, stable=True)
    overlaps = intersection_over_union(boxes[order], boxes[order]) > max_overlap
    beats = overlaps.triu(diagonal=1)
    kept = torch.ones_like(order, dtype=torch.bool)
    while True:
        decided = ~(beats & kept[:, None]).any(dim=0)
        if torch.equal(decided, kept):
            return order[kept]
        kept = decided
