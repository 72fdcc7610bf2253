"""Mean average precision: cases counted by hand, and a slow version that scans every threshold."""

import pytest
import torch
from torch import Tensor

from manyhands.detection.boxes import Detections
from manyhands.detection.precision import average_precisions, mean_average_precision
from manyhands.errors import RequestError
from tests.detection.scenes import overlap, random_boxes

LEFT, RIGHT, NOWHERE = [0.0, 0, 10, 10], [20.0, 0, 30, 10], [50.0, 50, 60, 60]


def found(*rows: tuple[list[float], float, int]) -> Detections:
    boxes, scores, labels = zip(*rows, strict=True) if rows else ((), (), ())
    return Detections(
        torch.tensor(boxes).reshape(-1, 4), torch.tensor(scores), torch.tensor(labels, dtype=torch.long)
    )


def truth(*rows: tuple[int, list[float]]) -> Tensor:
    return torch.tensor([[float(label), *box] for label, box in rows]).reshape(-1, 5)


BOTH = truth((0, LEFT), (0, RIGHT))


@pytest.mark.parametrize(
    ("detections", "expected"),
    [
        (found((LEFT, 0.9, 0), (RIGHT, 0.8, 0)), 1.0),
        (found((LEFT, 0.9, 0)), 0.5),
        (found(), 0.0),
        (found((LEFT, 0.9, 1), (RIGHT, 0.8, 1)), 0.0),
        # right, wrong, right: precisions 1 and 2/3 at recalls 1/2 and 1
        (found((LEFT, 0.9, 0), (NOWHERE, 0.8, 0), (RIGHT, 0.7, 0)), 0.5 + 0.5 * 2 / 3),
        # wrong, right, right: 1/2 and 2/3, and the better one holds for both
        (found((NOWHERE, 0.9, 0), (LEFT, 0.8, 0), (RIGHT, 0.7, 0)), 2 / 3),
        # the same object twice: the less sure one is wrong
        (found((LEFT, 0.9, 0), (LEFT, 0.8, 0), (RIGHT, 0.7, 0)), 0.5 + 0.5 * 2 / 3),
        # mistakes below everything that is right cost nothing
        (found((LEFT, 0.9, 0), (RIGHT, 0.8, 0), (NOWHERE, 0.1, 0)), 1.0),
    ],
)
def test_one_class_counted_by_hand(detections: Detections, expected: float) -> None:
    assert mean_average_precision([detections], [BOTH]) == pytest.approx(expected)


def test_an_overlap_of_exactly_a_half_is_enough() -> None:
    half = [0.0, 0, 10, 5]
    assert mean_average_precision([found((half, 0.9, 0))], [truth((0, LEFT))]) == 1
    assert mean_average_precision([found((half, 0.9, 0))], [truth((0, LEFT))], min_overlap=0.51) == 0


def test_classes_count_alike_and_those_that_never_occur_do_not() -> None:
    detections = [found((LEFT, 0.9, 0), (LEFT, 0.8, 5)), found((RIGHT, 0.9, 0))]
    targets = [truth((0, LEFT), (2, RIGHT)), truth((0, RIGHT), (-1, LEFT))]
    assert average_precisions(detections, targets) == {0: 1.0, 2: 0.0}
    assert mean_average_precision(detections, targets) == 0.5


def test_a_box_in_another_image_is_no_hit() -> None:
    targets = [truth((0, LEFT)), truth((0, RIGHT))]
    swapped = [found((RIGHT, 0.9, 0)), found((LEFT, 0.9, 0))]
    assert mean_average_precision(swapped, targets) == 0
    assert mean_average_precision(swapped[::-1], targets) == 1


def test_without_truths_there_is_nothing_to_measure() -> None:
    with pytest.raises(RequestError, match="no boxes"):
        mean_average_precision([found((LEFT, 0.9, 0))], [truth((-1, LEFT))])


def slow(images: list[Detections], targets: list[Tensor], label: int) -> float:
    """Counts from scratch at every threshold, then adds up recall gained times the best precision beyond."""
    num_truths = sum(int((target[:, 0] == label).sum()) for target in targets)
    points = [
        points_above(threshold, images, targets, label, num_truths)
        for threshold in sorted({float(score) for image in images for score in image.scores}, reverse=True)
    ]
    area, recall_before = 0.0, 0.0
    for index, (recall, _) in enumerate(points):
        area += (recall - recall_before) * max(precision for _, precision in points[index:])
        recall_before = recall
    return area


def points_above(
    threshold: float, images: list[Detections], targets: list[Tensor], label: int, num_truths: int
) -> tuple[float, float]:
    """Recall and precision of all detections of at least this score."""
    right = guessed = 0
    for image, target in zip(images, targets, strict=True):
        truths = [row[1:] for row in target.tolist() if row[0] == label]
        rows = zip(image.scores.tolist(), image.boxes.tolist(), image.labels.tolist(), strict=True)
        used = set()
        for score, box, of in sorted(rows, reverse=True):
            if of != label or score < threshold:
                continue
            guessed += 1
            overlaps = [overlap(box, one) for one in truths]
            best = max(range(len(truths)), key=lambda i: overlaps[i], default=None)
            if best is not None and overlaps[best] >= 0.5 and best not in used:
                used.add(best)
                right += 1
    return right / num_truths, right / guessed if guessed else 1.0


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_a_slow_count(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    targets, images = [], []
    for _ in range(6):
        boxes = random_boxes(generator, 5, 100.0, 100.0)
        labels = torch.randint(2, (5, 1), generator=generator)
        targets.append(torch.cat([labels.double(), boxes], dim=1))
        shaken = boxes.repeat(3, 1) + 4 * torch.randn(15, 4, generator=generator, dtype=torch.float64)
        scores = torch.rand(15, generator=generator, dtype=torch.float64)
        images.append(Detections(shaken, scores, labels.flatten().repeat(3)))
    precisions = average_precisions(images, targets)
    assert set(precisions) == {0, 1}
    for label, precision in precisions.items():
        assert precision == pytest.approx(slow(images, targets, label))
        assert 0 < precision < 1
