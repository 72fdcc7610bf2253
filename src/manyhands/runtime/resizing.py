"""Up- and down-sampling of one tile: the same source rows and weights as for the whole map."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.ir.geometry import Shape, Span, Tile
from manyhands.ir.graph import Layer, Mode, Resize

Function = Callable[[Sequence[Tensor], dict[str, Tensor]], Tensor]


def resize(
    layer: Layer, operation: Resize, x: Tensor, need: Tile, tile: Tile, shape: Shape, function: Function
) -> Tensor:
    if operation.mode is Mode.NEAREST:
        for d in (2, 3):
            rows = _nearest(layer, d, shape, function)[tile.spans[d].start : tile.spans[d].stop]
            x = x.index_select(d, rows - need.spans[d].start)
        return x
    for d, scale in zip((2, 3), operation.scales, strict=True):
        low, high, weight = _linear(tile.spans[d], shape[d], scale, operation.align_corners, x.dtype)
        start = need.spans[d].start
        view = (-1, 1) if d == 2 else (-1,)
        x = torch.lerp(x.index_select(d, low - start), x.index_select(d, high - start), weight.view(view))
    return x


def _nearest(layer: Layer, dimension: int, shape: Shape, function: Function) -> Tensor:
    """The source row of each row of the result, asked of torch itself: its rounding is its own."""
    rows = torch.arange(shape[dimension], dtype=torch.float64)
    probe = rows[:, None].expand(shape[2:]) if dimension == 2 else rows.expand(shape[2:])
    picked = function([probe[None, None]], {})[0, 0]
    return (picked[:, 0] if dimension == 2 else picked[0]).long()


def _linear(
    span: Span, size: int, scale: float, align_corners: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of the result: the two source rows between which it lies, and how far."""
    index = torch.arange(span.start, span.stop, dtype=torch.float64)
    place = index * scale if align_corners else ((index + 0.5) * scale - 0.5).clamp(min=0)
    low = place.floor().long().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    return low, high, (place - low).clamp(0, 1).to(dtype)
