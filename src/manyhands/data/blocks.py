"""Data sets that are one block of equal images with one label each: CIFAR-10 and Fashion-MNIST."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyhands.data.samples import Image, Kind, Sample
from manyhands.errors import RequestError


@dataclass(frozen=True, eq=False)
class Block:
    """Images that `picture` gives by number, and their labels."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.uint8] = field(repr=False)
    picture: Callable[[int], Image] = field(repr=False)
    kind: Kind = field(default=Kind.CLASSES, init=False)

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise RequestError(f"{self.name} holds no images.")
        largest = int(self.labels.argmax())
        if self.labels[largest] >= len(self.classes):
            raise RequestError(
                f"{self.name_of(largest)} has label {self.labels[largest]}, "
                f"and the labels of {len(self.classes)} classes end at {len(self.classes) - 1}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        return Sample(self.picture(index), self.target(index))

    def target(self, index: int) -> int:
        return int(self.labels[index])

    def name_of(self, index: int) -> str:
        return f"{self.name} image {index}"


def held(name: str, classes: tuple[str, ...], images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Block:
    """A block whose images (number, rows, columns, channels) are in memory already."""
    if len(images) != len(labels):
        raise RequestError(f"{name} has {len(images)} images and {len(labels)} labels.")
    return Block(name, classes, labels, images.__getitem__)
