"""A part of a tensor. Its gradient becomes one of the whole that lies in the same order as the whole does.

torch's own slices return it with the channels first, whatever the order was; then every layer before them
has to put its tensors in another order, or takes a way through the library that is many times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from manyhands.runtime.formats import order_of


def part(whole: Tensor, where: Sequence[slice]) -> Tensor:
    """A box out of a tensor, by the first dimensions; the tensor itself where the box is all of it."""
    sizes = zip(where, whole.shape, strict=False)
    if all((s.start or 0) == 0 and (s.stop is None or s.stop == size) for s, size in sizes):
        return whole
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole[tuple(where)]
    result: Tensor = _Part.apply(whole, tuple(where))
    return result


class _Part(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, where: tuple[slice, ...]) -> Tensor:
        ctx.where, ctx.shape, ctx.order = where, whole.shape, order_of(whole)
        return whole.new_empty(0).set_(whole[where])  # type: ignore[call-overload]  # memory shared, no view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        whole = torch.empty(ctx.shape, dtype=gradient.dtype, memory_format=ctx.order)
        inside = whole
        for dimension, (span, size) in enumerate(zip(ctx.where, ctx.shape, strict=False)):
            start, stop, _ = span.indices(size)
            inside.narrow(dimension, 0, start).zero_()
            inside.narrow(dimension, stop, size - stop).zero_()
            inside = inside.narrow(dimension, start, stop - start)
        inside.copy_(gradient)
        return whole, None
