"""Forward of one layer on one tile, from tiles of its inputs; autograd does the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.ir.geometry import Span, Tile
from manyhands.ir.graph import (
    AdaptivePool,
    Along,
    BatchNorm,
    Concatenate,
    Convolve,
    Deconvolve,
    Dropout,
    Expand,
    GroupNorm,
    Layer,
    Linear,
    Mean,
    Mode,
    Pad,
    Pointwise,
    Pool,
    Rearrange,
    Reduce,
    Resize,
    Slide,
    Take,
    Whole,
)
from manyhands.ir.regions import factor_ranges, fold, group_range, slide_need
from manyhands.runtime.dropout import mask
from manyhands.runtime.late import Later, Parting, late_conv2d
from manyhands.runtime.norms import settled
from manyhands.runtime.parts import part
from manyhands.runtime.pooling import adaptive_pool, pool
from manyhands.runtime.products import distance
from manyhands.runtime.resizing import resize
from manyhands.runtime.unread import unread_conv2d

Function = Callable[[Sequence[Tensor], dict[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """One layer on one tile: everything its kernel may look at."""

    layer: Layer
    tile: Tile  # of the result
    inputs: tuple[Tensor, ...]
    needs: tuple[Tile, ...]  # where the inputs lie
    shapes: tuple[tuple[int, ...], ...]  # the inputs' whole shapes
    weights: dict[str, Tensor]  # by role, cut to what the tile needs
    function: Function | None  # what the model itself calls
    seed: int
    step: int
    again: bool = False  # for the second time: running statistics have seen this batch
    unread: bool = False  # a convolution of which only backward is wanted
    later: Later | None = None  # a convolution whose weights' gradients are left there
    parting: Parting | None = None  # a convolution of which some is computed first
    convolving: bool = False  # 1x1 convolutions are not taken for products of matrices

    @property
    def own_function(self) -> Function:
        assert self.function is not None, f"{self.layer.name} has no function of the model's own"
        return self.function

    def call(self) -> Tensor:
        """What the model itself computes, of the tiles at hand."""
        return self.own_function(self.inputs, self.weights)

    @property
    def same_map(self) -> bool:
        """Is nothing cut but the batch?"""
        whole = Tile.whole(self.layer.shape).spans[1:]
        inputs = zip(self.needs, self.shapes, strict=True)
        return self.tile.spans[1:] == whole and all(
            need.spans[1:] == Tile.whole(shape).spans[1:] for need, shape in inputs
        )


def compute(work: Work) -> Tensor:
    """The tile of a layer's result."""
    (x, *_), operation = (*work.inputs, None), work.layer.operation
    match operation:
        case Pool() | AdaptivePool() | Resize() if work.same_map:
            return work.call()
        case Convolve():
            return convolve(work, operation)
        case Deconvolve():
            return deconvolve(work, operation)
        case Linear():
            return F.linear(x, work.weights["weight"], work.weights.get("bias"))
        case Pool():
            return pool(operation, x, work.needs[0], work.tile, work.shapes[0])
        case AdaptivePool():
            return adaptive_pool(operation, x, work.needs[0], work.tile, work.shapes[0], work.layer.shape)
        case Resize():
            return resize(
                work.layer, operation, x, work.needs[0], work.tile, work.shapes[0], work.own_function
            )
        case Rearrange():
            return rearrange(operation, x, work.tile)
        case Concatenate(dimension):
            return torch.cat([t for t in work.inputs if t.numel()], dimension)
        case Take(_, steps):
            return x[tuple(slice(None, None, step) for step in steps)]
        case Pad():
            return pad(work, operation)
        case Expand():
            return x.expand(work.tile.shape)
        case Dropout():
            return dropout(work, operation)
        case BatchNorm():
            return batch_norm(work, operation)
        case GroupNorm(groups, eps):
            first, last = group_range(work.tile.spans[1], work.layer.shape[1], groups)
            weight, bias = work.weights.get("weight"), work.weights.get("bias")
            untracked = torch.is_grad_enabled() and not x.requires_grad
            if untracked and x.stride(1) == 1:  # torch 2.13's backward crashes on channels-last
                x = x.clone(memory_format=torch.contiguous_format)
            return torch.group_norm(x, last - first, weight, bias, eps)
        case Mean(keep):
            return x.mean((2, 3), keepdim=keep)
        case Pointwise():
            return work.call()
        case Along(dimensions):
            result = work.call()
            spans = enumerate(work.tile.spans)
            return part(result, [_slice(s) if d in dimensions else slice(None) for d, s in spans])
        case Reduce():
            return work.call()
        case Whole():
            result = work.call()
            return part(result, [_slice(span) for span in work.tile.spans])
        case _:
            raise TypeError(f"no kernel computes {operation}")


