"""One sample of a batch: read, put together by the recipe, and replaced where its file is damaged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data import augmentation
from manyhands.data.augmentation import Recipe, Size
from manyhands.data.own import drawn_from
from manyhands.data.samples import Damaged, Dataset, Image, Kind, Sample, Target
from manyhands.errors import RequestError, RunError
from manyhands.ir.geometry import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A sample that can be read, its image's size, and the sample itself where it was read just now."""

    index: int
    size: Size
    sample: Sample | None


class Reader:
    """Makes samples, for several threads at once, and remembers which files are sound.

    Every device must put the same sample in the place of a damaged one, also where another device has its
    pixels. So each file is decoded once by everybody, the first time it comes up; from then on only by those
    who need its pixels.
    """

    def __init__(
        self, dataset: Dataset, recipe: Recipe, seed: int, training: bool, damaged_limit: int
    ) -> None:
        self.dataset = dataset
        self.recipe = recipe
        self.seed = seed
        self.training = training
        self.damaged_limit = damaged_limit
        self._sizes = np.zeros((len(dataset), 2), np.int32)  # of the sound files; 0 is not known yet
        self._reasons: dict[int, str] = {}  # of the damaged files

    def picture(
        self, index: int, epoch: int, window: Tile | None, damaged: dict[str, str]
    ) -> tuple[NDArray[np.uint8] | None, Target]:
        """The window (channels, rows, columns) of a sample's finished picture, and its target.

        No window: no pixels. What turns out to be damaged is noted in `damaged`, file -> reason.
        """
        chance = augmentation.draw(self.seed, epoch, index, len(self.dataset)) if self.training else None
        mosaic = chance is not None and self.recipe.mosaic and self.dataset.kind is Kind.BOXES
        members = (index, *chance.others) if chance is not None and mosaic else (index,)
        found = [self._sound(member, damaged) for member in members]
        recipe, kind = self.recipe, self.dataset.kind
        placements = augmentation.arrange(recipe, kind, [each.size for each in found], chance)
        targets = [self._target(each) for each in found]
        target = targets[0]
        if kind is Kind.BOXES:
            boxes = [each for each in targets if isinstance(each, np.ndarray)]
            target = augmentation.move(recipe, placements, boxes, chance)
        if window is None:
            return None, target
        channels, rows, columns = window.spans
        pixels = augmentation.paint(
            recipe, kind, placements, lambda number: self._image(found[number]), chance, rows, columns
        )
        return pixels[channels.start : channels.stop], target

    def tensors(self, index: int, epoch: int, damaged: dict[str, str]) -> tuple[Tensor, Tensor]:
        """The pair of a person's own data set, its randomness drawn from (seed, epoch, sample)."""
        key = np.random.SeedSequence(self.seed, spawn_key=(1, epoch if self.training else 0, index))
        with drawn_from(int(key.generate_state(1)[0])):
            sample = self._sound(index, damaged).sample
        assert sample is not None and isinstance(sample.image, Tensor) and isinstance(sample.target, Tensor)
        return sample.image, sample.target

    def _sound(self, index: int, damaged: dict[str, str]) -> Found:
        """The sample, or the next in the order of the files that can be read."""
        for candidate in range(index, index + len(self.dataset)):
            try:
                return self._find(candidate % len(self.dataset))
            except Damaged as error:
                damaged[error.name] = error.reason
                if len(damaged) > self.damaged_limit:
                    break
        raise too_many(damaged, self.damaged_limit)

    def _find(self, index: int) -> Found:
        if index in self._reasons:
            raise Damaged(self.dataset.name_of(index), self._reasons[index])
        rows, columns = self._sizes[index].tolist()
        if rows:
            return Found(index, (rows, columns), None)
        try:
            sample = self.dataset.read(index)
        except Damaged as error:
            self._reasons[index] = error.reason
            raise
        name = self.dataset.name_of(index)
        if isinstance(sample.image, Tensor):  # a person's own: read anew each time, it may draw lots
            shape = tuple(sample.image.shape)
            if shape != self.recipe.size:
                raise RequestError(f"{name} has shape {shape} and the model takes {self.recipe.size}.")
            return Found(index, (0, 0), sample)
        size = (sample.image.shape[0], sample.image.shape[1])
        augmentation.check_size(self.recipe, self.dataset.kind, name, size)
        self._sizes[index] = size
        return Found(index, size, sample)

    def _image(self, found: Found) -> Image:
        sample = found.sample or self._again(found)
        assert not isinstance(sample.image, Tensor)
        return sample.image

    def _target(self, found: Found) -> Target:
        if found.sample is not None:
            return found.sample.target
        try:
            return self.dataset.target(found.index)
        except Damaged as error:
            raise _gone(error) from None

    def _again(self, found: Found) -> Sample:
        try:
            return self.dataset.read(found.index)
        except Damaged as error:
            raise _gone(error) from None


def stacked(kind: Kind, targets: list[Target], max_boxes: int) -> Tensor:
    """The targets of a batch as one tensor; boxes are filled up with label -1."""
    if kind is Kind.CLASSES:
        return torch.tensor(targets, dtype=torch.int64)
    if kind is Kind.OWN:
        tensors = [torch.as_tensor(target) for target in targets]
        if odd := [tensor for tensor in tensors if tensor.shape != tensors[0].shape]:
            shapes = f"{tuple(tensors[0].shape)} and {tuple(odd[0].shape)}"
            raise RequestError(f"the targets of one's own data set have shapes {shapes}; they must be equal.")
        return torch.stack(tensors)
    boxes = np.zeros((len(targets), max_boxes, 5), np.float32)
    boxes[:, :, 0] = -1
    for row, target in zip(boxes, targets, strict=True):
        assert isinstance(target, np.ndarray)
        row[: len(target)] = target
    return torch.from_numpy(boxes)


def too_many(damaged: dict[str, str], limit: int) -> RequestError:
    """The refusal of a data set with more damaged files than allowed; it names the first."""
    name, reason = next(iter(damaged.items()))
    return RequestError(
        f"{len(damaged)} images cannot be read, and {limit} are allowed; the first is {name}: {reason}."
    )


def _gone(error: Damaged) -> RunError:
    """A file that could be read earlier: other devices still take it for sound, so nothing can stand in."""
    return RunError(
        f"{error.name} could be read before and cannot now: {error.reason}. Resume when it is back."
    )
