"""A convolution whose result nobody reads: only its backward is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from manyhands.runtime.late import result_like

Pair = tuple[int, ...]


def unread_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Memory of the result's shape that is never written to, with the gradients that conv2d would have."""
    result: Tensor = _Unread.apply(x, weight, bias, stride, padding, dilation, groups)
    return result


class _Unread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.bias_sizes = settings, None if bias is None else [len(bias)]
        return result_like(x, weight, *settings[:3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        where = ctx.bias_sizes, stride, padding, dilation, False, [0, 0], groups
        wanted = list(ctx.needs_input_grad[:3])
        found = torch.ops.aten.convolution_backward(gradients[0], x, weight, *where, wanted)
        return *(g if w else None for g, w in zip(found, wanted, strict=True)), None, None, None, None
