"""The manifest of a checkpoint: what made it, where it stands, and what its files must be."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from manyhands import __version__
from manyhands.errors import RequestError

FORMAT: Literal[1] = 1

_NO_CHECKSUM = "0" * 64


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimiserFacts(_Strict):
    """The optimiser's name and the numbers of each group of parameters: lr, momentum, weight_decay ..."""

    name: str
    groups: tuple[dict[str, JsonValue], ...]


class FileFacts(_Strict):
    """What a file must be to be the one that was written."""

    num_bytes: int
    sha256: str


class Facts(_Strict):
    """What a run says of itself when it saves: enough to go on from there, on any plan."""

    model: str = Field(description="a zoo name or file.py:function")
    input: str = Field(description="one image, as in 3x32x32")
    plan: JsonValue
    step: int = Field(ge=0, description="optimiser steps done")
    epoch: int = Field(ge=0)
    position: int = Field(ge=0, description="samples of this epoch that are used up")
    seed: int
    optimiser: OptimiserFacts
    notes: dict[str, JsonValue] = {}


class Manifest(Facts):
    """Everything in manifest.json. The checksum is of the manifest itself, with zeros in its own place."""

    format: Literal[1] = FORMAT
    manyhands: str = __version__
    tensors: dict[str, str] = Field(description="names, types and shapes of the model: float32 64x3x3x3")
    files: dict[Literal["model.safetensors", "optimiser.safetensors"], FileFacts] = Field(min_length=2)
    checksum: str = Field(default=_NO_CHECKSUM, pattern=r"^[0-9a-f]{64}$")

    @property
    def digest(self) -> str:
        """A short digest of the model's names, types and shapes."""
        return digest(self.tensors)


def digest(described: Mapping[str, str]) -> str:
    """A short digest of names, types and shapes, whatever their order: equal for two builds of one model."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def make_manifest(facts: Facts, tensors: dict[str, str], files: dict[str, FileFacts]) -> Manifest:
    """The manifest of a checkpoint that holds these tensors in these files."""
    values = facts.model_dump(include=set(Facts.model_fields))
    return Manifest.model_validate(values | {"tensors": tensors, "files": files})


def render(manifest: Manifest) -> bytes:
    """The manifest as it is stored; its checksum is of these bytes, with zeros where the checksum stands."""
    unsigned = {"checksum": _NO_CHECKSUM} | manifest.model_dump(exclude={"checksum"})
    content = json.dumps(unsigned, indent=1).encode()
    return content.replace(_NO_CHECKSUM.encode(), _sha256(content), 1)


def parse(path: Path, content: bytes) -> Manifest:
    """The manifest in these bytes of that file; a RequestError says what is wrong with any others."""
    values = _values(path, content)
    if values.get("format") != FORMAT:
        raise RequestError(
            f"{path} is of format {values.get('format')!r}, written by manyhands {values.get('manyhands')}; "
            f"manyhands {__version__} reads format {FORMAT}. Use the version that wrote it."
        )
    signed = re.match(rb'\{\s*"checksum": "([0-9a-f]{64})"', content)
    if signed is None or _sha256(content.replace(signed[1], _NO_CHECKSUM.encode(), 1)) != signed[1]:
        raise RequestError(
            f"{path} is damaged: it is not as its checksum says. Resume from another checkpoint."
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{path}: {where}: {problem['msg'].lower()}.") from None


def _values(path: Path, content: bytes) -> dict[str, Any]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is damaged: {error}. Resume from another checkpoint.") from None
    if not isinstance(values, dict):
        raise RequestError(f"{path} is not the manifest of a checkpoint.")
    return values


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
