"""Small data sets on disk, in every form the readers know."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import PIL.Image
from numpy.typing import NDArray

CLASSES = ("cat", "dog")


def picture(seed: int, rows: int = 8, columns: int = 8) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(256, size=(rows, columns, 3), dtype=np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def image_folder(folder: Path, count: int = 6, rows: int = 8, columns: int = 8) -> Path:
    """Images 0, 1, ... in file order, the first half cats and the rest dogs; image n is `picture(n)`."""
    for number in range(count):
        name = CLASSES[number * 2 // count]
        write(folder / name / f"{number:02}.png", png(picture(number, rows, columns)))
    return folder


BOX = (2.0, 1.0, 10.0, 7.0)  # x1, y1, x2, y2 of every image below, and its class is its number modulo 2
SIZES = ((8, 12), (16, 12), (10, 20), (9, 12), (20, 11))


def cards(folder: Path) -> Path:
    """Five training images with a box each, in the playing cards' form."""
    images = []
    for number, (rows, columns) in enumerate(SIZES):
        write(folder / "images" / f"{number}.png", png(picture(number, rows, columns)))
        images.append(
            {"file": f"images/{number}.png", "width": columns, "height": rows, "split": "train"}
            | {"boxes": [BOX], "labels": [number % 2]}
        )
    write(folder / "annotations.json", json.dumps({"classes": CLASSES, "images": images}))
    return folder


def coco(folder: Path) -> Path:
    """The same in COCO's form; its category numbers have gaps, as COCO's do."""
    cards(folder)
    x1, y1, x2, y2 = BOX
    content = {
        "images": [
            {"id": 10 + n, "file_name": f"{n}.png", "width": c, "height": r} for n, (r, c) in enumerate(SIZES)
        ],
        "annotations": [
            {"id": n, "image_id": 10 + n, "category_id": (3, 7)[n % 2], "bbox": [x1, y1, x2 - x1, y2 - y1]}
            for n in range(len(SIZES))
        ],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
    }
    write(folder / "annotations.json", json.dumps(content))
    return folder


def yolo(folder: Path) -> Path:
    """The same in YOLO's form."""
    x1, y1, x2, y2 = BOX
    for number, (rows, columns) in enumerate(SIZES):
        write(folder / "images" / f"{number}.png", png(picture(number, rows, columns)))
        shares = ((x1 + x2) / 2 / columns, (y1 + y2) / 2 / rows, (x2 - x1) / columns, (y2 - y1) / rows)
        line = " ".join([str(number % 2), *(f"{share:.9f}" for share in shares)])
        write(folder / "labels" / f"{number}.txt", f"{line}\n")
    write(folder / "classes.txt", "cat\ndog\n")
    return folder


def packed(folder: Path, path: Path) -> Path:
    """The folder as a plain tar, everything under one folder."""
    with tarfile.open(path, "w") as archive:
        archive.add(folder, "everything")
    return path
