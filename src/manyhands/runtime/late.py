"""A convolution whose backward goes to its input at once, and to its weights when somebody finds the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Pair = tuple[int, ...]
Job = Callable[[], None]
Later = Callable[[Job], None]


def late_conv2d(
    later: Later,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """As conv2d. Backward leaves a job with `later` that adds to the gradients of weight and bias."""
    result: Tensor = _Late.apply(x, weight, bias, stride, padding, dilation, groups, later)
    return result


class _Late(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        *window, later = settings
        ctx.save_for_backward(x, weight, bias)
        ctx.window, ctx.later = window, later
        return F.conv2d(x, weight, bias, *window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight, bias) = gradients, ctx.saved_tensors
        x = x.detach()  # the job must not hold the graph, which holds who keeps the job
        stride, padding, dilation, groups = ctx.window
        where = None if bias is None else [len(bias)], stride, padding, dilation, False, [0, 0], groups
        of_x, *of_weights = ctx.needs_input_grad[:3]

        def job() -> None:
            with torch.no_grad():
                found = torch.ops.aten.convolution_backward(gradient, x, weight, *where, [False, *of_weights])
            for tensor, wanted, slope in zip((weight, bias), of_weights, found[1:], strict=True):
                if wanted:
                    _add(tensor, slope)

        if any(of_weights):
            ctx.later(job)
        mask = [True, False, False]
        first = torch.ops.aten.convolution_backward(gradient, x, weight, *where, mask)[0] if of_x else None
        return first, *(None,) * 7


def _add(tensor: Tensor, slope: Tensor) -> None:
    """As autograd would: to a weight itself, or through what a piece of one was cut by."""
    if not tensor.is_leaf:
        torch.autograd.backward(tensor, slope)
    elif tensor.grad is None:
        tensor.grad = slope
    else:
        tensor.grad += slope
