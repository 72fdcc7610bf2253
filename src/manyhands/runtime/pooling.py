"""Pooling of one tile, with the image's border where the image's border is."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.ir.geometry import Shape, Span, Tile
from manyhands.ir.graph import AdaptivePool, Mode, Pool, Slide
from manyhands.ir.regions import slide_need
from manyhands.runtime.parts import part


def pool(operation: Pool, x: Tensor, need: Tile, tile: Tile, shape: Shape) -> Tensor:
    """A tile of a pooled map from the rows at hand."""
    slides = (operation.window.rows, operation.window.columns)
    amounts: list[int] = []
    for d, slide in zip((2, 3), slides, strict=True):
        wanted = slide_need(slide, tile.spans[d])
        inside = wanted & Span(0, shape[d])
        start = inside.start - need.spans[d].start if len(inside) else 0
        x = part(x, (*(slice(None),) * d, slice(start, start + len(inside))))
        before = inside.start - wanted.start if len(inside) else len(wanted)
        amounts = [before, len(wanted) - len(inside) - before, *amounts]
    kernel, stride = [s.kernel for s in slides], [s.stride for s in slides]
    if operation.mode is Mode.MAX:
        x = F.pad(x, amounts, value=-inf) if any(amounts) else x
        return F.max_pool2d(x, kernel, stride, 0, [s.dilation for s in slides])
    x = F.pad(x, amounts) if any(amounts) else x
    if operation.divisor is not None:
        return F.avg_pool2d(x, kernel, stride, divisor_override=operation.divisor)
    rows, columns = (
        _counts(slide, tile.spans[d], shape[d], operation.include_padding)
        for d, slide in zip((2, 3), slides, strict=True)
    )
    if set(rows) == {kernel[0]} and set(columns) == {kernel[1]}:
        return F.avg_pool2d(x, kernel, stride)
    sums = F.avg_pool2d(x, kernel, stride, divisor_override=1)
    counts = torch.tensor(rows, dtype=x.dtype)[:, None] * torch.tensor(columns, dtype=x.dtype)
    return sums / counts


def _counts(slide: Slide, span: Span, size: int, include_padding: bool) -> list[int]:
    """By how many rows each result is divided."""
    counts = []
    for index in range(span.start, span.stop):
        start = index * slide.stride - slide.before
        stop = min(start + slide.kernel, size + slide.after)
        counts.append(stop - start if include_padding else min(stop, size) - max(start, 0))
    return counts


def adaptive_pool(
    operation: AdaptivePool, x: Tensor, need: Tile, tile: Tile, shape: Shape, result: Shape
) -> Tensor:
    """One window at a time: their sizes differ. Results are few, or nobody would pool so."""
    function = F.adaptive_max_pool2d if operation.mode is Mode.MAX else F.adaptive_avg_pool2d
    spans = []
    for d in (2, 3):
        size, count, start = shape[d], result[d], need.spans[d].start
        indices = range(tile.spans[d].start, tile.spans[d].stop)
        spans.append([(i * size // count - start, -(-(i + 1) * size // count) - start) for i in indices])
    every = (slice(None),) * 2
    rows = [
        torch.cat(
            [
                function(part(x, (*every, slice(top, bottom), slice(left, right))), 1)
                for left, right in spans[1]
            ],
            3,
        )
        for top, bottom in spans[0]
    ]
    return torch.cat(rows, 2)
