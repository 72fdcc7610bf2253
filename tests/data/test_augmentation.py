"""Boxes stay on their objects through every change, and changes are what they are called."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from manyhands.data.augmentation import Recipe, arrange, draw, move, order, paint, with_channels
from manyhands.data.samples import Kind
from manyhands.errors import RequestError
from manyhands.ir.geometry import Span

OBJECT = 240
BACKGROUND = 30


def scene(rows: int, columns: int, box: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """A bright object on a dark ground."""
    image = np.full((rows, columns, 3), BACKGROUND, np.uint8)
    x1, y1, x2, y2 = box
    image[y1:y2, x1:x2] = OBJECT
    return image


@st.composite
def scenes(draw_from: st.DrawFn) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    rows, columns = draw_from(st.integers(20, 90)), draw_from(st.integers(20, 90))
    x1, y1 = draw_from(st.integers(0, columns - 12)), draw_from(st.integers(0, rows - 12))
    x2, y2 = draw_from(st.integers(x1 + 10, columns)), draw_from(st.integers(y1 + 10, rows))
    box = (x1, y1, x2, y2)
    return scene(rows, columns, box), np.array([[1, *box]], np.float32)


def finished(recipe: Recipe, images: list[NDArray[np.uint8]], boxes: list[NDArray[np.float32]], chance):
    """The whole picture (rows, columns, channels) and its boxes."""
    _, rows, columns = recipe.size
    placements = arrange(recipe, Kind.BOXES, [image.shape[:2] for image in images], chance)
    part = Span(0, rows), Span(0, columns)
    picture = paint(recipe, Kind.BOXES, placements, images.__getitem__, chance, *part)
    return picture.transpose(1, 2, 0), move(recipe, placements, boxes, chance)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(scenes(), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 12),
    st.integers(0),
)
def test_a_box_holds_its_object_and_nothing_else(
    four, mosaic: bool, flip: bool, crop: int, seed: int
) -> None:
    """Pixels well inside a box are bright; bright pixels are in a box, or in one too small to keep."""
    recipe = Recipe((3, 64, 80), crop=crop, flip=flip, mosaic=mosaic)
    used = four if mosaic else four[:1]
    picture, boxes = finished(recipe, [s[0] for s in used], [s[1] for s in used], draw(seed, 0, 0, 9))
    bright = picture[:, :, 0] > (OBJECT + BACKGROUND) / 2
    for _, x1, y1, x2, y2 in boxes:
        assert 0 <= x1 < x2 <= 80 and 0 <= y1 < y2 <= 64
        assert bright[int(np.ceil(y1 + 1)) : int(y2 - 1), int(np.ceil(x1 + 1)) : int(x2 - 1)].all()
        bright[max(0, int(y1 - 1)) : int(np.ceil(y2 + 1)), max(0, int(x1 - 1)) : int(np.ceil(x2 + 1))] = False
    if len(boxes) == len(used):
        assert not bright.any()


def test_a_box_that_hardly_shows_is_dropped() -> None:
    recipe = Recipe((3, 100, 100), crop=20)
    image = scene(100, 100, (90, 40, 100, 50))
    chance = replace(draw(0, 0, 0, 1), shift=(0.5, 0.999))  # 20 to the right: the object is outside
    picture, boxes = finished(recipe, [image], [np.array([[0, 90, 40, 100, 50]], np.float32)], chance)
    assert len(boxes) == 0 and picture.max() < OBJECT
    wide = np.array([[0, 50, 40, 100, 50], [0, 50, 40, 82, 50], [0, 78, 40, 100, 50]], np.float32)
    _, boxes = finished(recipe, [image], [wide], chance)
    assert boxes.tolist() == [[0, 70, 40, 100, 50], [0, 70, 40, 100, 50]]


def test_of_too_many_boxes_the_largest_stay_in_their_order() -> None:
    boxes = np.array([[n, 0, 0, size, size] for n, size in enumerate((5, 30, 10, 20))], np.float32)
    _, kept = finished(Recipe((3, 40, 40), max_boxes=2), [scene(40, 40, (0, 0, 5, 5))], [boxes], None)
    assert kept[:, 0].tolist() == [1, 3]


def test_letterbox_keeps_the_shape_and_stands_in_the_middle() -> None:
    picture, boxes = finished(
        Recipe((3, 40, 40)),
        [scene(10, 20, (0, 0, 20, 10))],
        [np.array([[0, 0, 0, 20, 10]], np.float32)],
        None,
    )
    assert boxes.tolist() == [[0, 0, 10, 40, 30]]
    assert (picture[10:30] == OBJECT).all() and (picture[:10] == 114).all() and (picture[30:] == 114).all()


def labelled(recipe: Recipe, image: NDArray[np.uint8], chance) -> NDArray[np.uint8]:
    placements = arrange(recipe, Kind.CLASSES, [image.shape[:2]], chance)
    part = Span(0, recipe.size[1]), Span(0, recipe.size[2])
    return paint(recipe, Kind.CLASSES, placements, lambda _: image, chance, *part).transpose(1, 2, 0)


def test_crop_is_padding_and_a_random_window_of_every_place() -> None:
    image = np.random.default_rng(0).integers(1, 256, size=(8, 8, 3), dtype=np.uint8)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    windows = {padded[r : r + 8, c : c + 8].tobytes() for r in range(5) for c in range(5)}
    seen = {labelled(Recipe((3, 8, 8), crop=2), image, draw(0, 0, n, 1)).tobytes() for n in range(400)}
    assert seen == windows


def test_half_of_the_pictures_are_mirrored() -> None:
    image = np.random.default_rng(0).integers(1, 256, size=(8, 8, 3), dtype=np.uint8)
    pictures = [labelled(Recipe((3, 8, 8), flip=True), image, draw(0, 0, n, 1)) for n in range(400)]
    mirrored = [np.array_equal(picture, image[:, ::-1]) for picture in pictures]
    plain = [np.array_equal(picture, image) for picture in pictures]
    assert sum(mirrored) + sum(plain) == 400 and 150 < sum(mirrored) < 250


def test_resizing_covers_and_takes_the_middle() -> None:
    image = np.zeros((8, 32, 3), np.uint8)
    image[:, 12:20] = 200
    assert (labelled(Recipe((3, 8, 8), resize=True), image, None) == 200).all()


@given(st.integers(0), st.floats(0.01, 0.9))
def test_colour_keeps_grey_grey_and_stays_within_its_strength(seed: int, strength: float) -> None:
    image = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    picture = labelled(Recipe((3, 16, 16), colour=strength), image, draw(seed, 0, 0, 1)).astype(int)
    assert np.ptp(picture, axis=2).max() <= 1  # luma's weights add up to one, up to rounding
    reach = 255 * ((1 + strength) ** 2 - 1) + 128 * strength + 1
    assert np.abs(picture - image).max() <= reach
    assert (np.diff(picture[:, :, 0].ravel()) >= 0).all()  # brighter stays brighter


def test_saturation_pulls_towards_luma() -> None:
    chance = replace(draw(0, 0, 0, 1), colour=(0.5, 0.5, 0.0))
    image = np.full((4, 4, 3), (200, 100, 50), np.uint8)
    luma = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    expected = [0.2 * value + 0.8 * luma for value in (200, 100, 50)]
    np.testing.assert_allclose(labelled(Recipe((3, 4, 4), colour=0.8), image, chance)[0, 0], expected, atol=1)


def test_turning_one_change_on_leaves_the_others_as_they_were() -> None:
    image = np.random.default_rng(0).integers(60, 190, size=(8, 8, 3), dtype=np.uint8)
    for number in range(20):
        chance = draw(5, 2, number, 50)
        shifted = labelled(Recipe((3, 8, 8), crop=2), image, chance)
        both = labelled(Recipe((3, 8, 8), crop=2, flip=True), image, chance)
        assert np.array_equal(both, shifted) or np.array_equal(both, shifted[:, ::-1])


def test_chance_depends_on_seed_epoch_and_sample() -> None:
    drawn = {draw(seed, epoch, index, 100) for seed in range(3) for epoch in range(3) for index in range(3)}
    assert len(drawn) == 27 and draw(1, 2, 0, 100) == draw(1, 2, 0, 100)
    assert not np.array_equal(order(0, 0, 20), order(0, 1, 20))
    assert sorted(order(3, 4, 20)) == list(range(20))


def test_grey_and_colour_become_each_other() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    assert np.array_equal(with_channels(grey, 3), np.repeat(grey, 3, axis=2))
    assert np.array_equal(with_channels(np.repeat(grey, 3, axis=2), 1), grey)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mean": (0.1, 0.2)}, "mean has 2 numbers, images have 3 channels"),
        ({"size": (3, 0, 8)}, "3x0x8 is not the size of an image. Write it like 3x224x224."),
        ({"colour": 1.5}, "colour 1.5 must be from 0 to below 1"),
        ({"std": (0.0,)}, "std 0 above 0"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Recipe(**({"size": (3, 8, 8)} | wrong))
