"""Checkpoints: a folder for each, written all or nothing, and checked to the last bit before it is used.

    FOLDER/step-00000123/
        model.safetensors        parameters and buffers under the user's own names
        optimiser.safetensors    its state, named KEY/PARAMETER: momentum_buffer/conv1.weight
        manifest.json            what made it, where it stands, and the hashes of the two files

A checkpoint is written under a hidden name and renamed when every byte is on the disk, so whatever stands
under a good name is whole, at whatever instant the writer was killed. Old ones go the same way back: first
renamed, then deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from manyhands.errors import RequestError
from manyhands.reporting.text import amount
from manyhands.training.manifests import (
    Facts,
    FileFacts,
    Manifest,
    OptimiserFacts,
    make_manifest,
    parse,
    render,
)
from manyhands.training.tensorfiles import (
    ModelFile,
    StoredTensors,
    Tensors,
    describe,
    first_difference,
    hidden_folder,
    load_model_file,
    needed_bytes,
    reason,
    save_model,
    save_tensors,
    sync,
)

__all__ = [
    "Checkpoint",
    "Facts",
    "Manifest",
    "ModelFile",
    "OptimiserFacts",
    "StoredTensors",
    "checkpoints",
    "describe",
    "load_model_file",
    "newest",
    "read",
    "require_model",
    "require_shapes",
    "save_model",
    "write",
]

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMISER = "optimiser.safetensors"

_GOOD_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_HIDDEN_NAME = re.compile(r"\.(writing|discarded)-step-\d{8,}(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every bit is as it was written."""

    path: Path
    manifest: Manifest
    model: StoredTensors
    optimiser: StoredTensors
    warnings: tuple[str, ...] = ()  # why newer checkpoints were passed over


def write(folder: Path, facts: Facts, model: Tensors, optimiser: Tensors, keep: int) -> Path:
    """The folder of a new checkpoint, safe on the disk; of earlier steps, `keep - 1` stay beside it.

    Checkpoints of later steps are left alone: they are of another run, and not ours to delete. Where the new
    one cannot be written, a RequestError says why, and everything is as it was before.
    """
    if keep < 1:
        raise RequestError(f"keep = {keep}: at least 1 checkpoint has to be kept.")
    path = folder / f"step-{facts.step:08d}"
    needed = needed_bytes(model, optimiser)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_writer(folder):
            _clear_leftovers(folder, facts.step, keep)
            _require_space(folder, needed)
            with hidden_folder(folder / f".writing-{path.name}") as hidden:
                _fill(hidden, facts, model, optimiser)
                _put_in_place(hidden, path)
            _discard(_sorted_out(folder, facts.step, keep)[1])
    except (OSError, SafetensorError) as error:
        raise RequestError(
            f"{path} cannot be written: {reason(error)}; {amount(needed)} are needed. "
            f"{_still_there(folder)} Make room or save in another folder."
        ) from error
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first; where there is no such folder, there are none."""
    try:
        found = [entry for entry in folder.iterdir() if _GOOD_NAME.fullmatch(entry.name) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RequestError(f"{folder} cannot be read: {reason(error)}.") from None
    return sorted(found, key=lambda entry: (_step(entry), not _displaced(entry)), reverse=True)


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None where there is none at all.

    Its `warnings` tell of newer ones that are damaged. Where all of them are, a RequestError says so: that is
    no reason to begin anew without a word.
    """
    problems: list[str] = []
    for path in checkpoints(folder):
        try:
            return replace(read(path), warnings=tuple(problems))
        except RequestError as error:
            problems.append(str(error))
    if problems:
        raise RequestError(f"no checkpoint in {folder} can be used; of the newest, {problems[0]}")
    return None


def read(path: Path) -> Checkpoint:
    """The checkpoint in this folder, checked against its manifest; its tensors are read when asked for."""
    manifest = _read_manifest(path)
    for name, expected in manifest.files.items():
        _require_file(path / name, expected)
    return Checkpoint(path, manifest, StoredTensors(path / MODEL), StoredTensors(path / OPTIMISER))


def require_model(checkpoint: Checkpoint, model: Tensors, reference: str) -> None:
    """Refuse a checkpoint of another model than this `state_dict` (meta tensors will do).

    The RequestError names the first tensor that differs, with its type and shape there and here.
    """
    difference = first_difference(describe(model), checkpoint.manifest.tensors)
    if difference is None:
        return
    made_by = checkpoint.manifest.model
    what = f"another form of {reference}" if made_by == reference else f"{made_by}, not {reference}"
    raise RequestError(
        f"{checkpoint.path} is of {what}: {difference}. Train the model it is of, or save in another folder."
    )


