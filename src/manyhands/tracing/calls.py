"""Calls of a model's forward, before and after they are understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyhands.ir.geometry import Shape
from manyhands.ir.graph import Operation, Parameter


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor that a call reads: the layer that computes it, or the weight that it is."""

    layer: str
    shape: Shape
    parameter: Parameter | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call with its sizes known: function name, arguments (tensors as Ref), shape of the result."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Shape
    training: bool = True

    def get(self, position: int, name: str, default: Any = None) -> Any:
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def source(self) -> Ref:
        ref = self.get(0, "input")
        if not isinstance(ref, Ref):
            raise Unsplittable("its first argument is not a tensor")
        return ref


@dataclass(frozen=True, slots=True)
class Kind:
    """A call understood: its operation, which tensors it reads, which weights play which role."""

    operation: Operation
    inputs: tuple[Ref, ...]
    weights: tuple[tuple[str, Ref], ...] = ()


class Unsplittable(Exception):
    """This call runs whole; the reason goes into the plan."""


def refs_in(value: Any) -> list[Ref]:
    """Every tensor among some arguments, once each, in order."""
    found: list[Ref] = []
    if isinstance(value, Ref):
        found.append(value)
    elif isinstance(value, tuple | list):
        found += [ref for part in value for ref in refs_in(part)]
    elif isinstance(value, dict):
        found += [ref for part in value.values() for ref in refs_in(part)]
    return [ref for ref in dict.fromkeys(found) if ref.layer]
