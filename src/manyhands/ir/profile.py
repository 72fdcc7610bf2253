"""What was measured of a device: how long its kinds of layers take, whole and cut, and moving bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyhands.ir.graph import Layer

POST, CARRY = "post", "carry"  # lines of messages: to hand one over, and the work of threads that carry it
AXES = ("batch", "channels", "map")  # along which a tile is a fraction of the whole result


EXCHANGED = "exchanged"  # how the kind of a norm ends whose statistics come from several devices
BARE_BYTES = 343_000_000  # of a process that has imported torch and traced a model, where not measured


@dataclass(frozen=True, slots=True)
class LayerSample:
    """Seconds of one layer on one tile, as it went in the middle of a step; fractions as in `AXES`."""

    kind: str
    fractions: tuple[float, float, float]
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class StepSample:
    """Seconds of a step that computes no layer, and the bytes it touched."""

    step: str
    num_bytes: int
    seconds: float


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
    stretches: tuple[tuple[str, float], ...] = ()  # of what is done among others, by the axis that is cut

    def slower(self, factor: float) -> Profile:
        """Of a device that takes so many times as long for everything."""
        return replace(
            self,
            timings=tuple(
                replace(t, forward_s=factor * t.forward_s, backward_s=factor * t.backward_s)
                for t in self.timings
            ),
            lines=tuple(
                replace(line, fixed_s=factor * line.fixed_s, per_byte_s=factor * line.per_byte_s)
                for line in self.lines
            ),
        )


def kind_of(layer: Layer, exchanged: bool = False) -> str:
    """Layers of one kind take equally long on the same part: operation, weights and map are alike.

    A norm whose statistics are exchanged computes less by itself, and is a kind of its own.
    """
    weights = " ".join("x".join(map(str, p.shape)) for p in layer.parameters if p.role == "weight")
    text = f"{layer.operation} {weights} {'x'.join(map(str, layer.shape[1:]))}"
    return f"{text} {EXCHANGED}" if exchanged else text


def fractions(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[float, float, float]:
    """How much of a result of this shape a tile of that shape is, along batch, channels and map."""
    parts = [size / whole if whole else 1.0 for size, whole in zip(tile, shape, strict=True)]
    area = 1.0
    for part in parts[2:]:
        area *= part
    return parts[0] if parts else 1.0, parts[1] if parts[1:] else 1.0, area
