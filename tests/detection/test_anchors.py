"""Anchors lie where the boxes of a data set are."""

import pytest
import torch
from torch import Tensor

from manyhands.detection.anchors import Anchors, kmeans_anchors, size_overlaps
from manyhands.errors import RequestError

TYPICAL = ((1.0, 2.0), (6.0, 3.0), (20.0, 30.0))


def sizes_around(typical: Anchors, each: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    middles = torch.tensor(typical, dtype=torch.float64).repeat_interleave(each, dim=0)
    return middles * (1 + spread * (2 * torch.rand(middles.shape, generator=generator) - 1))


def mean_best_overlap(sizes: Tensor, anchors: Anchors) -> float:
    return float(size_overlaps(sizes, torch.tensor(anchors, dtype=torch.float64)).amax(dim=1).mean())


@pytest.mark.parametrize("seed", range(5))
def test_three_kinds_of_boxes_give_three_anchors_smallest_first(seed: int) -> None:
    anchors = kmeans_anchors(sizes_around(TYPICAL, each=40, spread=0.1), 3, seed)
    torch.testing.assert_close(torch.tensor(anchors), torch.tensor(TYPICAL), rtol=0.05, atol=0)


def test_as_many_anchors_as_sizes_are_the_sizes() -> None:
    sizes = torch.tensor([[4.0, 4.0], [1.0, 2.0], [1.0, 2.0], [9.0, 3.0]])
    assert kmeans_anchors(sizes, 3, seed=1) == ((1.0, 2.0), (4.0, 4.0), (9.0, 3.0))


def test_the_seed_decides_and_the_unit_does_not_matter() -> None:
    sizes = torch.rand(200, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1
    anchors = kmeans_anchors(sizes, 5, seed=7)
    assert anchors == kmeans_anchors(sizes, 5, seed=7)
    in_pixels = torch.tensor(kmeans_anchors(sizes * 32, 5, seed=7))
    torch.testing.assert_close(in_pixels, torch.tensor(anchors) * 32)


@pytest.mark.parametrize("seed", range(5))
def test_they_fit_better_than_sizes_drawn_at_random(seed: int) -> None:
    sizes = torch.rand(300, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05
    found = mean_best_overlap(sizes, kmeans_anchors(sizes, 5, seed))
    drawn = [
        tuple(
            (w, h)
            for w, h in sizes[torch.randperm(300, generator=torch.Generator().manual_seed(s))[:5]].tolist()
        )
        for s in range(50)
    ]
    assert found > max(mean_best_overlap(sizes, anchors) for anchors in drawn)


def test_small_boxes_count_as_much_as_large_ones() -> None:
    """By plain distance both anchors would go to the large boxes, whose differences in pixels are larger."""
    sizes = torch.tensor([[1.0, 4.0], [4.0, 1.0]] * 20 + [[100.0, 100.0], [130.0, 130.0]] * 2)
    small = [min(anchor) for anchor in kmeans_anchors(sizes, 3, seed=0) if max(anchor) < 50]
    assert len(small) == 2


@pytest.mark.parametrize("k", [0, 3])
def test_more_anchors_than_sizes_are_refused(k: int) -> None:
    with pytest.raises(RequestError, match=f"{k} anchors of 2 different sizes.*Ask for 1 to 2"):
        kmeans_anchors(torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 1.0]]), k, seed=0)


def test_sizes_must_be_sizes() -> None:
    with pytest.raises(RequestError, match="above 0"):
        kmeans_anchors(torch.tensor([[1.0, 0.0]]), 1, seed=0)
