"""A folder, a tar or a zip as a set of named files, read without unpacking anything to disk."""

from __future__ import annotations

import os
import tarfile
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from manyhands.data.samples import Damaged
from manyhands.errors import RequestError


class Files(Protocol):
    """Files by name. No name leads out of the folder or archive."""

    @property
    def where(self) -> Path: ...

    @property
    def names(self) -> tuple[str, ...]:
        """Every file, sorted, folders divided by `/`."""
        ...

    def read(self, name: str) -> bytes:
        """A file's content; `Damaged` where it cannot be had. May be called by several threads at once."""
        ...


@dataclass(frozen=True)
class Folder:
    where: Path
    names: tuple[str, ...] = field(repr=False)

    def read(self, name: str) -> bytes:
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise Damaged(name, "lies outside the data set")
        try:
            return (self.where / name).read_bytes()
        except OSError as error:
            raise Damaged(name, _plainly(error)) from None


@dataclass(frozen=True)
class Tar:
    """A plain tar: where each member lies, so that reading is a seek."""

    where: Path
    names: tuple[str, ...] = field(repr=False)
    places: dict[str, tuple[int, int]] = field(repr=False)

    def read(self, name: str) -> bytes:
        if name not in self.places:
            raise Damaged(name, "is missing")
        start, size = self.places[name]
        try:
            with self.where.open("rb") as file:
                file.seek(start)
                content = file.read(size)
        except OSError as error:
            raise Damaged(name, _plainly(error)) from None
        if len(content) < size:
            raise Damaged(name, f"the archive ends after {len(content)} of its {size} bytes")
        return content


@dataclass(frozen=True)
class Zip:
    where: Path
    names: tuple[str, ...] = field(repr=False)
    archive: zipfile.ZipFile = field(repr=False)  # its `read` may be called from several threads

    def read(self, name: str) -> bytes:
        try:
            return self.archive.read(name)
        except KeyError:
            raise Damaged(name, "is missing") from None
        except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
            raise Damaged(name, _plainly(error)) from None


@dataclass(frozen=True)
class Beneath:
    """The files below one folder of other files, under their names from there."""

    files: Files
    prefix: str
    names: tuple[str, ...] = field(repr=False)

    @property
    def where(self) -> Path:
        return self.files.where / self.prefix

    def read(self, name: str) -> bytes:
        return self.files.read(self.prefix + name)


def open_files(path: Path) -> Files:
    """The files of a folder or of an archive; one folder around everything in an archive is left out.

    Example: `cards.tar` with `cards/annotations.json` in it gives `annotations.json`.
    """
    if path.is_dir():
        return Folder(path, _walk(path))
    if not path.is_file():
        raise RequestError(f"there is no file or folder {path}.")
    files = _opened(path)
    tops = {name.partition("/")[0] for name in files.names}
    alone = len(tops) == 1 and all("/" in name for name in files.names)
    return beneath(files, tops.pop()) or files if alone else files


def beneath(files: Files, folder: str) -> Files | None:
    """The files below a folder, or None where there are none."""
    prefix = f"{folder}/"
    names = tuple(name.removeprefix(prefix) for name in files.names if name.startswith(prefix))
    return Beneath(files, prefix, names) if names else None


def read_text(files: Files, name: str) -> str:
    """A text file that the data set cannot do without."""
    try:
        return files.read(name).decode("utf-8-sig")
    except Damaged as error:
        raise RequestError(f"{files.where / name} cannot be read: {error.reason}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{files.where / name} is not text in UTF-8.") from None


def _opened(path: Path) -> Files:
    try:
        if zipfile.is_zipfile(path):
            zipped = zipfile.ZipFile(path)
            return Zip(path, tuple(sorted(n for n in zipped.namelist() if not n.endswith("/"))), zipped)
        with tarfile.open(path, "r:") as archive:
            members = [member for member in archive if member.isreg()]
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise RequestError(_not_an_archive(path, error)) from None
    places = {member.name.removeprefix("./"): (member.offset_data, member.size) for member in members}
    return Tar(path, tuple(sorted(places)), places)


def _not_an_archive(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        packed = file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7")
    if packed:
        return f"{path} is compressed as a whole, so it cannot be read by parts. Unpack it to a folder first."
    return f"{path} is damaged or neither a folder, a tar nor a zip: {_plainly(error)}."


def _walk(folder: Path) -> tuple[str, ...]:
    """Every file below a folder, also through links to folders, once each."""
    found: list[str] = []
    seen: set[str] = set()
    for top, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(top)
        if real in seen:  # a link back to a folder above would go round for ever
            folders.clear()
            continue
        seen.add(real)
        inner = Path(top).relative_to(folder).as_posix()
        found += [name if inner == "." else f"{inner}/{name}" for name in names]
    return tuple(sorted(found))


def _plainly(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
