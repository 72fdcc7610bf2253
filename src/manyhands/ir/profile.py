"""What was measured of a device: how long its kinds of layers take, whole and cut, and moving bytes."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.ir.graph import Layer


@dataclass(frozen=True, slots=True)
class Factor:
    """Time of a part of a layer's result over that of the whole; `fraction`: its size along an axis."""

    fraction: float
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One kind of layer on one device: seconds of the whole result for `batch` samples, and of parts of it.

    Cutting an axis to a fraction rarely cuts time by as much; `factors` has what was measured along each
    axis ("batch", "channels", "map"), smallest fraction first.
    """

    kind: str
    batch: int
    forward_s: float
    backward_s: float
    factors: tuple[tuple[str, tuple[Factor, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step that computes no layer, such as "send" or "place": fixed, and a byte."""

    step: str
    fixed_s: float
    per_byte_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.fixed_s + num_bytes * self.per_byte_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything measured on one device for one model."""

    device: str
    threads: int
    thrifty: bool  # was freed memory given back at once
    bare_bytes: int  # of a process that is ready to train and holds no weights yet
    timings: tuple[Timing, ...]
    lines: tuple[Line, ...]


def kind_of(layer: Layer) -> str:
    """Layers of one kind take equally long on the same part: operation, weights and map are alike."""
    weights = " ".join("x".join(map(str, p.shape)) for p in layer.parameters if p.role == "weight")
    return f"{layer.operation} {weights} {'x'.join(map(str, layer.shape[1:]))}"