def _slice(span: Span) -> slice:
    return slice(span.start, span.stop)


def window_rows(slide: Slide, need: Span, span: Span) -> tuple[slice, int, int]:
    """Which of the rows at hand the windows touch, and how many rows of padding come before and after.

    Rows after the last window that are too few for another one may stay.
    """
    wanted = slide_need(slide, span)
    inside = wanted & need
    if not len(inside):  # the windows lie in the padding alone
        return slice(0, 0), len(wanted), 0
    stop = need.stop if inside == wanted and need.stop - wanted.stop < slide.stride else inside.stop
    touched = slice(inside.start - need.start, stop - need.start)
    return touched, inside.start - wanted.start, wanted.stop - inside.stop


def convolve(work: Work, operation: Convolve) -> Tensor:
    (x,), (need,), tile = work.inputs, work.needs, work.tile
    slides = (operation.window.rows, operation.window.columns)
    stride, dilation = tuple(s.stride for s in slides), tuple(s.dilation for s in slides)
    first, last = group_range(tile.spans[1], work.layer.shape[1], operation.groups)
    groups = last - first if operation.groups > 1 else 1
    weight, bias = work.weights["weight"], work.weights.get("bias")
    conv2d = unread_conv2d if work.unread else F.conv2d
    if work.later is not None or work.parting is not None:
        conv2d = partial(late_conv2d, work.later, parting=work.parting)
    if operation.mode is not Mode.CONSTANT:
        for d, slide in zip((2, 3), slides, strict=True):
            x = _folded(
                x, d, slide_need(slide, tile.spans[d]), need.spans[d], work.shapes[0][d], operation.mode
            )
        y = conv2d(x, weight, bias, stride, (0, 0), dilation, groups)
        return _own_channels(y, work, operation.groups)
    if work.convolving and operation.is_product:
        dilation = (distance(x, groups),) * 2
    parts, before, after = zip(
        *(window_rows(s, need.spans[d], tile.spans[d]) for d, s in zip((2, 3), slides, strict=True)),
        strict=True,
    )
    x = part(x, (slice(None), slice(None), *parts))
    even, skips = _even_padding(slides, before, after, tile)
    if even is None:
        x, even, skips = F.pad(x, (before[1], after[1], before[0], after[0])), (0, 0), (0, 0)
    if work.parting is not None:
        work.parting.skip = skips[0]
    y = conv2d(x, weight, bias, stride, even, dilation, groups)
    inside = (slice(skip, skip + len(s)) for skip, s in zip(skips, tile.spans[2:], strict=True))
    return _own_channels(part(y, (slice(None), slice(None), *inside)), work, operation.groups)


