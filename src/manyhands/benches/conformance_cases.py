"""The cases of the conformance table: small networks, each around one kind of layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

CHANNELS = 4


@dataclass(frozen=True, slots=True)
class Peers:
    """What others make of a row; nothing where it was not tried."""

    distconv: str = ""
    shard_tensor: str = ""
    dtensor: str = ""
    distdl: str = ""
    gspmd: str = ""


PEER_NAMES = Peers(
    "LLNL DistConv (2026-05)",
    "PhysicsNeMo ShardTensor 2.2.2",
    "torch DTensor 2.13",
    "DistDL (2022)",
    "JAX GSPMD",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One network of a row. `exchange` names layers after which even the fused group must exchange."""

    variant: str
    build: Callable[[], nn.Module]
    shape: tuple[int, int, int] = (3, 12, 12)
    batch: int = 4
    exchange: tuple[str, ...] = ()
    speeds: tuple[int, int, int, int] = (1, 1, 1, 1)  # of the devices: their shares
    row: str = ""
    peers: Peers = Peers()


def _between(layer: Callable[[], nn.Module], channels: int = CHANNELS) -> Callable[[], nn.Module]:
    """Builds the layer, which gives so many channels, after a convolution with ReLU and before another one.

    So its input has a gradient that somebody needs, and its result is read beyond the borders of its tiles.
    """

    def build() -> nn.Module:
        return _chain(layer=layer(), after=nn.Conv2d(channels, CHANNELS, 3, padding=1))

    return build


def _chain(**parts: nn.Module) -> nn.Module:
    """A convolution with ReLU, and then these."""
    first = {"before": nn.Conv2d(3, CHANNELS, 3, padding=1), "relu": nn.ReLU(inplace=True)}
    return nn.Sequential(OrderedDict(first | parts))


def _conv(kernel: int = 3, **options: int | str | tuple[int, int]) -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, kernel, **options)  # type: ignore[arg-type]


class _Residual(nn.Module):
    """A convolution and the shortcut around it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv(padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images) + images


class _Concat(nn.Module):
    """A convolution, and its input beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv(padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.conv(images), images], 1)


class _SqueezeExcite(nn.Module):
    """Channels scaled by what a small network makes of their means, by 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(CHANNELS, 2, 1)
        self.excite = nn.Conv2d(2, CHANNELS, 1)

    def forward(self, images: Tensor) -> Tensor:
        return images * self.excite(self.squeeze(self.pool(images)).relu()).sigmoid()


class _LinearSqueezeExcite(nn.Module):
    """The same by linear layers, as it was first written."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Linear(CHANNELS, 2)
        self.excite = nn.Linear(2, CHANNELS)

    def forward(self, images: Tensor) -> Tensor:
        scales = self.excite(self.squeeze(images.mean((2, 3))).relu()).sigmoid()
        return images * scales.view(-1, CHANNELS, 1, 1)


class _Twice(nn.Module):
    """One module applied to the image, and again to its own result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        return self.module(self.module(images).tanh())


class _TwoSizes(nn.Module):
    """One convolution applied to the image and to a smaller copy, as detection heads are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = _conv(padding=1)
        self.pool = nn.AvgPool2d(2)
        self.grow = nn.Upsample(scale_factor=2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images) + self.grow(self.head(self.pool(images)))


def _global_pool() -> nn.Module:
    return _chain(layer=nn.AdaptiveAvgPool2d(1), after=nn.Conv2d(CHANNELS, CHANNELS, 1))


def _head() -> nn.Module:
    """For images of 12x12."""
    return _chain(layer=_conv(padding=1, stride=2), flatten=nn.Flatten(), head=nn.Linear(CHANNELS * 36, 10))


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True))


def _deep() -> nn.Module:
    return nn.Sequential(
        _conv(padding=1), _conv(5, padding=2), _conv(padding=2, dilation=2), _conv(padding=1)
    )


def _deep_mixed() -> nn.Module:
    """Halos through a norm, a stride and an up-sampling: a region that grows, shrinks and grows."""
    return nn.Sequential(
        _conv(padding=1),
        nn.BatchNorm2d(CHANNELS),
        _conv(padding=1, stride=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        _conv(5, padding=2),
    )


def _pool_block() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.MaxPool2d(3, 2, 1), _conv(padding=1))


