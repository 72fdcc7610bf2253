"""Tensors in safetensors files: written all or nothing, read one by one when they are asked for."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from manyhands.errors import RequestError
from manyhands.reporting.text import amount

Tensors = Mapping[str, torch.Tensor]

_FILE_BYTES = 64 * 1024  # room for what is stored beside the tensors
_TENSOR_BYTES = 512  # room for what is said about one tensor


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is asked for, whole or in part.

    The file stays open, so that its tensors can be read even after a newer file has displaced it.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise RequestError(f"there is no file {path}.") from None
        except (SafetensorError, OSError) as error:
            raise RequestError(
                f"{path} is not a whole safetensors file: {reason(error)}. "
                "Files of torch.save are not read; `safetensors.torch.save_file` writes what is."
            ) from None
        self._names = tuple(self._file.keys())
        self._known = frozenset(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._known:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """One tile of a tensor; the rest is not read."""
        if name not in self._known:
            raise KeyError(name)
        return self._file.get_slice(name)[index]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read for that."""
        return tuple(self._file.get_slice(name).get_shape())

    def metadata(self) -> dict[str, str]:
        return dict(self._file.metadata() or {})


@dataclass(frozen=True)
class ModelFile:
    """A whole model in one file: its tensors, and what the metadata says it is."""

    path: Path
    metadata: dict[str, str]
    tensors: StoredTensors


def save_model(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a whole model to one file; what was there stays until the new file is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hidden_folder(path.parent / f".writing-{path.name}") as hidden:
            save_tensors(hidden / path.name, tensors, metadata)
            os.replace(hidden / path.name, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        needed = amount(needed_bytes(tensors))
        raise RequestError(
            f"{path} cannot be written: {reason(error)}; {needed} are needed. "
            "What was there is as it was. Make room or save elsewhere."
        ) from error


def load_model_file(path: Path) -> ModelFile:
    """The model in a safetensors file; its metadata may be empty."""
    tensors = StoredTensors(path)
    return ModelFile(path, tensors.metadata(), tensors)


def describe(tensors: Tensors) -> dict[str, str]:
    """Type and shape of each tensor as text: `{"conv1.weight": "float32 64x3x3x3"}`; meta tensors will do."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
        for name, tensor in tensors.items()
    }


def first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """`conv1.weight is float32 64x3x7x7 there and float32 64x3x3x3 here`; None where two models are alike."""
    for name in (*here, *there):
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
    return None


def needed_bytes(*groups: Tensors) -> int:
    """Room on the disk for these tensors, generously."""
    tensors = [tensor for group in groups for tensor in group.values()]
    return sum(tensor.nbytes for tensor in tensors) + _TENSOR_BYTES * len(tensors) + _FILE_BYTES


def reason(error: Exception) -> str:
    """The cause alone, without what the caller says anyway."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return re.sub(r"^Error while .*?: (I/O error: )?", "", str(error)).rstrip(".")


@contextmanager
def hidden_folder(path: Path) -> Iterator[Path]:
    """A new folder to write in, gone afterwards unless it was renamed."""
    shutil.rmtree(path, ignore_errors=True)  # left by a writer that was killed
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def save_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None) -> None:
    """Write one file and see it onto the disk. Its name is taken at the end: write into a hidden folder."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(_storable(tensors), path, None if metadata is None else dict(metadata))
    except KeyError as error:  # safetensors looks the type up
        names = [name for name, tensor in tensors.items() if tensor.dtype == error.args[0]]
        raise RequestError(
            f"{names[0]} is of type {error.args[0]}, which safetensors cannot hold. Convert it first."
        ) from None
    path.chmod(mode)  # safetensors leaves files that nobody but their owner can read
    sync(path)


def _storable(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors as safetensors wants them; where two share memory (tied weights), each is written whole."""
    storable: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        storable[name] = plain.clone() if address in seen else plain
        seen.add(address)
    return storable


def sync(path: Path) -> None:
    """Return when the file, or the list of names in the folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