def _even_padding(
    slides: tuple[Slide, ...], before: tuple[int, ...], after: tuple[int, ...], tile: Tile
) -> tuple[tuple[int, int] | None, tuple[int, int]]:
    """Padding alike on both sides, and how many results to skip, where that is cheaper than a padded copy.

    A tile at the upper border needs padding above and none below. Padding both sides computes a row or two
    too many, which are dropped; a copy of the tile would cost its memory once more.
    """
    paddings, skips = [], []
    for slide, one, two, span in zip(slides, before, after, tile.spans[2:], strict=True):
        padding = max(one, two)
        extra = (2 * padding - one - two) / slide.stride
        if (padding - one) % slide.stride or extra > 0.1 * len(span):
            return None, (0, 0)
        paddings.append(padding)
        skips.append((padding - one) // slide.stride)
    return (paddings[0], paddings[1]), (skips[0], skips[1])


def _own_channels(y: Tensor, work: Work, groups: int) -> Tensor:
    """A group is computed whole; keep the channels that were asked for."""
    span = work.tile.spans[1]
    if groups == 1:
        return y
    size = work.layer.shape[1] // groups
    start = span.start - span.start // size * size
    return part(y, (slice(None), slice(start, start + len(span))))


def deconvolve(work: Work, operation: Deconvolve) -> Tensor:
    """Without padding, from the input's first row on; then the tile's rows are cut out."""
    (x,), (need,), tile = work.inputs, work.needs, work.tile
    slides = (operation.window.rows, operation.window.columns)
    stride, dilation = tuple(s.stride for s in slides), tuple(s.dilation for s in slides)
    first, last = group_range(tile.spans[1], work.layer.shape[1], operation.groups)
    groups = last - first if operation.groups > 1 else 1
    bias = work.weights.get("bias")
    if work.same_map:
        padding = tuple(s.before for s in slides)
        least = (
            (n - 1) * s.stride - 2 * s.before + s.reach for n, s in zip(x.shape[2:], slides, strict=True)
        )
        extra = tuple(n - m for n, m in zip(tile.shape[2:], least, strict=True))
        return F.conv_transpose2d(x, work.weights["weight"], bias, stride, padding, extra, groups, dilation)
    y = F.conv_transpose2d(x, work.weights["weight"], None, stride, 0, 0, groups, dilation)
    for d, slide in zip((2, 3), slides, strict=True):
        start = tile.spans[d].start - (need.spans[d].start * slide.stride - slide.before)
        stop = start + len(tile.spans[d])
        low, high = min(max(start, 0), y.shape[d]), max(min(stop, y.shape[d]), 0)
        y = part(y, (*(slice(None),) * d, slice(low, max(high, low))))
        if len(tile.spans[d]) != y.shape[d]:  # rows that no input reaches
            before = min(max(-start, 0), len(tile.spans[d]) - y.shape[d])
            amounts = (before, len(tile.spans[d]) - y.shape[d] - before)
            y = F.pad(y, (*amounts, 0, 0) if d == 3 else (0, 0, *amounts))
    y = y if bias is None else y + bias[:, None, None]
    return _own_channels(y, work, operation.groups)


def rearrange(operation: Rearrange, x: Tensor, tile: Tile) -> Tensor:
    ranges = factor_ranges(operation, tile)
    order = [factor for factors in operation.source for factor in factors]
    x = x.reshape([len(ranges[factor]) for factor in order])
    target = [factor for factors in operation.target for factor in factors]
    x = x.permute([order.index(factor) for factor in target])
    shape, where = [], []
    for factors, span in zip(operation.target, tile.spans, strict=True):
        inner = 1
        for factor in factors[1:]:
            inner *= operation.sizes[factor]
        start = ranges[factors[0]].start * inner if factors else 0
        shape.append(len(ranges[factors[0]]) * inner if factors else 1)
        where.append(slice(span.start - start, span.stop - start))
    return part(x.reshape(shape), where)


def pad(work: Work, operation: Pad) -> Tensor:
    (x,), (need,) = work.inputs, work.needs
    amounts: list[int] = []
    for d in range(x.dim()):
        wanted = work.tile.spans[d].shift(-operation.before[d])
        if operation.mode is not Mode.CONSTANT:
            x = _folded(x, d, wanted, need.spans[d], work.shapes[0][d], operation.mode)
            continue
        inside = wanted & Span(0, work.shapes[0][d])
        start = inside.start - need.spans[d].start if len(inside) else 0
        x = part(x, (*(slice(None),) * d, slice(start, start + len(inside))))
        before = inside.start - wanted.start if len(inside) else len(wanted)
        amounts = [before, len(wanted) - len(inside) - before, *amounts]
    return F.pad(x, amounts, value=operation.value) if any(amounts) else x.view_as(x)


def _folded(x: Tensor, dimension: int, wanted: Span, at_hand: Span, size: int, mode: Mode) -> Tensor:
    """Rows of the image, and for those outside of it the rows that stand in for them."""
    if wanted == at_hand:
        return x
    rows = [fold(index, size, mode) - at_hand.start for index in range(wanted.start, wanted.stop)]
    return x.index_select(dimension, torch.tensor(rows))


def dropout(work: Work, operation: Dropout) -> Tensor:
    (x,), p = work.inputs, operation.probability
    kept = mask(work.seed, work.step, work.layer.name, work.layer.shape, work.tile, p, operation.channels)
    scale = kept.to(x.dtype)
    return x * (scale.div_(1 - p) if p < 1 else scale)


def batch_norm(work: Work, operation: BatchNorm) -> Tensor:
    """Frozen, or in training with the whole batch and map at hand."""
    weights = work.weights
    mean, variance = weights.get("running_mean"), weights.get("running_var")
    if operation.training and work.again:
        mean = variance = None
    momentum = count_batch(weights, operation) if operation.training and not work.again else 0.0
    weight, bias = weights.get("weight"), weights.get("bias")
    x = settled(work.inputs[0])
    y = F.batch_norm(x, mean, variance, weight, bias, operation.training, momentum, operation.eps)
    if y.requires_grad:
        y.register_hook(settled)
    return y


def count_batch(weights: dict[str, Tensor], operation: BatchNorm) -> float:
    """One more batch seen; the momentum with which running statistics follow it."""
    counter = weights.get("num_batches_tracked")
    if counter is not None:
        counter.add_(1)
    if operation.momentum is not None:
        return operation.momentum
    return 1.0 / float(counter) if counter is not None else 0.0
