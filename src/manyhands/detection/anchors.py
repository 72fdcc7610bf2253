"""Anchors: the widths and heights, in cells of the grid, from which a detector guesses sizes."""

import torch
from torch import Tensor

from manyhands.detection.boxes import paired_intersection_over_union
from manyhands.errors import RequestError

Anchors = tuple[tuple[float, float], ...]

# Of Darknet's yolov2-voc.cfg: five typical sizes in Pascal VOC's images, on a grid of 13x13.
VOC_ANCHORS: Anchors = (
    (1.3221, 1.73145),
    (3.19275, 4.00944),
    (5.05587, 8.09892),
    (9.47112, 4.84053),
    (11.2364, 10.0071),
)
MAX_ROUNDS = 300


def size_overlaps(left: Tensor, right: Tensor) -> Tensor:
    """Intersection over union of every size (L, 2) with every size (R, 2), corner upon corner: (L, R)."""
    left, right = (torch.cat([torch.zeros_like(sizes), sizes], dim=-1) for sizes in (left, right))
    return paired_intersection_over_union(left[..., :, None, :], right[..., None, :, :])


def kmeans_anchors(sizes: Tensor, k: int, seed: int) -> Anchors:
    """k sizes near which those of `sizes` (B, 2) lie, in the same unit, the smallest area first.

    Near means a large overlap, whatever the size: by plain distance a large box would count for more. A mean
    need not be the best middle by this measure, so rounds may circle; the best that was seen is returned.
    """
    sizes = sizes.detach().double()
    if sizes.ndim != 2 or sizes.shape[1] != 2 or not bool((sizes > 0).all()):
        raise RequestError(f"sizes {tuple(sizes.shape)} for anchors must be widths and heights above 0.")
    distinct = len(sizes.unique(dim=0))
    if not 1 <= k <= distinct:
        raise RequestError(f"{k} anchors of {distinct} different sizes of boxes. Ask for 1 to {distinct}.")
    middles = _spread_start(sizes, k, torch.Generator().manual_seed(seed))
    best, best_overlap = middles, 0.0
    for _ in range(MAX_ROUNDS):
        overlap, nearest = size_overlaps(sizes, middles).max(dim=1)
        if float(overlap.mean()) > best_overlap:
            best, best_overlap = middles, float(overlap.mean())
        moved = _means(sizes, nearest, middles)
        if torch.equal(moved, middles):
            break
        middles = moved
    ordered = best[torch.argsort(best.prod(dim=1))]
    return tuple((width, height) for width, height in ordered.tolist())


def _spread_start(sizes: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k of the sizes, each drawn the more likely the less the ones before overlap it (k-means++)."""
    chosen = [int(torch.randint(len(sizes), (1,), generator=generator))]
    while len(chosen) < k:
        distance = 1 - size_overlaps(sizes, sizes[chosen]).amax(dim=1)
        # What rounding leaves of a size already chosen must not be drawn again.
        distance = torch.where(distance < 1e-12, 0.0, distance)
        chosen.append(int(torch.multinomial(distance.square(), 1, generator=generator)))
    return sizes[chosen]


def _means(sizes: Tensor, nearest: Tensor, middles: Tensor) -> Tensor:
    """The mean size of each group; a middle that is nearest to none stays where it is."""
    members = torch.nn.functional.one_hot(nearest, len(middles)).to(sizes.dtype)
    counts = members.sum(dim=0)[:, None]
    return torch.where(counts > 0, members.T @ sizes / counts.clamp(min=1), middles)
