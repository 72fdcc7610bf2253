"""Pictures with boxes: what is drawn is where it should be, and the picture given stays as it was."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops, ImageColor

from manyhands.detection.pictures import COLOURS, contact_sheet, draw, to_picture

DATA = Path(os.environ.get("MANYHANDS_DATA") or Path(__file__).parents[3] / "shared" / "data")
NAMES = ("nine", "ten", "jack")


def grey(width: int = 200, height: int = 160) -> Image.Image:
    return Image.new("RGB", (width, height), "#777777")


def test_a_box_is_drawn_on_its_edges_in_the_colour_of_its_label() -> None:
    image = grey()
    drawn = draw(image, torch.tensor([[60.0, 70, 150, 140]]), torch.tensor([1]), torch.tensor([0.7]), NAMES)
    colour = ImageColor.getrgb(COLOURS[1])
    for place in ((60, 100), (150, 100), (140, 70), (100, 140)):
        assert drawn.getpixel(place) == colour
    assert drawn.getpixel((100, 100)) == drawn.getpixel((30, 120)) == (0x77, 0x77, 0x77)
    assert ImageChops.difference(image, grey()).getbbox() is None


@pytest.mark.parametrize("box", [[0.0, 0, 30, 30], [180.0, 140, 199, 159], [-20.0, -20, 300, 300]])
def test_the_name_stays_inside_the_picture(box: list[float]) -> None:
    """Dark letters on the label's colour are there, wherever the box is."""
    drawn = draw(grey(), torch.tensor([box]), torch.tensor([2]), torch.tensor([0.5]), NAMES)
    pixels = [pixel for pixel in drawn.get_flattened_data() if isinstance(pixel, tuple)]
    assert sum(max(pixel) < 0x60 for pixel in pixels) > 20
    assert sum(pixel == ImageColor.getrgb(COLOURS[2]) for pixel in pixels) > 200
    middle = draw(grey(), torch.tensor([[70.0, 70, 89, 89]]), torch.tensor([2]), torch.tensor([0.5]), NAMES)
    elsewhere = [pixel for pixel in middle.get_flattened_data() if isinstance(pixel, tuple)]
    assert sum(max(pixel) < 0x60 for pixel in pixels) == sum(max(pixel) < 0x60 for pixel in elsewhere)


def test_the_score_is_written_when_there_is_one() -> None:
    box, label = torch.tensor([[20.0, 60, 150, 140]]), torch.tensor([0])
    without, low, high = (draw(grey(), box, label, scores, NAMES) for scores in (None, [0.11], [0.99]))  # type: ignore[arg-type]
    assert ImageChops.difference(without, low).getbbox() is not None
    assert ImageChops.difference(low, high).getbbox() is not None


def test_the_surest_lies_on_top() -> None:
    box = torch.tensor([[20.0, 60, 150, 140]]).expand(2, 4)
    for scores, top in (((0.9, 0.2), 0), ((0.2, 0.9), 1)):
        drawn = draw(grey(), box, torch.tensor([0, 1]), torch.tensor(scores), NAMES)
        assert drawn.getpixel((100, 140)) == ImageColor.getrgb(COLOURS[top])


def test_a_tensor_becomes_the_picture_it_holds() -> None:
    pixels = torch.zeros(3, 4, 6)
    pixels[0, 1, 5], pixels[2, 3, 0] = 1.0, 7.0
    picture = to_picture(pixels)
    assert picture.size == (6, 4)
    assert picture.getpixel((5, 1)) == (255, 0, 0) and picture.getpixel((0, 3)) == (0, 0, 255)


def test_a_sheet_holds_every_picture_whole() -> None:
    colours = ["#ff0000", "#00ff00", "#0000ff", "#ffff00", "#ff00ff"]
    sizes = [(40, 30), (20, 50), (33, 33), (40, 50), (1, 1)]
    pictures = [Image.new("RGB", size, colour) for size, colour in zip(sizes, colours, strict=True)]
    counts = {pixels: count for count, pixels in contact_sheet(pictures).getcolors(100_000) or []}
    for (width, height), colour in zip(sizes, colours, strict=True):
        assert counts[ImageColor.getrgb(colour)] == width * height


def test_a_sheet_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        contact_sheet([])


def test_real_photographs_can_be_drawn_on() -> None:
    archive = DATA / "detection" / "cards.tar"
    if not archive.is_file():
        pytest.skip(f"{archive} is not here; MANYHANDS_DATA names the folder with the data")
    with tarfile.open(archive) as cards:
        notes = json.load(cards.extractfile("cards/annotations.json"))  # type: ignore[arg-type]
        photo = notes["images"][0]
        image = Image.open(io.BytesIO(cards.extractfile(f"cards/{photo['file']}").read()))  # type: ignore[union-attr]
    boxes, labels = torch.tensor(photo["boxes"]), torch.tensor(photo["labels"])
    drawn = draw(image, boxes, labels, None, notes["classes"])
    changed = ImageChops.difference(drawn, image.convert("RGB")).getbbox()
    assert changed is not None
    left, _, right, bottom = boxes[0].tolist()
    assert abs(changed[0] - left) < 3 and abs(changed[2] - right) < 40 and abs(changed[3] - bottom) < 3
