"""States on disk: written beside the computation, and read back as they were."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from typing import IO, Any
from weakref import finalize

import psutil
import torch
from torch import Tensor

from manyhands.errors import RequestError, RunError
from manyhands.ir.schedule import Disk

TRIED_BYTES, TRIES = 32 << 20, 3
IN_MEMORY = ("tmpfs", "ramfs")
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

    What lies in memory that is held anyway stays there, as does what is only seen through a sign. Its file
    has no name, so that nothing is left of it, however the process ends.
    """

    def __init__(self, values: Values, directory: Path, held: Container[int] = ()) -> None:
        tensors = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor)
            and value.untyped_storage()._cdata not in held
            and not (value.is_neg() or value.is_conj())
        }
        self._others = {name: value for name, value in values.items() if name not in tensors}
        pieces = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors.values()}
        order = {data: number for number, data in enumerate(pieces)}
        where = {name: order[tensor.untyped_storage()._cdata] for name, tensor in tensors.items()}
        self._places = {
            name: _Place(where[name], t.dtype, int(t.storage_offset()), t.shape, t.stride())
            for name, t in tensors.items()
        }
        self._pieces = list(pieces.values())
        self._sizes = [piece.nbytes() for piece in self._pieces]
        self._directory = directory
        self._error: Exception | None = None
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed below
        except OSError as error:
            raise self._failed("written to", error) from error
        finalize(self, self._file.close)
        self._thread = Thread(target=self._write, daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def _write(self) -> None:
        file = self._file
        try:
            for piece in self._pieces:
                file.write(_bytes(piece))
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or it stays in memory
        except Exception as error:  # told to whoever waits for it
            self._error = error

    def settle(self) -> None:
        """Wait until all is written; then it is in memory no more."""
        self._thread.join()
        self._pieces = []
        if self._error is not None:
            with contextlib.suppress(OSError):  # what is left in its buffer cannot be written either
                self._file.close()
            raise self._failed("written to", self._error) from self._error

    def take(self) -> Values:
        """All of it, in new memory."""
        self.settle()
        pieces = [torch.UntypedStorage(size) for size in self._sizes]
        try:
            with self._file as file:
                file.seek(0)
                for piece in pieces:
                    if file.readinto(_bytes(piece)) != piece.nbytes():  # type: ignore[attr-defined]
                        raise OSError(0, "it is not there any more")
        except OSError as error:
            raise self._failed("read from", error) from error
        tensors = {
            name: torch.empty(0, dtype=p.dtype).set_(pieces[p.piece], p.offset, p.size, p.stride)  # type: ignore[call-overload]
            for name, p in self._places.items()
        }
        return tensors | self._others

    def _failed(self, what: str, error: Exception) -> RunError:
        return RunError(
            f"a state could not be {what} {self._directory}: {_reason(error)}. The weights are as they were; "
            "gradients, running statistics and random numbers may be those of half a step."
        )


def _reason(error: BaseException) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _bytes(piece: torch.UntypedStorage) -> Any:
    """Its memory itself, to be written from or read into."""
    return torch.empty(0, dtype=torch.uint8).set_(piece).numpy().data  # type: ignore[call-overload]


def measure(directory: Path) -> Disk:
    """How fast this disk is, written through and read from it and not from memory."""
    if _file_system(directory) in IN_MEMORY:
        raise RequestError(
            f"{directory} is in memory itself ({_file_system(directory)}): name one on a disk."
        )
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
    except RunError as error:
        raise RequestError(
            f"{directory} cannot be used for states: {_reason(error.__cause__ or error)}."
        ) from None
    return Disk(TRIED_BYTES / median(writes), TRIED_BYTES / median(reads))


def _file_system(directory: Path) -> str:
    """The kind of that which is mounted there, or above."""
    mounted = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = directory.resolve()
    return next((mounted[place] for place in (resolved, *resolved.parents) if place in mounted), "")
