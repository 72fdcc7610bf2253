"""CIFAR-10 in each of the forms it is handed around in: packed strips, binary records, python batches."""

from __future__ import annotations

import json
import tarfile
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.data.archives import Files, open_files, read_text
from manyhands.data.blocks import Block, held
from manyhands.data.images import decode
from manyhands.data.pickled import read_batch
from manyhands.data.samples import Damaged, Image
from manyhands.errors import RequestError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
PIXELS = 3 * SIDE * SIDE
BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
FORMS = (
    "CIFAR-10 is cifar10_webp.zip, cifar-10-binary.tar.gz, cifar-10-python.tar.gz, or a folder "
    "with data_batch_1.bin or data_batch_1 and the rest"
)


def open_cifar10(path: Path, split: str) -> Block:
    """The images of one split, in the official order, whichever form `path` has."""
    if not path.exists():
        raise RequestError(f"there is no file or folder {path}.")
    if path.is_dir():
        inner = [path / name for name in ("cifar-10-batches-bin", "cifar-10-batches-py")]
        folder = next((candidate for candidate in inner if candidate.is_dir()), path)
        names = {file.name: file for file in folder.iterdir() if file.is_file()}
        wanted = _wanted(path, split, list(names))
        return _joined(path, [(name, names[name].read_bytes()) for name in wanted])
    if tarfile.is_tarfile(path):
        return _joined(path, _members(path, split))
    files = open_files(path)
    if "labels.bin" not in files.names or "meta.json" not in files.names:
        raise RequestError(f"{path} is no CIFAR-10: {FORMS}.")
    return _packed(files, split)


def _wanted(path: Path, split: str, names: list[str]) -> list[str]:
    """The names of a split's batches, all binary or all python."""
    for ending in (".bin", ""):
        wanted = [f"{batch}{ending}" for batch in BATCHES[split]]
        missing = [name for name in wanted if name not in names]
        if len(missing) < len(wanted):
            if missing:
                raise RequestError(f"{path} has no {missing[0]}, which CIFAR-10's {split} images need.")
            return wanted
    raise RequestError(f"{path} holds no {split} batches: {FORMS}.")


def _members(path: Path, split: str) -> list[tuple[str, bytes]]:
    """The split's batches of a tar, read through once from front to back because it is compressed."""
    contents: dict[str, bytes] = {}
    both = {f"{batch}{ending}" for batch in BATCHES[split] for ending in (".bin", "")}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                file = archive.extractfile(member) if member.isreg() and name in both else None
                if file:
                    contents[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise RequestError(f"{path} is damaged: {error}.") from None
    return [(name, contents[name]) for name in _wanted(path, split, list(contents))]


def _joined(path: Path, batches: list[tuple[str, bytes]]) -> Block:
    images, labels = zip(*(_records(path, name, content) for name, content in batches), strict=True)
    return held(str(path), CLASSES, np.concatenate(images), np.concatenate(labels))


def _records(path: Path, name: str, content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images (number, rows, columns, channels) and labels of one batch."""
    if name.endswith(".bin"):
        if not content or len(content) % (1 + PIXELS):
            raise RequestError(
                f"{path / name} is damaged: {len(content)} bytes are no whole number of {1 + PIXELS}."
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
        labels, planes = records[:, 0], records[:, 1:]
    else:
        try:
            data, numbers = read_batch(content)
        except ValueError as error:
            raise RequestError(f"{path / name} is not a python batch of CIFAR-10: {error}.") from None
        labels, planes = np.array(numbers, np.uint8), np.frombuffer(data, np.uint8).reshape(-1, PIXELS)
    return planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1), labels


@dataclass(frozen=True, eq=False)
class Strips:
    """Images stacked in strips, each strip decoded when the first of its images is wanted.

    Memory that was never written is not taken, so part of the data costs part of the memory.
    """

    files: Files
    first: int  # the number of the split's first strip
    height: int  # images a strip
    images: NDArray[np.uint8] = field(repr=False)
    locks: tuple[threading.Lock, ...] = field(repr=False)
    ready: set[int] = field(default_factory=set, repr=False)

    def picture(self, index: int) -> Image:
        strip = index // self.height
        if strip not in self.ready:
            with self.locks[strip]:
                if strip not in self.ready:
                    self._decode(strip)
        return self.images[index]

    def _decode(self, strip: int) -> None:
        name = f"strips/{self.first + strip:03}.webp"
        images = self.images[strip * self.height : (strip + 1) * self.height]
        try:
            images[:] = decode(self.files.read(name), name).reshape(images.shape)
        except Damaged as error:
            raise RequestError(f"{self.files.where} is damaged: {error}. Get it anew.") from None
        except ValueError:
            raise RequestError(f"{self.files.where} is damaged: {name} has another size.") from None
        self.ready.add(strip)


def _packed(files: Files, split: str) -> Block:
    try:
        meta = json.loads(read_text(files, "meta.json"))
        train, test, height = int(meta["train"]), int(meta["test"]), int(meta["per_strip"])
        labels = np.frombuffer(files.read("labels.bin"), np.uint8)
    except (KeyError, TypeError, ValueError, Damaged) as error:
        raise RequestError(f"{files.where} is damaged: {error}. Get it anew.") from None
    if len(labels) != train + test or train % height or test % height:
        raise RequestError(f"{files.where} is damaged: {len(labels)} labels for {train} + {test} images.")
    count, start = (train, 0) if split == "train" else (test, train)
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    locks = tuple(threading.Lock() for _ in range(count // height))
    strips = Strips(files, start // height, height, images, locks)
    return Block(str(files.where), tuple(meta["classes"]), labels[start : start + count], strips.picture)