def _row(name: str, peers: Peers, *cases: Case) -> tuple[Case, ...]:
    """The cases of a row; the only one of a row needs no name of its own."""
    return tuple(replace(case, row=name, peers=peers, variant=case.variant or name) for case in cases)


def _layer(variant: str, layer: Callable[[], nn.Module], channels: int = CHANNELS) -> Case:
    return Case(variant, _between(layer, channels))


def _convolutions() -> tuple[Case, ...]:
    exact = "exact"
    return (
        *_row(
            "conv 3x3, padding 1",
            Peers(exact, exact, "WRONG", exact, exact),
            _layer("", lambda: _conv(padding=1)),
        ),
        *_row(
            "conv 3x3 stride 2; conv 7x7 stride 2 padding 3",
            Peers(exact, exact, "WRONG", exact, exact),
            _layer("conv 3x3 stride 2", lambda: _conv(stride=2, padding=1)),
            _layer("conv 7x7 stride 2 padding 3", lambda: _conv(7, stride=2, padding=3)),
        ),
        *_row("conv without padding", Peers("refused", exact, "", exact, exact), _layer("", _conv)),
        *_row(
            "conv dilation 2",
            Peers("refused", exact, "refused", exact, exact),
            _layer("", lambda: _conv(padding=2, dilation=2)),
        ),
        *_row(
            "depthwise, grouped conv",
            Peers(exact, exact, "", "", exact),
            _layer("depthwise", lambda: _conv(padding=1, groups=CHANNELS)),
            _layer("grouped conv", lambda: _conv(padding=1, groups=2)),
        ),
        *_row(
            "even kernel 4, stride 2, padding 1",
            Peers("refused", "refused", "", exact, exact),
            _layer("", lambda: _conv(4, stride=2, padding=1)),
        ),
        *_row(
            "transposed conv, kernel = stride",
            Peers(exact, exact),
            _layer("", lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2)),
        ),
        *_row(
            "transposed conv 4, stride 2, padding 1",
            Peers("refused", "refused"),
            _layer("", lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 4, 2, 1)),
        ),
    )


def _pools_and_norms() -> tuple[Case, ...]:
    exact, crashes = "exact", "backward crashes"
    return (
        *_row(
            "pooling, kernel = stride",
            Peers(exact, exact, "WRONG", exact, exact),
            _layer("max pool 2", lambda: nn.MaxPool2d(2)),
            _layer("average pool 2", lambda: nn.AvgPool2d(2)),
        ),
        *_row(
            "overlapping max pool 3, stride 2, padding 1",
            Peers("WRONG", "refused", "", exact, exact),
            _layer("", lambda: nn.MaxPool2d(3, 2, 1)),
        ),
        *_row(
            "adaptive / global average pool",
            Peers("WRONG", crashes, "", "", exact),
            _layer("adaptive average pool to 6x6", lambda: nn.AdaptiveAvgPool2d(6)),
            _layer("adaptive average pool to 5x7", lambda: nn.AdaptiveAvgPool2d((5, 7))),
            Case("global average pool", _global_pool, exchange=("relu",)),
        ),
        *_row(
            "batch norm, training", Peers("WRONG", crashes, "WRONG", exact, exact), _layer("", _batch_norm)
        ),
        *_row(
            "group norm",
            Peers("WRONG", "exact in 1-D, refused in 2-D"),
            _layer("", lambda: nn.GroupNorm(2, CHANNELS)),
        ),
    )


