"""Larger pieces of random networks: with branches, weights used directly, sizes computed in forward."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loopback.random_blocks import Lambda, Shape, activation, batch_norm, divisor


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, expand: bool, linear: bool) -> None:
        super().__init__()
        self.expand, self.linear = expand, linear
        if linear:
            self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)
        else:
            self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)  # type: ignore[assignment]
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(x)
        y = y.view(x.size(0), x.size(1)) if self.linear else y
        y = torch.sigmoid(self.up(F.relu(self.down(y))))
        y = y.view(x.size(0), x.size(1), 1, 1) if self.linear else y
        return x * y.expand_as(x) if self.expand else x * y


class Scale(nn.Module):
    """Times a learned scale, plus a learned or fixed shift."""

    def __init__(self, rng: Random, channels: int) -> None:
        super().__init__()
        shape = rng.choice([(1, channels, 1, 1), (channels, 1, 1), (), (1,)])
        self.scale = nn.Parameter(torch.rand(shape) + 0.5, requires_grad=rng.random() < 0.8)
        self.register_buffer("shift", torch.rand(1, channels, 1, 1))
        self.twice = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift
        return 0.5 * x - 2 + x / 3 if self.twice else x * self.scale


class FunctionalConv(nn.Module):
    def __init__(self, rng: Random, channels: int) -> None:
        super().__init__()
        out, self.kind = rng.randint(2, 6), rng.choice(["conv", "deconv", "norm", "standard", "group"])
        self.weight = nn.Parameter(torch.randn(out, channels, 3, 3) * 0.3)
        self.bias = nn.Parameter(torch.randn(out))
        self.back = nn.Parameter(torch.randn(channels, out, 2, 2) * 0.3)
        self.gain = nn.Parameter(torch.rand(channels) + 0.5)
        self.groups = divisor(rng, channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "deconv":
            return F.conv_transpose2d(x, self.back, self.bias, stride=2, padding=1)
        if self.kind == "norm":
            return F.batch_norm(x, None, None, self.gain, self.gain, True, 0.1, 1e-3)
        if self.kind == "group":
            return F.group_norm(x, self.groups, self.gain, eps=1e-2)
        if self.kind == "standard":  # weights computed in forward
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight, self.bias, padding=1)
        return F.conv2d(x, self.weight, self.bias, stride=(1, 2), padding=(1, 0))


class Opaque(nn.Module):
    """Branches on a value, so that it cannot be traced and runs whole."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if float(y.detach().sum()) > 1e9:
            return y * 2
        return y + x


class Shared(nn.Module):
    """One convolution and norm used twice."""

    def __init__(self, rng: Random, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=divisor(rng, channels))
        self.norm = nn.BatchNorm2d(channels, 1e-3)
        self.act = activation(rng, (1, channels, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(self.act(self.norm(self.conv(x))))))


class Residual(nn.Module):
    def __init__(self, body: nn.Module, rng: Random) -> None:
        super().__init__()
        self.body, self.inplace = body, rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.inplace:
            y += x
            return y
        return x + y


class Concat(nn.Module):
    def __init__(self, one: nn.Module, two: nn.Module, keep: bool) -> None:
        super().__init__()
        self.one, self.two, self.keep = one, two, keep

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.one(x), self.two(x)
        two = F.interpolate(two, size=one.shape[2:])
        return torch.cat([one, two, one] if self.keep else [one, two], dim=1)


def compound(rng: Random, shape: Shape) -> nn.Module:
    channels = shape[1]
    kind = rng.randrange(11)
    if kind == 0:
        return SqueezeExcite(channels, rng.random() < 0.5, rng.random() < 0.5)
    if kind == 1:
        return Scale(rng, channels)
    if kind == 2:
        return FunctionalConv(rng, channels)
    if kind == 3:
        return Opaque(channels)
    if kind == 4:
        return Shared(rng, channels)
    if kind == 5:
        return Lambda(lambda self, x: F.interpolate(x, size=(x.shape[2] * 2, x.size(3) + 1)))
    if kind == 6:
        return Lambda(_attention)
    if kind == 7:
        frozen = nn.Conv2d(channels, 4, 3, padding=1)
        return nn.Sequential(frozen.requires_grad_(False), batch_norm(rng, (1, 4)))
    if kind == 8:
        return Lambda(_pyramid, conv=nn.Conv2d(channels, 3, 3, 2, 1))
    if kind == 9:
        return Lambda(_overwriting, conv=nn.Conv2d(channels, channels, 1))
    return Lambda(lambda self, x: self.conv(F.pad(x, (0, 1, 0, 1))), conv=nn.Conv2d(channels, 5, 3, 2))


def _attention(self: Any, x: Tensor) -> Tensor:
    flat = x.flatten(2)
    weights = torch.softmax(torch.bmm(flat, flat.transpose(1, 2)) * 0.1, -1)
    return torch.matmul(weights, flat).view_as(x)


def _pyramid(self: Any, x: Tensor) -> Tensor:
    small = self.conv(x)
    large = F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)
    return torch.cat((x, large), 1)


def _overwriting(self: Any, x: Tensor) -> Tensor:
    """In place, and what was overwritten is read again."""
    y = self.conv(x)
    z = y.add_(1.0)
    y = y * 2
    z += 0.5
    return y + torch.relu(z)


def residual(body: nn.Module, rng: Random) -> nn.Module:
    return Residual(body, rng)
