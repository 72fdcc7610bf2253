"""States on disk: written beside the computation, and read back as they were."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from typing import IO, Any

import torch
from torch import Tensor

from manyhands.errors import RequestError, RunError
from manyhands.ir.schedule import Disk

TRIED_BYTES, TRIES = 32 << 20, 3
Values = dict[str, Any]


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: in which piece of memory, and how."""

    piece: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Parcel:
    """Named values on their way to disk and back, each piece of memory once, as it is.

    Its file has no name, so that nothing is left of it, however the process ends.
    """

    def __init__(self, values: Values, directory: Path) -> None:
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._others = {name: value for name, value in values.items() if name not in tensors}
        pieces = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors.values()}
        order = {data: number for number, data in enumerate(pieces)}
        self._places = {
            name: _Place(
                order[t.untyped_storage()._cdata], t.dtype, int(t.storage_offset()), t.shape, t.stride()
            )
            for name, t in tensors.items()
        }
        self._pieces = list(pieces.values())
        self._sizes = [piece.nbytes() for piece in self._pieces]
        self._directory, self._error = directory, ""
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed when it is taken
        self._thread = Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        file = self._file
        try:
            for piece in self._pieces:
                file.write(_bytes(piece))
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or it stays in memory
        except OSError as error:
            self._error = error.strerror or str(error)

    def settle(self) -> None:
        """Wait until all is written; then it is in memory no more."""
        self._thread.join()
        self._pieces = []
        if self._error:
            with contextlib.suppress(OSError):  # what is left in its buffer cannot be written either
                self._file.close()
            raise RunError(
                f"a state could not be written to {self._directory}: {self._error}. The weights are as "
                "they were: free some space and call the model again, or fit it without a disk."
            )

    def take(self) -> Values:
        """All of it, in new memory."""
        self.settle()
        pieces = [torch.UntypedStorage(size) for size in self._sizes]
        with self._file as file:
            file.seek(0)
            for piece in pieces:
                if file.readinto(_bytes(piece)) != piece.nbytes():  # type: ignore[attr-defined]
                    raise RunError(f"a state that was written to {self._directory} is not there any more.")
        tensors = {
            name: torch.empty(0, dtype=p.dtype).set_(pieces[p.piece], p.offset, p.size, p.stride)  # type: ignore[call-overload]
            for name, p in self._places.items()
        }
        return tensors | self._others


def _bytes(piece: torch.UntypedStorage) -> Any:
    """Its memory itself, to be written from or read into."""
    return torch.empty(0, dtype=torch.uint8).set_(piece).numpy().data  # type: ignore[call-overload]


def measure(directory: Path) -> Disk:
    """How fast this disk is, written through and read from it and not from memory."""
    own = torch.Generator().manual_seed(0)  # what compresses would be faster than states are
    tensor = torch.randint(0, 255, (TRIED_BYTES,), dtype=torch.uint8, generator=own)
    writes, reads = [], []
    try:
        for _ in range(TRIES):
            started = time.perf_counter()
            parcel = Parcel({"x": tensor}, directory)
            parcel.settle()
            writes.append(time.perf_counter() - started)
            started = time.perf_counter()
            parcel.take()
            reads.append(time.perf_counter() - started)
    except (OSError, RunError) as error:
        raise RequestError(f"{directory} cannot be used for states: {error}") from None
    return Disk(TRIED_BYTES / median(writes), TRIED_BYTES / median(reads))
