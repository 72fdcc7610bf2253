"""Small random networks and clusters, made by hand: planning needs no torch."""

from __future__ import annotations

from random import Random

from manyhands.ir.cluster import Cluster, Device
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


def random_graph(random: Random, num_convolutions: int) -> Graph:
    """Convolutions with norms, activations and residuals in random places, and sometimes a classifier."""
    batch, size = random.choice((1, 2, 4, 6)), random.choice((7, 16, 33))
    layers = [Layer("x", Input(0), (), (batch, 3, size, size), differentiable=False)]
    for index in range(num_convolutions):
        layers.append(_conv(random, f"conv{index}", layers[-1]))
        before = layers[-1]
        if random.random() < 0.6:
            layers.append(_norm(f"norm{index}", before))
        if random.random() < 0.6:
            layers.append(Layer(f"relu{index}", Pointwise(), (layers[-1].name,), layers[-1].shape))
        same = [layer for layer in layers[1:-1] if layer.shape == layers[-1].shape]
        if same and random.random() < 0.5:
            other = random.choice(same)
            sources = (layers[-1].name, other.name)
            layers.append(Layer(f"add{index}", Pointwise(), sources, layers[-1].shape))
    if random.random() < 0.5:
        batch, channels, *_ = layers[-1].shape
        layers.append(Layer("mean", Mean(True), (layers[-1].name,), (batch, channels, 1, 1)))
        flat = Rearrange((batch, channels), ((0,), (1,), (), ()), ((0,), (1,)))
        layers.append(Layer("flat", flat, ("mean",), (batch, channels)))
        weight = Parameter("weight", "fc.weight", (10, channels), True)
        layers.append(Layer("fc", Linear(), ("flat",), (batch, 10), (weight,)))
    return Graph(tuple(layers), (layers[-1].name,))


def _conv(random: Random, name: str, source: Layer) -> Layer:
    batch, inputs, rows, columns = source.shape
    stride = 2 if rows > 8 and random.random() < 0.3 else 1
    kernel = random.choice((1, 3, 5))
    slide = Slide(kernel, stride, kernel // 2, kernel // 2)
    channels = random.choice((inputs, 4, 8, 64))
    size = [(n + 2 * (kernel // 2) - kernel) // stride + 1 for n in (rows, columns)]
    weight = Parameter("weight", f"{name}.weight", (channels, inputs, kernel, kernel), True)
    return Layer(
        name,
        Convolve(Window(slide, slide), 1),
        (source.name,),
        (batch, channels, size[0], size[1]),
        (weight,),
    )


def _norm(name: str, source: Layer) -> Layer:
    channels = source.shape[1]
    weights = tuple(Parameter(role, f"{name}.{role}", (channels,), True) for role in ("weight", "bias"))
    roles = ("running_mean", "running_var")
    running = tuple(Parameter(role, f"{name}.{role}", (channels,), False, True) for role in roles)
    return Layer(name, BatchNorm(True, 1e-5, 0.1), (source.name,), source.shape, running + weights)


def random_cluster(random: Random, num_devices: int, *, memory_bytes: int | None = None) -> Cluster:
    devices = tuple(
        Device(f"d{i}", None, memory_bytes, random.choice((1e8, 1e9, 3e9)), random.choice((1e9, 4e9)), 20e-6)
        for i in range(num_devices)
    )
    return Cluster(devices, random.choice((1e5, 1e6, 1e7, 1e9)), random.choice((1e-5, 1e-3)))
