"""Small pieces of random networks: each maker draws a module that takes an (N, C, H, W) map to another."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
Maker = Callable[[Random, Shape], nn.Module]


class Lambda(nn.Module):
    """A function of tensors as a module that fx looks into."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def divisor(rng: Random, *numbers: int) -> int:
    """A random common divisor."""
    return rng.choice([d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)])


def twice(rng: Random, low: int, high: int) -> tuple[int, int]:
    return rng.randint(low, high), rng.randint(low, high)


def conv(rng: Random, shape: Shape) -> nn.Module:
    kernel, dilation = twice(rng, 1, 4), twice(rng, 1, 2)
    stride = rng.choice([(1, 1), (1, 1), twice(rng, 1, 3)])
    out = rng.randint(2, 8)
    groups = rng.choice([1, 1, divisor(rng, shape[1], out)])
    padding: Any = rng.choice([(0, 0), tuple(k // 2 for k in kernel), twice(rng, 0, 3)])
    if rng.random() < 0.2:
        stride, padding = (1, 1), "same"
    mode = rng.choice(["zeros", "zeros", "zeros", "reflect", "circular", "replicate"])
    return nn.Conv2d(
        shape[1], out, kernel, stride, padding, dilation, groups, rng.random() < 0.7, padding_mode=mode
    )


def depthwise(rng: Random, shape: Shape) -> nn.Module:
    channels = shape[1]
    out = channels * rng.choice([1, 1, 2])
    return nn.Conv2d(channels, out, 3, rng.randint(1, 2), 1, groups=channels, bias=rng.random() < 0.5)


def deconv(rng: Random, shape: Shape) -> nn.Module:
    kernel, stride, dilation = twice(rng, 1, 4), twice(rng, 1, 3), twice(rng, 1, 2)
    out = rng.randint(2, 8)
    groups = rng.choice([1, divisor(rng, shape[1], out)])
    extra = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    padding = tuple(rng.randint(0, d * (k - 1)) for k, d in zip(kernel, dilation, strict=True))
    bias = rng.random() < 0.7
    return nn.ConvTranspose2d(shape[1], out, kernel, stride, padding, extra, groups, bias, dilation)


def max_pool(rng: Random, shape: Shape) -> nn.Module:
    kernel = twice(rng, 1, 3)
    padding = (rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2))
    return nn.MaxPool2d(kernel, twice(rng, 1, 3), padding, rng.randint(1, 2), ceil_mode=rng.random() < 0.5)


def avg_pool(rng: Random, shape: Shape) -> nn.Module:
    kernel = twice(rng, 1, 3)
    padding = (rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2))
    ceil, include = rng.random() < 0.5, rng.random() < 0.5
    return nn.AvgPool2d(kernel, twice(rng, 1, 3), padding, ceil, include, rng.choice([None, None, 3]))


def adaptive_pool(rng: Random, shape: Shape) -> nn.Module:
    kind = rng.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])
    return kind(rng.choice([1, twice(rng, 1, 5), (None, rng.randint(1, 4))]))


def means(rng: Random, shape: Shape) -> nn.Module:
    return Lambda(
        rng.choice(
            [
                lambda self, x: x - x.mean((2, 3), keepdim=True),
                lambda self, x: x + torch.mean(x, dim=[2, 3], keepdim=True),
                lambda self, x: x * x.mean(1, keepdim=True),
                lambda self, x: x + x.sum(3, keepdim=True),
                lambda self, x: x * x.amax(dim=(2, 3), keepdim=True),
                lambda self, x: x + x.mean((-1, -2))[:, :, None, None],
                lambda self, x: torch.cat([x.mean(1, True), torch.amax(x, 1, keepdim=True)], 1),
                lambda self, x: x + x.mean(0, keepdim=True),
                lambda self, x: x + x.mean(),
                lambda self, x: x / (1 + x.std((2, 3), keepdim=True, correction=0)),
                lambda self, x: x + torch.max(x, dim=1, keepdim=True)[0],
            ]
        )
    )


def batch_norm(rng: Random, shape: Shape) -> nn.Module:
    momentum = rng.choice([0.1, 0.3, None])
    norm = nn.BatchNorm2d(shape[1], 1e-3, momentum, rng.random() < 0.8, rng.random() < 0.8)
    _scatter(norm)
    return norm.train(rng.random() < 0.75)


def _scatter(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape) + 0.5)


def other_norm(rng: Random, shape: Shape) -> nn.Module:
    channels = shape[1]
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.GroupNorm(divisor(rng, channels), channels, 1e-2, rng.random() < 0.7),
        lambda: nn.LayerNorm(shape[rng.randint(1, 3) :], 1e-2, rng.random() < 0.7),
        lambda: Lambda(_channels_last_norm, norm=nn.LayerNorm(channels, 1e-2)),
        lambda: nn.LocalResponseNorm(3),
    ]
    if shape[0] > 1:  # of one sample in channels-last memory, torch 2.13 returns wrong gradients
        kinds += [lambda: nn.InstanceNorm2d(channels, 1e-2, affine=rng.random() < 0.5)]
    norm = rng.choice(kinds)()
    _scatter(norm)
    return norm


