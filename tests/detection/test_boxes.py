"""Overlaps and suppression agree with plain arithmetic."""

import pytest
import torch

from manyhands.detection.boxes import (
    Detections,
    intersection_over_union,
    non_maximum_suppression,
    to_centers,
    to_corners,
)
from tests.detection.scenes import overlap, random_boxes


def crowded(seed: int, count: int = 60) -> Detections:
    """Many boxes in a small image, of three labels."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (count,), generator=generator)
    return Detections(random_boxes(generator, count, 100.0, 60.0), scores, labels)


def test_overlaps_are_those_of_plain_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = random_boxes(generator, 30, 90.0, 50.0), random_boxes(generator, 20, 90.0, 50.0)
    expected = [[overlap(one, other) for other in right.tolist()] for one in left.tolist()]
    actual = intersection_over_union(left, right)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    assert (actual == 0).any() and (actual > 0.5).any()


def test_boxes_without_area_overlap_nothing() -> None:
    boxes = torch.tensor([[3.0, 3, 3, 3], [5, 5, 2, 2], [0, 0, 10, 10]])
    overlaps = intersection_over_union(boxes, boxes)
    assert overlaps.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]


def test_centers_and_corners_are_the_same_boxes() -> None:
    assert to_centers(torch.tensor([1.0, 2, 5, 10])).tolist() == [3, 6, 4, 8]
    boxes = random_boxes(torch.Generator().manual_seed(1), 50, 100.0, 100.0)
    torch.testing.assert_close(to_corners(to_centers(boxes)), boxes)


def greedy(found: Detections, max_overlap: float) -> list[int]:
    """Positions kept by the textbook's loop, the best first."""
    kept: list[int] = []
    for place in sorted(range(len(found)), key=lambda place: -float(found.scores[place])):
        rivals = [other for other in kept if found.labels[other] == found.labels[place]]
        boxes = found.boxes.tolist()
        if all(overlap(boxes[place], boxes[other]) <= max_overlap for other in rivals):
            kept.append(place)
    return kept


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_overlap", [0.1, 0.3, 0.5])
def test_suppression_keeps_what_the_textbook_keeps(seed: int, max_overlap: float) -> None:
    found = crowded(seed)
    expected = greedy(found, max_overlap)
    kept = non_maximum_suppression(found, max_overlap)
    assert kept.scores.tolist() == found.scores[expected].tolist()
    assert kept.boxes.tolist() == found.boxes[expected].tolist()
    assert kept.labels.tolist() == found.labels[expected].tolist()
    assert len(kept) < len(found)


def test_a_suppressed_box_suppresses_nothing() -> None:
    """The second falls to the first, and so the third, which only the second overlaps, stays."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [4, 0, 14, 10], [8, 0, 18, 10]])
    found = Detections(boxes, torch.tensor([0.9, 0.8, 0.7]), torch.zeros(3, dtype=torch.long))
    assert non_maximum_suppression(found, 0.3).scores.tolist() == pytest.approx([0.9, 0.7])


def test_nothing_found_stays_nothing() -> None:
    nothing = Detections(torch.empty(0, 4), torch.empty(0), torch.empty(0, dtype=torch.long))
    assert len(non_maximum_suppression(nothing, 0.5)) == 0
