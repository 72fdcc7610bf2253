"""One picture and what is known of it, and what every data set can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyhands.errors import RequestError

Image = NDArray[np.uint8]  # rows, columns, channels
Boxes = NDArray[np.float32]  # one row a box: label, x1, y1, x2, y2 in pixels of its image
Target = int | Boxes | Tensor


class Kind(Enum):
    """What the targets of a data set are."""

    CLASSES = "classes"  # one label an image
    BOXES = "boxes"  # labelled boxes
    OWN = "own"  # whatever tensors a person's own function gives


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An image of bytes, or the tensor a person's own data set gave for it, and its target."""

    image: Image | Tensor
    target: Target


class Damaged(Exception):
    """One sample cannot be read: `Damaged("cat/7.jpg", "image file is truncated")`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Dataset(Protocol):
    """Samples in a fixed order, the same on every device. May be read by several threads at once."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def kind(self) -> Kind: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """The sample; `Damaged` where its image cannot be had."""
        ...

    def target(self, index: int) -> Target:
        """The target alone, without decoding the image where that is possible."""
        ...

    def name_of(self, index: int) -> str:
        """The file's name, for messages."""
        ...


@dataclass(frozen=True, slots=True)
class First:
    """The first samples of a data set, as a data set."""

    whole: Dataset
    count: int

    @property
    def classes(self) -> tuple[str, ...]:
        return self.whole.classes

    @property
    def kind(self) -> Kind:
        return self.whole.kind

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Sample:
        return self.whole.read(index)

    def target(self, index: int) -> Target:
        return self.whole.target(index)

    def name_of(self, index: int) -> str:
        return self.whole.name_of(index)


def first(dataset: Dataset, count: int) -> Dataset:
    """The first `count` samples; refused where there are fewer."""
    if not 0 < count <= len(dataset):
        raise RequestError(f"{count} samples were asked for and the data set has {len(dataset)}.")
    return First(dataset, count)


def check_labels(dataset: Dataset, num_classes: int) -> None:
    """Refuse a data set with more classes than the model can tell apart.

    Every reader refuses a label without a class when it opens, so counting the classes is enough.
    """
    if len(dataset.classes) > num_classes:
        last = len(dataset.classes) - 1
        raise RequestError(
            f"labels go up to {last} ({dataset.classes[last]}) and the model tells {num_classes} classes "
            f"apart. Give it {len(dataset.classes)} outputs."
        )
