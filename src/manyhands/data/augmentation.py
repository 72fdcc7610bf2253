"""Where the pixels of a training image come from: scaling, shifts, mirroring, mosaics, colours.

Everything random about a sample is drawn from (seed, epoch, sample) alone, and pixels are worked on in whole
numbers, one at a time; so any device that paints any part of an image paints the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from manyhands.data.samples import Boxes, Image, Kind
from manyhands.errors import RequestError
from manyhands.ir.geometry import Span

Size = tuple[int, int]  # rows, columns

BLACK, GREY = 0, 114  # what lies around an image with a label, and around one with boxes
LEAST_PIXELS = 1.0  # a box that shows less than this in height or width is dropped,
LEAST_SHARE = 0.2  # and so is one that shows less than this share of its area
SMALLEST_IN_MOSAIC = 0.5  # the least an image of a mosaic is scaled to, as a share of its size alone
LUMA = np.array([0.299, 0.587, 0.114])
ONE = 1024  # colours are mixed in whole numbers of 1/1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a picture becomes an input: size (channels, rows, columns), random changes, mean and deviation.

    Images with boxes are scaled to fit and stand in the middle of grey (letterbox), shapes kept. Images with
    a label must have the size already; with `resize` they are scaled to cover it and the middle is taken.
    """

    size: tuple[int, int, int]
    crop: int = 0  # shift by up to this many pixels each way
    flip: bool = False  # mirror left and right, half of the time
    colour: float = 0.0  # change brightness, contrast and saturation by up to this share
    mosaic: bool = False  # put four images with boxes together
    mean: tuple[float, ...] = (0.0,)  # of each channel or of all, of values from 0 to 1
    std: tuple[float, ...] = (1.0,)
    resize: bool = False
    max_boxes: int = 100  # where there are more, the largest stay

    def __post_init__(self) -> None:
        channels = self.size[0]
        if len(self.size) != 3 or min(self.size) < 1:
            raise RequestError(f"{_times(self.size)} is not the size of an image. Write it like 3x224x224.")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise RequestError(f"{name} has {len(values)} numbers, images have {channels} channels.")
        if not 0 <= self.colour < 1 or self.crop < 0 or min(self.std) <= 0 or self.max_boxes < 1:
            raise RequestError(
                f"colour {self.colour:g} must be from 0 to below 1, crop {self.crop} at least 0, "
                f"std {min(self.std):g} above 0 and max_boxes {self.max_boxes} at least 1."
            )


@dataclass(frozen=True, slots=True)
class Chance:
    """Everything drawn for one sample: numbers from 0 to 1, always all of them and in this order.

    So turning one change on or off leaves the others as they were.
    """

    shift: tuple[float, float]
    flip: float
    colour: tuple[float, float, float]
    centre: tuple[float, float]
    scales: tuple[float, float, float, float]
    others: tuple[int, int, int]  # the samples that share a mosaic with this one


@dataclass(frozen=True, slots=True)
class Placement:
    """An image scaled, with its corner at (top, left) of the canvas, showing in `rows` and `columns`."""

    source: Size
    scaled: Size
    top: int
    left: int
    rows: Span
    columns: Span


def draw(seed: int, epoch: int, index: int, count: int) -> Chance:
    """What chance has in store for a sample of a data set of `count`, in one epoch."""
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1, epoch, index)))
    a = generator.random(12).tolist()
    others = generator.integers(count, size=3).tolist()
    return Chance(
        (a[0], a[1]), a[2], (a[3], a[4], a[5]), (a[6], a[7]), (a[8], a[9], a[10], a[11]), tuple(others)
    )


def order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The samples of an epoch in the order they are trained on."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, epoch))).permutation(count)


def check_size(recipe: Recipe, kind: Kind, name: str, size: Size) -> None:
    """Refuse an image with a label of another size, unless scaling was asked for."""
    if kind is Kind.CLASSES and not recipe.resize and size != recipe.size[1:]:
        raise RequestError(
            f"{name} is {_times(size)} and the model takes {_times(recipe.size[1:])}. "
            f"Give it that input, or set resize = true."
        )


