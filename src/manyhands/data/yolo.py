"""Boxes in YOLO's text form: `images/1.jpg` beside `labels/1.txt`, one box a line, in shares of the image."""

from __future__ import annotations

from pathlib import Path

from manyhands.data.archives import Files, beneath, open_files, read_text
from manyhands.data.boxes import Annotation, BoxImages, box_array
from manyhands.data.imagefolder import SPLITS
from manyhands.data.images import is_image
from manyhands.data.samples import Boxes
from manyhands.errors import RequestError

NAMES_FILES = ("classes.txt", "labels/classes.txt", "obj.names")


def open_yolo(path: Path, split: str) -> BoxImages:
    """The images of a folder, tar or zip, sorted by name; an image without a text file has no boxes.

    A split is `images/train` with `labels/train`, or `train/images` with `train/labels`; without either,
    there is one set, which is both. Names come from `classes.txt`; without it the classes are numbers.
    """
    files = open_files(path)
    pairs = _pairs(files, split)
    if not pairs:
        raise RequestError(f"{path} holds no images/ for {split}; their boxes belong in labels/*.txt.")
    known = set(files.names)
    annotations = tuple(
        Annotation(image, _boxes(files, text) if text in known else box_array([])) for image, text in pairs
    )
    if not any(text in known for _, text in pairs):
        raise RequestError(f"{path} has no labels: {pairs[0][1]} and {len(pairs) - 1} others are missing.")
    return BoxImages(files, _classes(files, annotations), annotations, relative=True)


def _pairs(files: Files, split: str) -> list[tuple[str, str]]:
    """Each image of the split with the text file of its boxes."""
    folders = [
        "images",
        *(option for word in SPLITS[split] for option in (f"images/{word}", f"{word}/images")),
    ]
    split_up = any(beneath(files, f"{a}/{b}") for a, b in (("images", "train"), ("train", "images")))
    for folder in folders[1:] if split_up else folders[:1]:
        names = [name for name in files.names if name.startswith(f"{folder}/") and is_image(name)]
        if names:
            texts = folder.replace("images", "labels")
            return [(name, f"{texts}{name.removeprefix(folder).rpartition('.')[0]}.txt") for name in names]
    return []


def _classes(files: Files, annotations: tuple[Annotation, ...]) -> tuple[str, ...]:
    for name in NAMES_FILES:
        if name in files.names:
            lines = read_text(files, name).splitlines()
            return tuple(line.strip() for line in lines if line.strip())
    largest = max((a.boxes[:, 0].max() for a in annotations if len(a.boxes)), default=-1)
    return tuple(str(number) for number in range(int(largest) + 1))


def _boxes(files: Files, name: str) -> Boxes:
    """The boxes of a text file: class, then centre and size, turned to corners."""
    rows: list[list[float]] = []
    for number, line in enumerate(read_text(files, name).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            label, x, y, width, height = (float(word) for word in line.split())
        except ValueError:
            raise RequestError(
                f"{files.where / name} line {number} is {line.strip()[:40]!r}, not: class x y width height."
            ) from None
        if max(x, y, width, height) > 1.5 or min(x, y, width, height) < 0:
            raise RequestError(
                f"{files.where / name} line {number} has {max(x, y, width, height):g}; "
                f"x, y, width and height are shares of the image, from 0 to 1."
            )
        rows.append([label, x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    return box_array(rows)
