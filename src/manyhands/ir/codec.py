"""Any of the nouns to JSON and back, and a short digest by which a plan knows its graph."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from enum import Enum
from typing import Any

from manyhands.ir.graph import Graph

JSON = Any
T = typing.TypeVar("T")


def encode(value: Any) -> JSON:
    """Plain JSON values; a field's type says how to read it back, and a union adds the type's name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], value: JSON) -> T:
    """The value of that type. Raises ValueError that names what is missing, unknown or of the wrong type."""
    return typing.cast(T, _decode(kind, value, "plan"))


def _decode(kind: Any, value: JSON, path: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        return _decode(next(option for option in options if option is not type(None)), value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path} should be a list, not {value!r}")
        kinds = typing.get_args(kind)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = (kinds[0],) * len(value)
        if len(kinds) != len(value):
            raise ValueError(f"{path} should have {len(kinds)} entries, not {len(value)}")
        return tuple(_decode(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{path} should be an object, not {value!r}")
        return {k: _decode(typing.get_args(kind)[1], v, f"{path}.{k}") for k, v in value.items()}
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path} should be of type {kind.__name__}, not {value!r}")
    return value


def _decode_fields(kind: Any, value: JSON, path: str) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise ValueError(f"{path} should be an object, not {value!r}")
    if unknown := set(value) - set(fields) - {"type"}:
        raise ValueError(f"{path} has no field {sorted(unknown)[0]!r}; it has {', '.join(fields)}")
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    if missing := required - set(value):
        raise ValueError(f"{path} lacks {sorted(missing)[0]!r}")
    given = {n: _decode(hints[n], v, f"{path}.{n}") for n, v in value.items() if n != "type"}
    try:
        return kind(**given)
    except AssertionError as error:
        raise ValueError(f"{path} cannot be: {error}") from None


def to_json(value: Any) -> str:
    return json.dumps(encode(value), indent=1)


def graph_digest(graph: Graph) -> str:
    """The digest of a graph whatever its precision: a plan made for float32 is proved in float64.

    What torch keeps in memory of it does not count: that may differ between versions. Nor does what follows
    from it, such as which layers rectify.
    """
    encoded = encode(graph)
    for layer in encoded["layers"]:
        del layer["saved"]
        layer["operation"].pop("rectifies", None)
    text = json.dumps(encoded, sort_keys=True)
    for precision in ("float64", "float32", "bfloat16", "float16"):
        text = text.replace(f'"{precision}"', '"float"')
    return hashlib.sha256(text.encode()).hexdigest()[:16]
