"""Which tensors lie in the same memory, for what a call that works in place changes besides its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from manyhands.errors import RequestError
from manyhands.ir.graph import (
    BatchNorm,
    Concatenate,
    Convolve,
    Deconvolve,
    Dropout,
    GroupNorm,
    Linear,
    Operation,
    Pointwise,
    Pool,
)
from manyhands.tracing.fx import where

# On a tile these may hand back what they were given, also where they copy a whole tensor.
_HANDS_BACK = frozenset(["identity", "contiguous", "detach", "float", "double", "half", "to", "type_as"])


def makes_own_memory(operation: Operation, function: str) -> bool:
    """Is the result of such a layer surely nobody else's memory, whatever the tile?"""
    if isinstance(operation, Pointwise):
        return function.lower() not in _HANDS_BACK and "dropout" not in function.lower()
    return isinstance(
        operation, Convolve | Deconvolve | Linear | Pool | BatchNorm | GroupNorm | Concatenate | Dropout
    )


def same_memory(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return one.untyped_storage()._cdata == two.untyped_storage()._cdata


def same_view(one: Any, two: Any) -> bool:
    """Do both show the same elements of the same memory?"""
    return (
        same_memory(one, two)
        and (one.shape, one.stride()) == (two.shape, two.stride())
        and one.storage_offset() == two.storage_offset()
    )


def refuse_stale_views(node: fx.Node, overwritten: torch.Tensor, values: dict[fx.Node, Any]) -> None:
    """Another view of memory that is overwritten, read again later, would show old values in a plan."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    for other, value in values.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        stale = any(same_memory(p, overwritten) and not same_view(p, overwritten) for p in parts)
        if stale and order[other] < order[node] and any(order[user] > order[node] for user in other.users):
            raise RequestError(
                f"{where(node)} overwrites memory of which {where(other)} shows another view, read again "
                "later. Use the form that does not work in place."
            )
