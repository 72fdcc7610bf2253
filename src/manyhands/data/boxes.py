"""Images with labelled boxes, whatever file the boxes came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np

from manyhands.data.archives import Files
from manyhands.data.images import decode, size_of
from manyhands.data.samples import Boxes, Damaged, Kind, Sample
from manyhands.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """One image's boxes; its size as the annotations tell it, or None where they do not."""

    file: str
    boxes: Boxes
    size: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class BoxImages:
    files: Files
    classes: tuple[str, ...]
    annotations: tuple[Annotation, ...] = field(repr=False)
    relative: bool = False  # coordinates are shares of the width and height instead of pixels
    kind: Kind = field(default=Kind.BOXES, init=False)

    def __post_init__(self) -> None:
        if not self.annotations:
            raise RequestError(f"{self.files.where} holds no images with boxes for this split.")
        for annotation in self.annotations:
            _check(annotation, len(self.classes))

    def __len__(self) -> int:
        return len(self.annotations)

    def read(self, index: int) -> Sample:
        annotation = self.annotations[index]
        image = decode(self.files.read(annotation.file), annotation.file)
        size = cast(tuple[int, int], image.shape[:2])
        if annotation.size not in (None, size):
            raise Damaged(
                annotation.file, f"{_across(size)} pixels, its boxes are for {_across(annotation.size)}"
            )
        return Sample(image, self._in_pixels(annotation, size))

    def target(self, index: int) -> Boxes:
        annotation = self.annotations[index]
        if not self.relative:
            return annotation.boxes
        return self._in_pixels(annotation, size_of(self.files.read(annotation.file), annotation.file))

    def name_of(self, index: int) -> str:
        return self.annotations[index].file

    def _in_pixels(self, annotation: Annotation, size: tuple[int, int]) -> Boxes:
        rows, columns = size if self.relative else (1, 1)
        return annotation.boxes * np.array([1, columns, rows, columns, rows], np.float32)


def box_array(rows: list[list[float]]) -> Boxes:
    """Rows of label, x1, y1, x2, y2 as an array, also where there is none."""
    return np.array(rows, np.float32).reshape(-1, 5)


def _across(size: tuple[int, int] | None) -> str:
    return "unknown" if size is None else f"{size[0]}x{size[1]}"


def _check(annotation: Annotation, num_classes: int) -> None:
    for label, x1, y1, x2, y2 in annotation.boxes.tolist():
        if not 0 <= label < num_classes or label != int(label):
            raise RequestError(
                f"{annotation.file} has a box of class {label:g}, and there are {num_classes} classes "
                f"(0 to {num_classes - 1})."
            )
        if not (x1 <= x2 and y1 <= y2 and np.isfinite((x1, y1, x2, y2)).all()):
            raise RequestError(
                f"{annotation.file} has a box from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g}), "
                f"which ends before it starts."
            )
