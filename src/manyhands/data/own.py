"""A person's own data set: what `file.py:function` returns, a torch-style Dataset of (x, y)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.data.samples import Damaged, Kind, Sample
from manyhands.errors import RequestError
from manyhands.loading import load_function

# Python's, numpy's and torch's own random numbers are one of each a process: only one reader at a time.
_ONE_READER = threading.RLock()


@dataclass(frozen=True, eq=False)
class OwnData:
    name: str
    samples: Any = field(repr=False)
    classes: tuple[str, ...] = ()
    kind: Kind = field(default=Kind.OWN, init=False)

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Sample:
        with _ONE_READER:  # a person's own code need not stand several threads
            try:
                x, y = self.samples[index]
                return Sample(torch.as_tensor(x), torch.as_tensor(y))
            except Exception as error:
                raise Damaged(self.name_of(index), f"{type(error).__name__}: {error}") from None

    def target(self, index: int) -> torch.Tensor:
        target = self.read(index).target
        assert isinstance(target, torch.Tensor)
        return target

    def name_of(self, index: int) -> str:
        return f"{self.name} sample {index}"


def open_own(reference: str) -> OwnData:
    """The data set a function returns, after a look at its first sample."""
    file = reference.rpartition(":")[0]
    if not Path(file).is_file():
        raise RequestError(f"there is no file {file}; one's own data is file.py:function.")
    function = load_function(reference)
    try:
        samples = function()
        count = len(samples)
    except Exception as error:
        raise RequestError(f"{reference} failed: {type(error).__name__}: {error}") from None
    if not count:
        raise RequestError(f"{reference} returned an empty data set.")
    data = OwnData(reference, samples, tuple(str(name) for name in getattr(samples, "classes", ())))
    try:
        data.read(0)
    except Damaged as error:
        raise RequestError(f"{error}. A sample is a pair (x, y) of tensors, arrays or numbers.") from None
    return data


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Let whatever is drawn inside come from the seed, and leave the process's random state as it was.

    So random transforms in a person's own data set give the same picture on every device. No other thread may
    draw meanwhile: the loader reads such data in the thread that trains.
    """
    with _ONE_READER, torch.random.fork_rng(devices=[]):
        python_state, numpy_state = random.getstate(), np.random.get_state()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