def arrange(
    recipe: Recipe, kind: Kind, sizes: Sequence[Size], chance: Chance | None
) -> tuple[Placement, ...]:
    """Where images go on the canvas: one in the middle, or four around a point. No chance: no change."""
    canvas = recipe.size[1:]
    if len(sizes) == 4:
        assert chance is not None, "a mosaic is drawn by chance"
        return _mosaic(canvas, sizes, chance)
    rows, columns = sizes[0]
    ratios = canvas[0] / rows, canvas[1] / columns
    scale = min(ratios) if kind is Kind.BOXES else max(ratios)
    scaled = _scaled(sizes[0], scale)
    down, right = _shift(recipe, chance)
    top, left = (canvas[0] - scaled[0]) // 2 + down, (canvas[1] - scaled[1]) // 2 + right
    whole = Span(0, canvas[0]), Span(0, canvas[1])
    return (_placed(sizes[0], scaled, top, left, whole),)


def paint(
    recipe: Recipe,
    kind: Kind,
    placements: Sequence[Placement],
    image: Callable[[int], Image],
    chance: Chance | None,
    rows: Span,
    columns: Span,
) -> NDArray[np.uint8]:
    """A part of the finished picture (channels, rows, columns), of those images only that show there."""
    width = recipe.size[2]
    flipped = _flips(recipe, chance)
    source = Span(width - columns.stop, width - columns.start) if flipped else columns
    canvas = np.full(
        (len(rows), len(source), recipe.size[0]), GREY if kind is Kind.BOXES else BLACK, np.uint8
    )
    for number, placement in enumerate(placements):
        shown_rows, shown_columns = placement.rows & rows, placement.columns & source
        if len(shown_rows) and len(shown_columns):
            scaled = _resized(with_channels(image(number), recipe.size[0]), placement.scaled)
            canvas[_cut(shown_rows, rows.start), _cut(shown_columns, source.start)] = scaled[
                _cut(shown_rows, placement.top), _cut(shown_columns, placement.left)
            ]
    canvas = canvas[:, ::-1] if flipped else canvas
    return _coloured(canvas, recipe.colour, chance).transpose(2, 0, 1)


def move(
    recipe: Recipe, placements: Sequence[Placement], boxes: Sequence[Boxes], chance: Chance | None
) -> Boxes:
    """The boxes where their images went: cut to what shows, without those that hardly do."""
    moved = np.concatenate([_moved(*pair) for pair in zip(placements, boxes, strict=True)])
    if _flips(recipe, chance):
        moved[:, [1, 3]] = recipe.size[2] - moved[:, [3, 1]]
    if len(moved) > recipe.max_boxes:
        areas = (moved[:, 3] - moved[:, 1]) * (moved[:, 4] - moved[:, 2])
        largest = np.argsort(-areas, kind="stable")[: recipe.max_boxes]
        moved = moved[np.sort(largest)]
    return moved


def normalized(recipe: Recipe, pixels: torch.Tensor, channels: Span) -> torch.Tensor:
    """Bytes (number, channels, rows, columns) as float32, less the mean and over the deviation."""
    every = slice(channels.start, channels.stop)
    mean = torch.tensor(recipe.mean).expand(recipe.size[0])[every].view(-1, 1, 1)
    std = torch.tensor(recipe.std).expand(recipe.size[0])[every].view(-1, 1, 1)
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)  # the order torchvision has


def with_channels(image: Image, channels: int) -> Image:
    """The image with one channel or three, grey made of colours or grey as colours."""
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return np.asarray(PIL.Image.fromarray(image).convert("L"))[:, :, None]


