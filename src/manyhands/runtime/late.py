"""A convolution whose backward goes to its input at once, and to its weights when somebody finds the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from manyhands.runtime.formats import order_of
from manyhands.runtime.products import distance

Pair = tuple[int, ...]
FEW = 0.1  # of some rows: so many are rather computed too many than all that they read is copied
Job = Callable[[], None]
Later = Callable[[Job], None]


@dataclass
class Parting:
    """Boxes of a convolution's result: what is computed at once, and the rest, left as a job.

    Each box is samples and rows of the result, counted from its first; `skip` rows come before those.
    """

    first: tuple[tuple[slice, slice], ...]
    rest: tuple[slice, slice]
    leave: Callable[[Job], None]
    skip: int = 0


def late_conv2d(
    later: Later | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    parting: Parting | None = None,
) -> Tensor:
    """As conv2d. Backward leaves a job with `later` that adds to the gradients of weight and bias; None: it
    does that at once. With `parting`, the result is whole when what that was given to leave is done.
    """
    result: Tensor = _Late.apply(x, weight, bias, stride, padding, dilation, groups, later, parting)
    return result


class _Late(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        *window, later, parting = settings
        ctx.save_for_backward(x, weight, bias)
        ctx.window, ctx.later = window, later
        if parting is not None:
            return _begun(parting, x, weight, bias, *window)
        return F.conv2d(x, weight, bias, *window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight, bias) = gradients, ctx.saved_tensors
        x = x.detach()  # the job must not hold the graph, which holds who keeps the job
        stride, padding, dilation, groups = ctx.window
        where = None if bias is None else [len(bias)], stride, padding, dilation, False, [0, 0], groups
        of_x, *of_weights = ctx.needs_input_grad[:3]
        if ctx.later is None:
            mask = [of_x, *of_weights]
            return *torch.ops.aten.convolution_backward(gradient, x, weight, *where, mask), *(None,) * 6

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
        return first, *(None,) * 8


def result_like(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Memory for the result of a convolution."""
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    map_shape = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
    return torch.empty((len(x), len(weight), *map_shape), dtype=x.dtype, memory_format=order_of(x))


def _begun(parting: Parting, x: Tensor, weight: Tensor, bias: Tensor | None, *window: Any) -> Tensor:
    """The result, of which the first boxes are computed. The rest comes into the same memory unseen by
    autograd, which has saved nothing of a result.
    """
    result = result_like(x, weight, *window[:3])
    memory, given = result.data, (x.detach(), weight.detach(), None if bias is None else bias.detach())

    @torch.no_grad()
    def fill(samples: slice, rows: slice) -> None:
        rows = slice(rows.start + parting.skip, rows.stop + parting.skip)
        memory[samples, :, rows] = _some_rows(*given, samples, rows, *window)

    for box in parting.first:
        fill(*box)
    parting.leave(partial(fill, *parting.rest))
    return result


def _some_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    samples: slice,
    rows: slice,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """Some rows of some samples of a convolution's result. Each of their windows touches the image."""
    step, reach = stride[0], dilation[0] * (weight.shape[2] - 1) + 1
    if weight.shape[2:] == (1, 1):
        dilation = (min(dilation[0], distance(x[samples, :, rows], groups)),) * 2
    start, stop = rows.start * step - padding[0], (rows.stop - 1) * step + reach - padding[0]
    above, below = max(-start, 0), max(stop - x.shape[2], 0)
    read = x[samples, :, max(start, 0) : min(stop, x.shape[2])]
    count, even = rows.stop - rows.start, max(above, below)
    extra = even - above, even - below
    if extra[0] % step or sum(extra) > FEW * step * count:
        read, even, extra = F.pad(read, (0, 0, above, below)), 0, (0, 0)
    found = F.conv2d(read, weight, bias, stride, (even, padding[1]), dilation, groups)
    return found[:, :, extra[0] // step :][:, :, :count]


def _add(tensor: Tensor, slope: Tensor) -> None:
    """As autograd would: to a weight itself, or through what a piece of one was cut by."""
    if not tensor.is_leaf:
        torch.autograd.backward(tensor, slope)
    elif tensor.grad is None:
        tensor.grad = slope
    else:
        tensor.grad += slope
