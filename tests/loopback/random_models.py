"""Random small networks: a seed gives a model and the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.loopback.random_blocks import (
    Lambda,
    Maker,
    Shape,
    activation,
    adaptive_pool,
    avg_pool,
    batch_norm,
    conv,
    deconv,
    depthwise,
    dropout,
    max_pool,
    means,
    other_norm,
    shuffle,
    slicing,
    upsample,
)
from tests.loopback.random_compounds import Concat, Residual, compound

MAKERS: tuple[tuple[int, Maker], ...] = (
    (5, conv),
    (2, depthwise),
    (3, deconv),
    (2, max_pool),
    (2, avg_pool),
    (1, adaptive_pool),
    (2, means),
    (4, batch_norm),
    (3, other_norm),
    (5, activation),
    (1, dropout),
    (2, upsample),
    (2, shuffle),
    (3, slicing),
    (5, compound),
)


class Net(nn.Module):
    """Blocks one after another; results of some blocks are outputs too, and a second input may join."""

    def __init__(self, blocks: Sequence[nn.Module], head: nn.Module, taps: set[int], form: str) -> None:
        super().__init__()
        self.blocks, self.head, self.taps, self.form = nn.ModuleList(blocks), head, taps, form

    def run(self, x: Tensor) -> Any:
        tapped = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.taps:
                tapped.append(x)
        x = self.head(x)
        if self.form == "dict":
            return {"main": x, "taps": tapped}
        return (*tapped, x) if tapped else x

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class TwoInputs(nn.Module):
    def __init__(self, net: Net, join: str, size: Shape) -> None:
        super().__init__()
        self.net, self.join = net, join
        self.conv = nn.Conv2d(size[1], size[1], 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.join == "add":
            return self.net.run(self.conv(x) + y)
        if self.join == "modulate":
            return self.net.run(x * self.conv(y).mean((2, 3), keepdim=True))
        return self.net.run(self.conv(x) * torch.sigmoid(self.conv(y)))


def random_model(rng: Random) -> tuple[nn.Module, tuple[Shape, ...]]:
    """A model in training mode (but for its frozen norms), and the shapes of its inputs."""
    torch.manual_seed(rng.randrange(1 << 30))
    shape = (rng.randint(1, 5), rng.randint(1, 6), rng.randint(4, 16), rng.randint(4, 16))
    first, blocks = shape, []
    for _ in range(rng.randint(1, 7)):
        block, shape = _drawn(rng, shape)
        blocks.append(block)
    taps = {i for i in range(len(blocks) - 1) if rng.random() < 0.07}
    net = Net(blocks, _head(rng, shape), taps, rng.choice(["tuple", "dict"]))
    if rng.random() < 0.15:
        return TwoInputs(net, rng.choice(["add", "multiply", "modulate"]), first), (first, first)
    return net, (first,)


def _drawn(rng: Random, shape: Shape, depth: int = 0) -> tuple[nn.Module, Shape]:
    """A block that fits the shape, and the shape of its result."""
    while True:
        block = _proposal(rng, shape, depth)
        try:
            with torch.no_grad():
                value = block(torch.randn(shape))
        except (RuntimeError, ValueError, IndexError):
            continue
        if not bool(value.isfinite().all()):  # torch's own backward of a maximum of nothing crashes
            continue
        result = tuple(value.shape)
        if len(result) == 4 and max(result[2:]) <= 26 and 1 <= result[1] <= 24 and min(result) >= 1:
            return block, result


def _proposal(rng: Random, shape: Shape, depth: int) -> nn.Module:
    if depth == 0 and rng.random() < 0.2:
        body, result = _drawn(rng, shape, 1)
        inner, result = _drawn(rng, result, 1)
        body = nn.Sequential(body, inner)
        if result == shape:
            return Residual(body, rng)
        return Concat(body, _drawn(rng, shape, 1)[0], rng.random() < 0.3)
    makers = [maker for weight, maker in MAKERS for _ in range(weight)]
    return rng.choice(makers)(rng, shape)


def _head(rng: Random, shape: Shape) -> nn.Module:
    batch, channels, rows, columns = shape
    features = channels * rows * columns
    kind = rng.randrange(8)
    if kind == 0:
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 5))
    if kind == 1:
        return Lambda(lambda self, x: self.fc(x.view(x.size(0), -1)), fc=nn.Linear(features, 6))
    if kind == 2:
        return Lambda(_pooled, fc=nn.Linear(channels, 6), out=nn.Linear(6, 4), drop=nn.Dropout(0.3))
    if kind == 3:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3), nn.LogSoftmax(1))
    if kind == 4:
        return Lambda(lambda self, x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1]))
    if kind == 5 and batch > 2:
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 4), nn.BatchNorm1d(4, 1e-3), nn.ReLU())
    if kind == 6:
        return nn.Conv2d(channels, 3, 1)
    return nn.Identity()


def _pooled(self: Any, x: Tensor) -> Tensor:
    x = torch.flatten(x.mean([2, 3], keepdim=True), 1)
    return self.out(self.drop(torch.relu(self.fc(x))))
