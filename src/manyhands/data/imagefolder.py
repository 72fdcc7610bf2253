"""A folder of images for each class: `PATH/cat/1.jpg`, or `PATH/train/cat/1.jpg` beside `PATH/test`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from manyhands.data.archives import Files, beneath, open_files
from manyhands.data.images import decode, is_image
from manyhands.data.samples import Kind, Sample
from manyhands.errors import RequestError
from manyhands.loading import nearest

SPLITS = {"train": ("train",), "test": ("test", "val", "valid")}  # the names a split's folder may have


@dataclass(frozen=True, eq=False)
class ImageFolder:
    files: Files
    classes: tuple[str, ...]
    names: tuple[str, ...] = field(repr=False)
    labels: tuple[int, ...] = field(repr=False)
    kind: Kind = field(default=Kind.CLASSES, init=False)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Sample:
        name = self.names[index]
        return Sample(decode(self.files.read(name), name), self.labels[index])

    def target(self, index: int) -> int:
        return self.labels[index]

    def name_of(self, index: int) -> str:
        return self.names[index]


def open_imagefolder(path: Path, split: str) -> ImageFolder:
    """The images of a folder, tar or zip, sorted by name; the classes are its folders' names, sorted.

    Without folders of the splits' names there is one set, which is both splits.
    """
    whole = open_files(path)
    parts = split_parts(whole)
    if parts and split not in parts:
        raise RequestError(f"{path} has no folder {split}.")
    files = parts.get(split, whole)
    classes = _classes(parts.get("train", files))
    names = tuple(name for name in files.names if is_image(name) and "/" in name)
    if not names:
        raise RequestError(f"{files.where} holds no images in folders; it wants one folder a class.")
    label_of = {name: label for label, name in enumerate(classes)}
    for name in _classes(files):
        if name not in label_of:
            raise RequestError(
                f"{files.where / name} is no class of the training images.{nearest(name, classes)}"
            )
    return ImageFolder(files, classes, names, tuple(label_of[name.partition("/")[0]] for name in names))


def split_parts(files: Files) -> dict[str, Files]:
    """The files of each split that has a folder of its own; nothing where the folder is one set."""
    return {
        split: part
        for split, names in SPLITS.items()
        for name in reversed(names)
        if (part := beneath(files, name))
    }


def _classes(files: Files) -> tuple[str, ...]:
    return tuple(sorted({name.partition("/")[0] for name in files.names if is_image(name) and "/" in name}))
