"""Statistics of a whole map from everybody's own tile of it, and what flows back through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Layer, Statistic
from manyhands.ir.territory import Exchange
from manyhands.runtime.formats import order_of
from manyhands.runtime.tape import Box


@dataclass
class Moments:
    """Mean and variance over (samples, channels) of the tile this device must know."""

    tile: Tile
    mean: Tensor
    variance: Tensor

    def at(self, tile: Tile) -> tuple[Tensor, Tensor]:
        part = tile.within(self.tile)
        return self.mean[part], self.variance[part]


def measure(layer: Layer, own: Tensor) -> Tensor:
    """Partial statistics of one tile: mean and sum of squared differences, or the mean alone."""
    dims = tuple(range(2, own.dim()))
    if layer.statistic is Statistic.MEAN:
        return own.mean(dims)[None]
    if layer.statistic is Statistic.BATCH_NORM:
        mean, variance = torch.ops.aten.batch_norm_update_stats(_dense(own), None, None, 0.0)
        count = own.numel() // own.shape[1]
        return torch.stack([mean[None], variance[None] * count])
    if not dims:  # group norm of (batch, channels): every element is its own mean
        return torch.stack([own, torch.zeros_like(own)])
    variance, mean = torch.var_mean(own, dims, correction=0)
    return torch.stack([mean, variance * (own.numel() // (own.shape[0] * own.shape[1]))])


def _dense(x: Tensor) -> Tensor:
    """x itself, or a copy without gaps: torch's batch norm is many times faster on that."""
    return settled(x.contiguous(memory_format=order_of(x)))


def combine(layer: Layer, exchange: Exchange, parts: dict[str, Tensor], like: Tensor) -> Moments:
    """The statistics of the whole from everybody's parts, added in the order of devices."""
    assert exchange.known is not None
    known = exchange.known
    counts = like.new_zeros(known.shape)
    mean = like.new_zeros(known.shape)
    for share in exchange.shares:
        where = share.tile.within(known)
        counts[where] += share.count
        mean[where] += parts[share.device][0] * share.count
    mean /= counts
    if layer.statistic is Statistic.MEAN:
        return Moments(known, mean, mean)
    if exchange.group > 1:
        mean = _over_groups(mean, exchange.group, counts)
    squares = like.new_zeros(known.shape)
    for share in exchange.shares:
        where, part = share.tile.within(known), parts[share.device]
        squares[where] += part[1] + share.count * (part[0] - mean[where]) ** 2
    if exchange.group > 1:
        squares = _summed_over_groups(squares, exchange.group)
    return Moments(known, mean, squares / exchange.total)


def _over_groups(mean: Tensor, group: int, counts: Tensor) -> Tensor:
    weighted = _summed_over_groups(mean * counts, group)
    return weighted / _summed_over_groups(counts, group)


def _summed_over_groups(values: Tensor, group: int) -> Tensor:
    """Every channel's value replaced by the sum over its group."""
    grouped = values.unflatten(-1, (-1, group))
    return grouped.sum(-1, keepdim=True).expand_as(grouped).flatten(-2)


def settled(x: Tensor) -> Tensor:
    """x itself, or a copy where torch's batch norm (2.13) would return wrong gradients without a word.

    That is one sample (or its gradient) in channels-last memory with a batch stride shorter than the sample.
    """
    odd = x.dim() == 4 and x.shape[0] == 1 and x.stride(0) < x.numel() and not x.is_contiguous()
    return x.contiguous() if odd else x


class Normalise(Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics that came from elsewhere.

    The gradient it returns for x leaves out what flows through the statistics: the sums for that go into
    the box, and are given back to the owners of x by `correction` once everybody's are added up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        box: Box,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.box = eps, box
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        gradient, weight_gradient, bias_gradient = torch.ops.aten.native_batch_norm_backward(
            settled(gradients[0]), _dense(x), weight, mean, variance, None, None, False, ctx.eps, [True] * 3
        )
        ctx.box.tensor = torch.stack([bias_gradient * weight, weight_gradient * weight])
        return gradient, weight_gradient, bias_gradient, None, None, None, None


def normalise(
    layer: Layer, x: Tensor, tile: Tile, moments: Moments, weights: dict[str, Tensor], eps: float, box: Box
) -> Tensor:
    """A tile of a norm's result from the same tile of its input."""
    batch_norm = layer.statistic is Statistic.BATCH_NORM
    samples, channels = x.shape[:2]
    domain = Tile(((moments.tile.spans[0] if batch_norm else tile.spans[0]), tile.spans[1]))
    mean, variance = (t.reshape(-1) for t in moments.at(domain))
    weight = weights.get("weight", x.new_ones(channels))
    bias = weights.get("bias", x.new_zeros(channels))
    if batch_norm:
        return Normalise.apply(settled(x), weight, bias, mean, variance, eps, box)
    weight = weight.expand(samples, channels).reshape(-1)  # every sample's channel is a channel of its own
    bias = bias.expand(samples, channels).reshape(-1)
    flat = settled(x.reshape(1, samples * channels, *x.shape[2:]))
    return Normalise.apply(flat, weight, bias, mean, variance, eps, box).reshape(x.shape)


def local_sums(layer: Layer, exchange: Exchange, tile: Tile, box: Box, like: Tensor) -> Tensor:
    """This device's sums over the tile that it knows, those of a group on each of its channels."""
    assert exchange.known is not None
    factor = 1 if layer.statistic is Statistic.MEAN else 2
    sums = like.new_zeros((factor, *exchange.known.shape))
    taken = box.take()
    if taken is not None:
        batch_norm = layer.statistic is Statistic.BATCH_NORM
        domain = Tile(((exchange.known.spans[0] if batch_norm else tile.spans[0]), tile.spans[1]))
        sums[(slice(None), *domain.within(exchange.known))] = taken.reshape(factor, *domain.shape)
    return _summed_over_groups(sums, exchange.group) if exchange.group > 1 else sums


def _totals(exchange: Exchange, parts: dict[str, Tensor]) -> Tensor:
    """Everybody's sums over the tile that this device measured, added in the order of devices."""
    assert exchange.own is not None
    own = exchange.own.tile
    first = next(iter(parts.values()))
    totals = first.new_zeros((first.shape[0], *own.shape))
    for share in exchange.readers:
        totals[(slice(None), *share.tile.within(own))] += parts[share.device]
    return totals


def mean_correction(exchange: Exchange, parts: dict[str, Tensor], rank: int) -> Tensor:
    """What flows back through a mean into every element of this device's own tile."""
    totals = _totals(exchange, parts)[0] / exchange.total
    return totals.reshape(*totals.shape, *(1,) * (rank - 2))


def norm_correction(
    exchange: Exchange, parts: dict[str, Tensor], moments: Moments, eps: float, rank: int
) -> tuple[Tensor, Tensor]:
    """What flows back through a norm's statistics into its input x: offset + slope * x."""
    assert exchange.own is not None
    totals = _totals(exchange, parts)
    mean, variance = moments.at(exchange.own.tile)
    scale = torch.rsqrt(variance + eps)
    slope = scale * scale * totals[1] / -exchange.total
    offset = scale * totals[0] / -exchange.total - slope * mean
    shape = (*offset.shape, *(1,) * (rank - 2))
    return offset.reshape(shape), slope.reshape(shape)
