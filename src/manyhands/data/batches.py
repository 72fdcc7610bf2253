"""Batches by number: each device's tile of the images, everybody's targets, read ahead of the step."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from manyhands.data import augmentation
from manyhands.data.augmentation import Recipe
from manyhands.data.reading import Reader, stacked, too_many
from manyhands.data.samples import Dataset, Kind, Target
from manyhands.errors import RequestError
from manyhands.ir.geometry import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch as it waits: images still as bytes, so that waiting ones take a quarter of the memory."""

    images: Tensor
    targets: Tensor
    damaged: dict[str, str]


class Loader:
    """The batches of a data set, the same for every plan: `images, targets = loader.take(step)`."""

    def __init__(
        self,
        dataset: Dataset,
        recipe: Recipe,
        batch: int,
        seed: int,
        shuffle: bool,
        *,
        training: bool = True,
        tile: Tile | None = None,
        ahead: int = 2,
        workers: int = 2,
        damaged_limit: int = 10,
    ) -> None:
        if batch < 1 or seed < 0:
            raise RequestError(f"batch {batch} must be at least 1 and seed {seed} at least 0.")
        if training and len(dataset) < batch:
            raise RequestError(
                f"a batch of {batch} cannot be had of {len(dataset)} samples. Take a smaller batch."
            )
        if dataset.kind is not Kind.OWN and recipe.size[0] not in (1, 3):
            raise RequestError(f"images have 1 or 3 channels, the model takes {recipe.size[0]}.")
        self.dataset = dataset
        self.recipe = recipe
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self.training = training
        self.tile = tile or Tile.whole((batch, *recipe.size))
        self.ahead = ahead
        self.damaged: dict[str, str] = {}  # file -> reason, of the batches taken so far
        self.damaged_limit = damaged_limit
        self._reader = Reader(dataset, recipe, seed, training, damaged_limit)
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reading")
        self._waiting: dict[int, Future[Batch]] = {}
        # Two are kept because reading ahead looks into the next epoch.
        self._order = lru_cache(maxsize=2)(lambda epoch: augmentation.order(seed, epoch, len(dataset)))
        self._lock = threading.Lock()

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in training; in evaluation the last may be filled up."""
        count = len(self.dataset)
        return count // self.batch if self.training else -(-count // self.batch)

    def valid(self, step: int) -> int:
        """How many samples of a batch are real; the others repeat the last one."""
        if self.training:
            return self.batch
        return min(self.batch, len(self.dataset) - step * self.batch)

    def samples(self, step: int) -> list[int]:
        """The numbers of the samples in a batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        positions = range(place * self.batch, (place + 1) * self.batch)
        if not self.training:
            assert epoch == 0, f"evaluation has {self.steps_per_epoch} steps, there is no step {step}"
            return [min(position, len(self.dataset) - 1) for position in positions]
        if not self.shuffle:
            return list(positions)
        with self._lock:
            order = self._order(epoch)
        return [int(order[position]) for position in positions]

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """This device's tile of a batch's images as float32, and the targets of the whole batch.

        Labels are int64 (batch,), boxes float32 (batch, max_boxes, 5) with label -1 where there is none, and
        targets of one's own data set are stacked. Any step may be asked for; the next ones are made ready,
        but not of one's own data set: it draws from the random numbers of the whole process, which a thread
        in the background would share with the training.
        """
        batch = self._make(step) if self.dataset.kind is Kind.OWN else self._ready(step)
        self.damaged |= batch.damaged
        if len(self.damaged) > self.damaged_limit:
            raise too_many(self.damaged, self.damaged_limit)
        if self.dataset.kind is Kind.OWN:
            return batch.images, batch.targets
        return augmentation.normalized(self.recipe, batch.images, self.tile.spans[1]), batch.targets

    def _ready(self, step: int) -> Batch:
        """A batch that was read ahead, or is read now; the next ones are begun."""
        stop = step + 1 + self.ahead if self.training else min(step + 1 + self.ahead, self.steps_per_epoch)
        for other in [number for number in self._waiting if not step <= number < stop]:
            self._waiting.pop(other).cancel()
        for number in range(step, max(stop, step + 1)):
            if number not in self._waiting:
                self._waiting[number] = self._pool.submit(self._make, number)
        return self._waiting.pop(step).result()

    def _make(self, step: int) -> Batch:
        epoch = step // self.steps_per_epoch
        damaged: dict[str, str] = {}
        samples = self.samples(step)
        if self.dataset.kind is Kind.OWN:
            images, targets = self._own(samples, epoch, damaged)
        else:
            images, targets = self._pictures(samples, epoch, damaged)
        return Batch(images, stacked(self.dataset.kind, targets, self.recipe.max_boxes), damaged)

    def _pictures(
        self, samples: list[int], epoch: int, damaged: dict[str, str]
    ) -> tuple[Tensor, list[Target]]:
        """The tile's pixels as bytes, and the target of every sample."""
        numbers, *spans = self.tile.spans
        pixels = np.empty(self.tile.shape, np.uint8)
        targets: list[Target] = []
        for place, index in enumerate(samples):
            covered = self.tile.numel > 0 and numbers.start <= place < numbers.stop
            window = Tile(tuple(spans)) if covered else None
            picture, target = self._reader.picture(index, epoch, window, damaged)
            targets.append(target)
            if picture is not None:
                pixels[place - numbers.start] = picture
        return torch.from_numpy(pixels), targets

    def _own(self, samples: list[int], epoch: int, damaged: dict[str, str]) -> tuple[Tensor, list[Target]]:
        """The tile of a person's own tensors, and the target of every sample."""
        numbers, *spans = self.tile.spans
        window = tuple(slice(span.start, span.stop) for span in spans)
        images = torch.empty(self.tile.shape)
        targets: list[Target] = []
        for place, index in enumerate(samples):
            image, target = self._reader.tensors(index, epoch, damaged)
            targets.append(target)
            if numbers.start <= place < numbers.stop:
                images[place - numbers.start] = image[window]
        return images, targets

    def close(self) -> None:
        """Stop reading ahead; what is being read is finished first."""
        self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
