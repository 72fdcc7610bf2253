"""ReLU6 and its kin in place. Torch keeps a copy of what it overwrites, though the result says as much:
a gradient stops where either lies at an end or beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from manyhands.ir.graph import (
    BatchNorm,
    Concatenate,
    Convolve,
    Deconvolve,
    Graph,
    GroupNorm,
    Linear,
    Mean,
    Pool,
)

Clamp = Callable[[Sequence[Tensor], dict[str, Tensor]], Tensor]
_COMPARED_AS_THEY_ARE = ("float32", "float64")  # of others torch rounds the ends in forward alone
_READS_ONLY = (BatchNorm, Concatenate, Convolve, Deconvolve, GroupNorm, Linear, Mean, Pool)


class _Clamp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, least: float, most: float) -> Tensor:
        ctx.mark_dirty(x)
        result = nn.functional.hardtanh_(x, least, most)
        ctx.save_for_backward(result)
        ctx.ends = least, most
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.ops.aten.hardtanh_backward(gradients[0], *ctx.saved_tensors, *ctx.ends), None, None


def clamping(module: nn.Module) -> Clamp | None:
    """The same as a module that clamps in place, but for the copy; None: it does something else."""
    if type(module) not in (nn.ReLU6, nn.Hardtanh):
        return None
    assert isinstance(module, nn.Hardtanh)
    ends = float(module.min_val), float(module.max_val)

    def clamp(inputs: Sequence[Tensor], weights: dict[str, Tensor]) -> Tensor:
        result: Tensor = _Clamp.apply(inputs[0], *ends)
        return result

    return clamp


def copying_nothing(graph: Graph, clamps: dict[str, Clamp]) -> dict[str, Clamp]:
    """Those whose results nobody overwrites in turn: backward then needs the copy."""
    layers, readers = graph.by_name(), graph.readers()
    return {
        name: clamp
        for name, clamp in clamps.items()
        if name in layers
        and layers[name].dtype in _COMPARED_AS_THEY_ARE
        and name not in graph.outputs
        and all(isinstance(layers[reader].operation, _READS_ONLY) for reader in readers[name])
    }