def _channels_last_norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def activation(rng: Random, shape: Shape) -> nn.Module:
    inplace = rng.random() < 0.5
    if rng.random() < 0.25:
        return nn.PReLU(rng.choice([1, shape[1]]))
    if rng.random() < 0.3:
        return Lambda(
            rng.choice(
                [
                    lambda self, x: F.relu(x),
                    lambda self, x: F.relu(x, inplace=True),
                    lambda self, x: torch.tanh(x).add_(1.0),
                    lambda self, x: x.clamp(-1, 1),
                    lambda self, x: F.leaky_relu(x, 0.2) * torch.sigmoid(x),
                    lambda self, x: torch.where(x > 0, x, x * 0.1),
                    lambda self, x: F.softmax(x, dim=1),
                    lambda self, x: torch.log_softmax(x, 1),
                    lambda self, x: x.softmax(dim=-1),
                    lambda self, x: torch.maximum(x, x.detach() * 0.5),
                    lambda self, x: F.gelu(x),
                ]
            )
        )
    kinds: list[Any] = [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.Mish]
    kinds += [nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus]
    kinds += [nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Identity]
    kind = rng.choice(kinds)
    if "inplace" in kind.__init__.__code__.co_varnames:
        return kind(inplace=inplace)
    return nn.Softmax2d() if rng.random() < 0.05 else kind()


def dropout(rng: Random, shape: Shape) -> nn.Module:
    return rng.choice([nn.Dropout, nn.Dropout2d])(rng.choice([0.2, 0.5]), rng.random() < 0.5)


def upsample(rng: Random, shape: Shape) -> nn.Module:
    mode = rng.choice(["nearest", "nearest", "bilinear", "bilinear", "bicubic"])
    align = None if mode == "nearest" else rng.random() < 0.5
    if rng.random() < 0.5:
        factor = rng.choice([2, 2, 3, 1.5, 0.5, (2, 1.7), 1.3])
        return nn.Upsample(scale_factor=factor, mode=mode, align_corners=align)
    size = tuple(max(1, n + rng.randint(-2, n)) for n in shape[2:])
    return nn.Upsample(size, mode=mode, align_corners=align)


def shuffle(rng: Random, shape: Shape) -> nn.Module:
    batch, channels, rows, columns = shape
    groups = divisor(rng, channels)
    choices: list[nn.Module] = [
        Lambda(lambda self, x: _channel_shuffle(x, groups)),
        nn.ChannelShuffle(groups),
        Lambda(lambda self, x: x.transpose(2, 3)),
        Lambda(lambda self, x: x.flip(3)),
        Lambda(lambda self, x: torch.stack([x, x * 2], 2).flatten(1, 2)),
    ]
    if channels % 4 == 0:
        choices += [nn.PixelShuffle(2)] * 2
    if rows % 2 == 0 and columns % 2 == 0:
        choices += [nn.PixelUnshuffle(2), Lambda(lambda self, x: _reorg(x))] * 2
    return rng.choice(choices)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, rows, columns = x.size()
    x = x.view(batch, groups, channels // groups, rows, columns)
    return torch.transpose(x, 1, 2).contiguous().view(batch, -1, rows, columns)


def _reorg(x: Tensor) -> Tensor:
    """The reorganisation of YOLOv2: neighbours of a 2x2 square go to channels."""
    batch, channels, rows, columns = x.shape
    x = x.view(batch, channels, rows // 2, 2, columns // 2, 2).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(batch, channels * 4, rows // 2, columns // 2)


def slicing(rng: Random, shape: Shape) -> nn.Module:
    batch, channels, rows, columns = shape
    amounts = [rng.randint(0, 2) for _ in range(4)]
    half = max(1, channels // 2)
    mode = rng.choice(["constant", "replicate", "reflect", "circular"])
    choices: list[Callable[[Any, Tensor], Tensor]] = [
        lambda self, x: F.pad(x, amounts, mode=mode),
        lambda self, x: F.pad(x, amounts, value=1.5),
        lambda self, x: F.pad(x, (1, -1, -1, 2)),
        lambda self, x: x[:, :, 1:, : x.shape[3] - 1],
        lambda self, x: x[:, :, ::2, 1::3],
        lambda self, x: x[:, half - 1 :],
        lambda self, x: x[..., :-1] + x[..., 1:],
        lambda self, x: torch.cat(torch.chunk(x, 2, 1)[::-1], 1),
        lambda self, x: torch.cat([part * 2 for part in x.chunk(2, dim=2)], dim=2),
        lambda self, x: torch.cat(x.split([half, channels - half], 1) + (x,), 1),
        lambda self, x: x.narrow(2, 1, rows - 1),
        lambda self, x: torch.cat((x[..., ::2, :], x[..., 1::2, :]), 2),
        lambda self, x: x[:, 0:1] * x,
        lambda self, x: x + x[:, :, :1],
        lambda self, x: x + x[:, 0].unsqueeze(1),
    ]
    if channels > 1:
        return Lambda(rng.choice(choices))
    return Lambda(rng.choice(choices[:5]))