def _shapes_and_shares() -> tuple[Case, ...]:
    exact, none = "exact", "none"
    stride_1, stride_2 = _between(lambda: _conv(padding=1)), _between(lambda: _conv(stride=2, padding=1))
    block = _between(_pool_block)
    return (
        *_row("nearest up-sampling", Peers(exact, exact), _layer("", lambda: nn.Upsample(scale_factor=2))),
        *_row(
            "bilinear up-sampling",
            Peers("WRONG", exact, "", "", exact),
            _layer("", lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
        ),
        *_row(
            "residual add, concat",
            Peers(exact, exact),
            _layer("residual add", _Residual),
            _layer("concat", _Concat, 2 * CHANNELS),
        ),
        *_row(
            "flatten + linear head",
            Peers("by hand", "backward crashes", "", "by hand"),
            Case("", _head, exchange=("layer",)),
        ),
        *_row(
            "uneven: height 31 on 2 devices",
            Peers("aborts", "exact for stride 1", "", exact, "refused"),
            Case("height 31, stride 1", stride_1, (3, 31, 12)),
            Case("height 31, stride 2", stride_2, (3, 31, 12)),
        ),
        *_row(
            "stride 2 with odd local height (30 on 2, 2 devices)",
            Peers("refused", "WRONG shape", "", exact, exact),
            Case("", stride_2, (3, 30, 12)),
        ),
        *_row(
            "fused halos over several layers",
            Peers(none, none, none, none, none),
            _layer("four convolutions", _deep),
            _layer("convolutions, norm, up-sampling", _deep_mixed),
        ),
        *_row(
            "unequal shares by device speed",
            Peers(none, none, none, none, none),
            Case("convolution by 5/1/3/2", stride_1, batch=8, speeds=(5, 1, 3, 2)),
            Case("norm and pool by 5/1/3/2", block, batch=8, speeds=(5, 1, 3, 2)),
        ),
    )


def _options() -> tuple[Case, ...]:
    """Further rows: the options of a layer that nobody thinks of until a model uses them."""
    nobody = Peers()
    return (
        *_row(
            "ceil_mode pooling",
            nobody,
            _layer("max pool", lambda: nn.MaxPool2d(3, 2, ceil_mode=True)),
            _layer("average pool", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
        ),
        *_row(
            "count_include_pad pooling",
            nobody,
            _layer("padding counts", lambda: nn.AvgPool2d(3, 2, 1)),
            _layer("it does not", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
            _layer("nor with ceil_mode", lambda: nn.AvgPool2d(3, 2, 1, True, count_include_pad=False)),
        ),
        *_row(
            "asymmetric padding",
            nobody,
            _layer("behind alone", lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), _conv(stride=2))),
            _layer("more rows than columns", lambda: _conv(5, padding=(2, 1))),
        ),
        *_row(
            '"same" padding',
            nobody,
            _layer("even kernel 4", lambda: _conv(4, padding="same")),
            _layer("dilation 2", lambda: _conv(padding="same", dilation=2)),
        ),
        *_row(
            "align_corners",
            nobody,
            _layer("to 24x24", lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
            _layer("to 17x7", lambda: nn.Upsample((17, 7), mode="bilinear", align_corners=True)),
        ),
        *_row(
            "pixel (un)shuffle",
            nobody,
            _layer("pixel shuffle", lambda: nn.PixelShuffle(2), CHANNELS // 4),
            _layer("pixel unshuffle", lambda: nn.PixelUnshuffle(2), CHANNELS * 4),
        ),
    )


def _structures() -> tuple[Case, ...]:
    """Further rows: what spans a whole network, and the smallest of batches and tiles."""
    nobody = Peers()
    norm, wide = _between(_batch_norm), _between(lambda: _conv(5, padding=2))
    return (
        *_row(
            "squeeze-and-excite",
            nobody,
            _layer("1x1 convolutions", _SqueezeExcite),
            _layer("linear layers", _LinearSqueezeExcite),
        ),
        *_row(
            "dropout",
            nobody,
            _layer("elements", lambda: nn.Dropout(0.4)),
            _layer("channels", lambda: nn.Dropout2d(0.4)),
        ),
        *_row(
            "shared modules",
            nobody,
            _layer("one convolution twice", lambda: _Twice(_conv(padding=1))),
            _layer("one batch norm twice", lambda: _Twice(nn.BatchNorm2d(CHANNELS))),
            _layer("one convolution at two sizes", _TwoSizes),
        ),
        *_row("batch 1 on 3 devices", nobody, Case("batch norm of batch 1", norm, batch=1)),
        *_row(
            "1-row tiles",
            nobody,
            Case("conv 5x5 of 4x4", wide, (3, 4, 4)),
            Case("batch norm of 4x4", norm, (3, 4, 4)),
        ),
    )


CASES = (*_convolutions(), *_pools_and_norms(), *_shapes_and_shares(), *_options(), *_structures())
