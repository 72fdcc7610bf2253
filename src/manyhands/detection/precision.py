"""How well objects were found: mean average precision, as Pascal VOC counts it since 2010."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.detection.boxes import Detections, intersection_over_union
from manyhands.errors import RequestError

MIN_OVERLAP = 0.5


def mean_average_precision(
    found: Sequence[Detections], targets: Sequence[Tensor] | Tensor, min_overlap: float = MIN_OVERLAP
) -> float:
    """The mean of the average precisions of all classes that occur in the targets, 0 to 1.

    `targets` holds for each image (M, 5): label, x1, y1, x2, y2; a row of label -1 is padding.
    """
    precisions = average_precisions(found, targets, min_overlap)
    if not precisions:
        raise RequestError(f"there are no boxes in the targets of {len(found)} images to compare with.")
    return sum(precisions.values()) / len(precisions)


def average_precisions(
    found: Sequence[Detections], targets: Sequence[Tensor] | Tensor, min_overlap: float = MIN_OVERLAP
) -> dict[int, float]:
    """The average precision of each class that occurs in the targets."""
    labels = [target[:, 0].long() for target in targets]
    classes = torch.cat([*labels, torch.empty(0, dtype=torch.long)]).unique().tolist()
    precisions = {}
    for label in (label for label in classes if label >= 0):
        of_label = [image.pick(image.labels == label) for image in found]
        truths = [target[of == label, 1:] for target, of in zip(targets, labels, strict=True)]
        hits = [_hits(*pair, min_overlap) for pair in zip(of_label, truths, strict=True)]
        scores = torch.cat([image.scores for image in of_label])
        num_truths = sum(len(boxes) for boxes in truths)
        precisions[label] = _average_precision(scores, torch.cat(hits), num_truths)
    return precisions


def _hits(found: Detections, truths: Tensor, min_overlap: float) -> Tensor:
    """Which detections of one class in one image are right; each truth makes at most one right.

    As in Pascal VOC a detection stands for the truth it overlaps most. If a surer one had that truth
    already, it is wrong, even where it also overlaps another.
    """
    hits = torch.zeros(len(found), dtype=torch.bool, device=found.scores.device)
    if not len(truths) or not len(found):
        return hits
    overlaps, nearest = intersection_over_union(found.boxes, truths.to(found.boxes)).max(dim=1)
    order = torch.argsort(found.scores, descending=True, stable=True)
    order = order[overlaps[order] >= min_overlap]
    taken: set[int] = set()
    for place, truth in zip(order.tolist(), nearest[order].tolist(), strict=True):
        hits[place] = truth not in taken
        taken.add(truth)
    return hits


def _average_precision(scores: Tensor, hits: Tensor, num_truths: int) -> float:
    """The area under precision over recall, precision being the best at that recall or beyond."""
    right = hits[torch.argsort(scores, descending=True, stable=True)].double()
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1, device=right.device)
    envelope = precision.flip(0).cummax(0).values.flip(0)
    return float((envelope * right).sum()) / num_truths
