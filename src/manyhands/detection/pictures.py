"""Pictures with boxes drawn in, and many of them on one sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# Okabe and Ito's colours, which also those who see fewer colours can tell apart; black for the text on them.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#FFFFFF")
BACKGROUND = "#202020"
GAP_PIXELS = 6


def to_picture(image: Tensor) -> Image.Image:
    """A tensor (3, rows, columns) of values from 0 to 1 as a picture."""
    pixels = image.detach().clamp(0, 1).mul(255).round().byte().permute(1, 2, 0)
    return Image.fromarray(pixels.cpu().numpy())


def draw(
    image: Image.Image, boxes: Tensor, labels: Tensor, scores: Tensor | None, names: Sequence[str]
) -> Image.Image:
    """A copy of the picture with each box, its name and its score; without scores, for what is true."""
    picture = image.convert("RGB")
    canvas = ImageDraw.Draw(picture)
    shorter = min(picture.size)
    font, width = ImageFont.load_default(max(11, shorter // 24)), max(2, shorter // 150)
    order = list(range(len(boxes)))
    if scores is not None:
        order.sort(key=lambda index: float(scores[index]))  # the surest last, so on top
    for index in order:
        label = int(labels[index])
        score = "" if scores is None else f" {float(scores[index]):.2f}"
        colour = COLOURS[label % len(COLOURS)]
        x1, y1, x2, y2 = boxes[index].tolist()
        canvas.rectangle((min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)), outline=colour, width=width)
        _write(canvas, picture.size, (x1, y1), names[label] + score, colour, font)
    return picture


def _write(
    canvas: ImageDraw.ImageDraw,
    size: tuple[int, int],
    corner: tuple[float, float],
    text: str,
    colour: str,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """The text on a plate above the box, or wherever near that it fits into the picture."""
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, bottom - top + 6
    x = min(max(corner[0], 0), max(size[0] - width, 0))
    y = min(max(corner[1] - height, 0), max(size[1] - height, 0))
    canvas.rectangle((x, y, x + width, y + height), fill=colour)
    canvas.text((x + 3 - left, y + 3 - top), text, fill="black", font=font)


def contact_sheet(pictures: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """All pictures on one, in rows from left to right, each whole and in a cell of the largest one's size."""
    if not pictures:
        raise ValueError("a sheet needs at least one picture")
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    width = max(picture.width for picture in pictures) + GAP_PIXELS
    height = max(picture.height for picture in pictures) + GAP_PIXELS
    sheet = Image.new("RGB", (columns * width + GAP_PIXELS, rows * height + GAP_PIXELS), BACKGROUND)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        x = GAP_PIXELS + column * width + (width - GAP_PIXELS - picture.width) // 2
        y = GAP_PIXELS + row * height + (height - GAP_PIXELS - picture.height) // 2
        sheet.paste(picture, (x, y))
    return sheet