def require_shapes(file: ModelFile, model: Tensors, reference: str) -> None:
    """Refuse a file of weights for another model than this `state_dict`; its types may differ."""
    there = {name: tuple(file.tensors.shape(name)) for name in file.tensors}
    here = {name: tuple(tensor.shape) for name, tensor in model.items()}
    for name in (*here, *there):
        if here.get(name) != there.get(name):
            raise RequestError(
                f"{file.path} is not of {reference}: {name} is {there.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here."
            )


def _step(path: Path) -> int:
    match = _GOOD_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _displaced(path: Path) -> bool:
    """Was it put aside, to make place for another of the same step?"""
    return path.suffix == ".old"


def _still_there(folder: Path) -> str:
    with suppress(RequestError):
        if found := checkpoints(folder):
            return f"{found[0].name}, written before, is intact."
    return "No checkpoint was there before."


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{folder} has {amount(free)} free")


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder; the lock goes with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"{folder}: another process is writing a checkpoint there. Give each run its own folder."
            ) from None
        except OSError:
            pass  # a file system without locks can hold checkpoints all the same
        yield
    finally:
        os.close(descriptor)


def _clear_leftovers(folder: Path, step: int, keep: int) -> None:
    """Remove what a killed writer left: hidden folders, and the checkpoint that it had yet to prune.

    Nothing is pruned here unless something whole stays; the new checkpoint may fail to be written.
    """
    for entry in list(folder.iterdir()):
        if _HIDDEN_NAME.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    kept, surplus = _sorted_out(folder, step, keep)
    if surplus and any(_is_whole(path) for path in kept):
        _discard(surplus)


def _fill(hidden: Path, facts: Facts, model: Tensors, optimiser: Tensors) -> None:
    """Write the three files and see them onto the disk."""
    files = {}
    for name, tensors in ((MODEL, model), (OPTIMISER, optimiser)):
        save_tensors(hidden / name, tensors, None)
        files[name] = FileFacts(num_bytes=(hidden / name).stat().st_size, sha256=_sha256(hidden / name))
    (hidden / MANIFEST).write_bytes(render(make_manifest(facts, describe(model), files)))
    sync(hidden / MANIFEST)
    sync(hidden)


def _put_in_place(hidden: Path, path: Path) -> None:
    """Give a complete checkpoint its name. One of the same step keeps a good name until that is done."""
    aside = path.with_name(f"{path.name}.old")
    displaces = path.exists()
    if displaces:
        os.rename(path, aside)
    try:
        os.rename(hidden, path)
    except OSError:
        if displaces:
            os.rename(aside, path)
        raise
    sync(path.parent)


def _sorted_out(folder: Path, step: int, keep: int) -> tuple[list[Path], list[Path]]:
    """The newest `keep` up to this step, and those to remove: what is older or was displaced by its like."""
    until_now = [path for path in checkpoints(folder) if _step(path) <= step]
    displaced = [path for path in until_now if _displaced(path) and path.with_suffix("") in until_now]
    good = [path for path in until_now if path not in displaced]
    return good[:keep], displaced + good[keep:]


def _discard(surplus: list[Path]) -> None:
    for path in surplus:
        discarded = path.with_name(f".discarded-{path.name}")
        os.rename(path, discarded)
        sync(path.parent)
        shutil.rmtree(discarded, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except RequestError:
        return False
    return True


def _read_manifest(path: Path) -> Manifest:
    try:
        content = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        inside = checkpoints(path)
        hint = f"; it holds some, the newest is {inside[0]}" if inside else f": it has no {MANIFEST}"
        raise RequestError(f"{path} is not a checkpoint{hint}.") from None
    except OSError as error:
        raise RequestError(f"{path / MANIFEST} cannot be read: {reason(error)}.") from None
    return parse(path / MANIFEST, content)


def _require_file(path: Path, expected: FileFacts) -> None:
    way_out = "Resume from another checkpoint."
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            what = "truncated" if num_bytes < expected.num_bytes else "too long"
            raise RequestError(f"{path} is {what}: {num_bytes} of {expected.num_bytes} bytes. {way_out}")
        if _sha256(path) != expected.sha256:
            raise RequestError(f"{path} is damaged: its SHA-256 is not what was written. {way_out}")
    except FileNotFoundError:
        raise RequestError(f"{path} is missing. {way_out}") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {reason(error)}.") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def orders(notes: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Of each device: were channels last, and were 1x1 convolutions computed as such? Sums depend on it.

    Older checkpoints do not say the second: they were products.
    """
    last = notes["channels_last"]
    return list(zip(last, notes.get("convolving", [False] * len(last)), strict=True))