def _mosaic(canvas: Size, sizes: Sequence[Size], chance: Chance) -> tuple[Placement, ...]:
    """Four images with a corner each at a point of the middle; each shows in its own quarter only."""
    row = round(canvas[0] * (0.25 + 0.5 * chance.centre[0]))
    column = round(canvas[1] * (0.25 + 0.5 * chance.centre[1]))
    placements = []
    for number, (size, drawn) in enumerate(zip(sizes, chance.scales, strict=True)):
        alone = min(canvas[0] / size[0], canvas[1] / size[1])
        scaled = _scaled(size, alone * (SMALLEST_IN_MOSAIC + (1 - SMALLEST_IN_MOSAIC) * drawn))
        lower, right = divmod(number, 2)
        quarter = (
            Span(row, canvas[0]) if lower else Span(0, row),
            Span(column, canvas[1]) if right else Span(0, column),
        )
        top, left = row if lower else row - scaled[0], column if right else column - scaled[1]
        placements.append(_placed(size, scaled, top, left, quarter))
    return tuple(placements)


def _placed(source: Size, scaled: Size, top: int, left: int, within: tuple[Span, Span]) -> Placement:
    rows, columns = Span(top, top + scaled[0]), Span(left, left + scaled[1])
    return Placement(source, scaled, top, left, rows & within[0], columns & within[1])


def _scaled(size: Size, scale: float) -> Size:
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _shift(recipe: Recipe, chance: Chance | None) -> tuple[int, int]:
    """Rows down and columns to the right, each from -crop to +crop, all equally often."""
    if chance is None:
        return 0, 0
    down, right = (int(drawn * (2 * recipe.crop + 1)) - recipe.crop for drawn in chance.shift)
    return down, right


def _flips(recipe: Recipe, chance: Chance | None) -> bool:
    return chance is not None and recipe.flip and chance.flip < 0.5


def _cut(span: Span, origin: int) -> slice:
    return slice(span.start - origin, span.stop - origin)


def _resized(image: Image, size: Size) -> Image:
    if image.shape[:2] == size:
        return image
    flat = image[:, :, 0] if image.shape[2] == 1 else image
    scaled = PIL.Image.fromarray(flat).resize((size[1], size[0]), PIL.Image.Resampling.BILINEAR)
    return np.asarray(scaled).reshape(*size, image.shape[2])


def _coloured(image: Image, strength: float, chance: Chance | None) -> Image:
    """Brightness, contrast and saturation changed, pixel by pixel, by one matrix of whole numbers."""
    if chance is None or not strength:
        return image
    brightness, contrast, saturation = (1 + strength * (2 * drawn - 1) for drawn in chance.colour)
    channels = image.shape[2]
    luma = LUMA if channels == 3 else np.ones(1)
    mixed = saturation * np.eye(channels) + (1 - saturation) * luma
    matrix = np.rint(ONE * brightness * contrast * mixed).astype(np.int32)
    middle = round(ONE * 128 * (1 - contrast)) + ONE // 2
    planes = [image[:, :, channel].astype(np.int32) for channel in range(channels)]
    result = np.empty(image.shape, np.uint8)
    for channel in range(channels):
        total = planes[0] * matrix[channel, 0]
        for other in range(1, channels):
            total += planes[other] * matrix[channel, other]
        total += middle
        total >>= 10
        result[:, :, channel] = total.clip(0, 255)
    return result


def _moved(placement: Placement, boxes: Boxes) -> Boxes:
    down, right = (placement.scaled[axis] / placement.source[axis] for axis in (0, 1))
    scaled = boxes * np.array([1, right, down, right, down], np.float32)
    moved = scaled + np.array([0, placement.left, placement.top, placement.left, placement.top], np.float32)
    shown = moved.copy()
    shown[:, [1, 3]] = moved[:, [1, 3]].clip(placement.columns.start, placement.columns.stop)
    shown[:, [2, 4]] = moved[:, [2, 4]].clip(placement.rows.start, placement.rows.stop)
    before, after = moved[:, 3:] - moved[:, 1:3], shown[:, 3:] - shown[:, 1:3]
    enough = after.prod(axis=1) >= LEAST_SHARE * before.prod(axis=1)
    return shown[enough & (after.min(axis=1) >= LEAST_PIXELS)]


def _times(size: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in size)
