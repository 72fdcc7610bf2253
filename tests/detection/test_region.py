"""The region layer: its loss has Darknet's gradient, and reading it is the inverse of learning it."""

import pytest
import torch
from torch import Tensor

from manyhands.detection.precision import mean_average_precision
from manyhands.detection.region import RegionLoss, decode, detect
from manyhands.errors import RequestError
from tests.detection import darknet
from tests.detection.scenes import ANCHORS, NUM_CLASSES, random_output, random_targets

LOSS = RegionLoss(ANCHORS, NUM_CLASSES)


def scene(seed: int, batch: int = 2, rows: int = 4, columns: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = random_targets(generator, batch, rows, columns)
    return random_output(generator, batch, rows, columns), targets


def near(output: Tensor, targets: Tensor, seed: int) -> Tensor:
    """The output, with guesses of every anchor at the objects, of about their sizes: some good, some not."""
    generator = torch.Generator().manual_seed(seed)
    output = output.clone()
    for image, truths in zip(output.unflatten(1, (len(ANCHORS), -1)), targets.tolist(), strict=True):
        for truth in ([value / 32 for value in row[1:]] for row in truths if row[0] >= 0):
            _, row, column = darknet.answering(truth)
            center = torch.tensor([(truth[0] + truth[2]) / 2 - column, (truth[1] + truth[3]) / 2 - row])
            size = torch.tensor([truth[2] - truth[0], truth[3] - truth[1]])
            for anchor in range(len(ANCHORS)):
                image[anchor, :2, row, column] = center.logit()
                image[anchor, 2:4, row, column] = (size / torch.tensor(ANCHORS[anchor])).log()
                image[anchor, 2:4, row, column] += 0.25 * torch.randn(2, generator=generator)
    return output


def value_and_gradient(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    output = output.clone().requires_grad_()
    loss = LOSS(output, targets)
    (gradient,) = torch.autograd.grad(loss, output)
    return loss.detach(), gradient


@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_darknets(seed: int) -> None:
    output, targets = scene(seed)
    if seed % 2:
        output = near(output, targets, seed)
    expected_loss, expected_gradient = darknet.region(output, targets)
    loss, gradient = value_and_gradient(output, targets)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-13)


def test_the_scenes_have_good_guesses_that_answer_for_nothing() -> None:
    """Else the test above would not see the threshold: their confidence has no gradient at all."""
    output, targets = scene(1)
    _, gradient = value_and_gradient(near(output, targets, 1), targets)
    assert int((gradient.unflatten(1, (len(ANCHORS), -1))[:, :, 4] == 0).sum()) > 0


def test_float32_is_float64_rounded() -> None:
    output, targets = scene(3)
    loss, gradient = value_and_gradient(output, targets)
    single_loss, single_gradient = value_and_gradient(output.float(), targets.float())
    assert single_loss.dtype == torch.float32
    torch.testing.assert_close(single_loss, loss.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(single_gradient, gradient.float(), rtol=1e-4, atol=1e-6)


def test_gradients_of_confidences_and_classes_are_those_of_small_changes() -> None:
    """Boxes are left out: no gradient flows through the overlap that a confidence is to reach."""
    output, targets = scene(5, batch=1, rows=2, columns=3)
    whole = output.unflatten(1, (len(ANCHORS), -1))
    rest = whole[:, :, 4:].clone().requires_grad_()

    def loss(rest: Tensor) -> Tensor:
        return LOSS(torch.cat([whole[:, :, :4], rest], dim=2).flatten(1, 2), targets)

    assert torch.autograd.gradcheck(loss, (rest,))


def test_gradients_of_boxes_are_those_of_small_changes_where_the_confidence_has_nothing_to_learn() -> None:
    """With a confidence of 0 or 1 by rounding the overlap does not matter, and all else has its gradient."""
    output, targets = scene(6, batch=1, rows=2, columns=3)
    whole = output.unflatten(1, (len(ANCHORS), -1)).clone()
    whole[:, :, 4] = -800.0
    boxes = whole[:, :, :4].clone().requires_grad_()

    def box_loss(boxes: Tensor) -> Tensor:
        everything = torch.cat([boxes, whole[:, :, 4:]], dim=2).flatten(1, 2)
        return LOSS(everything, targets) - _overlap_part(everything, targets)

    assert torch.autograd.gradcheck(box_loss, (boxes,))


def _overlap_part(output: Tensor, targets: Tensor) -> Tensor:
    """What the object's confidence, being 0, adds to the loss: 5/2 of the squared overlap."""
    added = 0.0
    for image, truths in zip(output.detach().unflatten(1, (len(ANCHORS), -1)), targets.tolist(), strict=True):
        answered = {}
        for label, *corners in truths:
            if label >= 0:
                truth = [value / 32 for value in corners]
                answered[darknet.answering(truth)] = truth
        for (anchor, row, column), truth in answered.items():
            box = darknet.guess(image[anchor, :, row, column], anchor, row, column)
            added += 2.5 * darknet.overlap(box, truth) ** 2
    return output.new_tensor(added / len(output))


def assert_same_lesson(output: Tensor, left: Tensor, right: Tensor) -> None:
    """Both targets give the same loss and the same gradient."""
    for one, other in zip(value_and_gradient(output, left), value_and_gradient(output, right), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


def test_boxes_outside_or_without_area_change_nothing() -> None:
    output, targets = scene(2)
    nothing = torch.tensor([[2.0, 40, 40, 40, 90], [1, 500, 10, 600, 50], [3, -9, -9, 0, 5]]).double()
    assert_same_lesson(output, targets, torch.cat([targets, nothing.expand(2, -1, -1)], dim=1))


def test_padding_changes_nothing_even_where_guesses_or_objects_are() -> None:
    output, targets = scene(2)
    guessed = torch.stack([found.boxes[:20] for found in decode(output, ANCHORS, NUM_CLASSES, 0.05)])
    boxes = torch.cat([targets[..., 1:], guessed], dim=1)
    padding = torch.cat([torch.full_like(boxes[..., :1], -1), boxes], dim=2)
    assert_same_lesson(output, targets, torch.cat([targets, padding], dim=1))


def test_a_box_beyond_the_border_counts_as_its_part_inside() -> None:
    output, _ = scene(2, batch=1)
    beyond = torch.tensor([[[1.0, -40, 20, 50, 70]]]).double()
    inside = torch.tensor([[[1.0, 0, 20, 50, 70]]]).double()
    assert LOSS(output, beyond) == LOSS(output, inside)


def test_a_box_at_the_far_edge_belongs_to_the_last_cell() -> None:
    """In float32 the centre of the thinnest box is the edge itself, where the next cell would begin."""
    edge = torch.tensor([192.0, 128.0])
    thinnest = torch.cat([torch.ones(1), torch.nextafter(edge, torch.zeros(2)), edge])
    assert torch.isfinite(LOSS(scene(2, batch=1)[0].float(), thinnest[None, None]))


def test_the_loss_of_a_batch_is_the_mean_of_its_images() -> None:
    output, targets = scene(4, batch=3)
    each = [LOSS(one[None], truths[None]) for one, truths in zip(output, targets, strict=True)]
    torch.testing.assert_close(LOSS(output, targets), torch.stack(each).mean())


def test_of_two_objects_for_one_guess_the_later_is_learned() -> None:
    output, _ = scene(0, batch=1)
    two = torch.tensor([[[0.0, 33, 33, 60, 68], [2, 34, 35, 61, 67]]]).double()
    _, gradient = value_and_gradient(output, two)
    _, expected = darknet.region(output, two)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)
    _, reverse = value_and_gradient(output, two.flip(1))
    assert not torch.allclose(gradient, reverse)


@pytest.mark.parametrize("rows_of_targets", [0, 3])
def test_images_without_objects_teach_that_there_is_nothing(rows_of_targets: int) -> None:
    output, _ = scene(0)
    loss, gradient = value_and_gradient(output, torch.full((2, rows_of_targets, 5), -1.0).double())
    confidences = output.unflatten(1, (len(ANCHORS), -1))[:, :, 4].sigmoid()
    torch.testing.assert_close(loss, confidences.square().sum() / 4)
    assert (gradient.unflatten(1, (len(ANCHORS), -1))[:, :, 5:] == 0).all()


def test_what_an_untrained_layer_may_say_gives_no_nan() -> None:
    output, targets = scene(0)
    for scale in (1e3, -1e3):
        loss, gradient = value_and_gradient((output * scale).float(), targets.float())
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()
        found = decode((output * scale).float(), ANCHORS, NUM_CLASSES, 0.1)
        assert all(torch.isfinite(image.boxes).all() for image in found)


def test_following_the_gradient_leads_to_the_targets() -> None:
    """The output itself is trained: what is then read from it are the objects of the targets."""
    output, _ = scene(0, rows=6, columns=6)
    targets = torch.full((2, 3, 5), -1.0).double()
    targets[0, 0] = torch.tensor([1.0, 10, 20, 100, 90])
    targets[0, 2] = torch.tensor([3.0, 90, 100, 130, 190])
    targets[1, 1] = torch.tensor([0.0, 64, 0, 190, 100])
    output.requires_grad_()
    optimiser = torch.optim.Adam([output], lr=0.2)
    for _ in range(150):
        optimiser.zero_grad()
        torch.autograd.backward(LOSS(output, targets))
        optimiser.step()
    found = detect(output, ANCHORS, NUM_CLASSES, threshold=0.5)
    assert [len(image) for image in found] == [2, 1]
    assert mean_average_precision(found, targets, min_overlap=0.95) == 1


def test_decoding_says_what_the_layer_says() -> None:
    output, _ = scene(9)
    threshold = 0.3
    found = decode(output, ANCHORS, NUM_CLASSES, threshold)
    for image, detections in zip(output.unflatten(1, (len(ANCHORS), -1)), found, strict=True):
        expected = []
        for anchor in range(len(ANCHORS)):
            for row in range(4):
                for column in range(6):
                    values = image[anchor, :, row, column]
                    box = [32 * edge for edge in darknet.guess(values, anchor, row, column)]
                    box = [min(max(edge, 0), size) for edge, size in zip(box, (192, 128) * 2, strict=True)]
                    scores = darknet.sigmoid(float(values[4])) * values[5:].softmax(0)
                    expected += [
                        [*box, float(score), label] for label, score in enumerate(scores) if score > threshold
                    ]
        columns = (detections.boxes, detections.scores[:, None], detections.labels[:, None])
        torch.testing.assert_close(torch.cat(columns, dim=1), torch.tensor(expected).double())
        assert expected


def test_detecting_is_decoding_without_doubles() -> None:
    """Two cells tell of one box: the surer one is kept. The same box of another class is kept too."""
    output = torch.full((1, len(ANCHORS), 5 + NUM_CLASSES, 4, 4), -20.0).double()
    output[0, 0, :2, 1, 1] = torch.tensor([20.0, 0.0])  # at the right edge of its cell
    output[0, 0, :2, 1, 2] = torch.tensor([-20.0, 0.0])  # at the left edge of the next
    output[0, 0, 2:4, 1, 1:3] = 0
    output[0, 0, 4, 1, 1:3] = torch.tensor([3.0, 2.0])
    output[0, 0, 5:7, 1, 1:3] = 20
    (decoded,), (kept,) = (
        read(output.flatten(1, 2), ANCHORS, NUM_CLASSES, threshold=0.2) for read in (decode, detect)
    )
    assert len(decoded) == 4
    assert sorted(kept.labels.tolist()) == [0, 1]
    assert kept.scores.tolist() == pytest.approx([darknet.sigmoid(3) / 2] * 2)


@pytest.mark.parametrize(
    ("output", "targets", "words"),
    [
        (torch.zeros(1, 26, 2, 2), torch.zeros(1, 1, 5), "takes 27 channels"),
        (torch.zeros(1, 27, 2, 2), torch.zeros(1, 5), "must be 1 x boxes x 5"),
        (torch.zeros(2, 27, 2, 2), torch.zeros(1, 1, 5), "must be 2 x boxes x 5"),
        (torch.zeros(1, 27, 2, 2), torch.tensor([[[4.0, 0, 0, 9, 9]]]), "label 4.*4 classes, 0 to 3"),
    ],
)
def test_what_does_not_fit_is_refused(output: Tensor, targets: Tensor, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        LOSS(output, targets)
