"""Small graphs to plan, made by hand: planning needs no torch."""

from __future__ import annotations

from manyhands.ir.graph import (
    BatchNorm,
    Convolve,
    Graph,
    Input,
    Layer,
    Linear,
    Mean,
    Parameter,
    Pointwise,
    Rearrange,
    Slide,
    Window,
)
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.strategies import plan_by_name


def conv(name: str, source: str, shape: tuple[int, ...], inputs: int, stride: int = 1) -> Layer:
    slide = Slide(3, stride, 1, 1)
    weight = Parameter("weight", f"{name}.weight", (shape[1], inputs, 3, 3), True)
    return Layer(name, Convolve(Window(slide, slide), 1), (source,), shape, (weight,))


def two_convs() -> Graph:
    x = Layer("x", Input(0), (), (1, 2, 8, 4), differentiable=False)
    return Graph((x, conv("one", "x", (1, 3, 8, 4), 2), conv("two", "one", (1, 2, 8, 4), 3)), ("two",))


def small_net(batch: int = 4) -> Graph:
    """Two convolutions with a norm, a mean over the map and a classifier."""
    x = Layer("x", Input(0), (), (batch, 2, 9, 8), differentiable=False)
    weights = tuple(Parameter(role, f"norm.{role}", (4,), True) for role in ("weight", "bias"))
    running = tuple(
        Parameter(role, f"norm.{role}", (4,), False, True) for role in ("running_mean", "running_var")
    )
    norm = Layer("norm", BatchNorm(True, 1e-5, 0.1), ("one",), (batch, 4, 9, 8), running + weights)
    flat = Rearrange((batch, 6), ((0,), (1,), (), ()), ((0,), (1,)))
    fc = (Parameter("weight", "fc.weight", (5, 6), True), Parameter("bias", "fc.bias", (5,), True))
    return Graph(
        (
            x,
            conv("one", "x", (batch, 4, 9, 8), 2),
            norm,
            Layer("relu", Pointwise(), ("norm",), (batch, 4, 9, 8)),
            conv("two", "relu", (batch, 6, 5, 4), 4, stride=2),
            Layer("mean", Mean(True), ("two",), (batch, 6, 1, 1)),
            Layer("flat", flat, ("mean",), (batch, 6)),
            Layer("fc", Linear(), ("flat",), (batch, 5), fc),
        ),
        ("fc",),
    )


def lowered(graph: Graph, num_devices: int, strategy: str, fuse: tuple[str, ...] | None = None) -> Lowered:
    devices = tuple("abcdef"[:num_devices])
    return lower(graph, plan_by_name(graph, devices, strategy, fuse=fuse))
