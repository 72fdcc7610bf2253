"""Bytes of tensors that are alive, followed operation by operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """While it is on: the bytes of tensors made since, each piece of memory once, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._history: list[tuple[int, frozenset[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta and _memory(tensor) not in given:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        now = self.now()
        self.peak = max(self.peak, now)
        self._history.append((now, frozenset(self._alive)))
        return result

    def now(self) -> int:
        gone = [key for key, (reference, _) in self._alive.items() if reference.expired()]
        for key in gone:
            del self._alive[key]
        return sum(num_bytes for _, num_bytes in self._alive.values())

    def begin(self) -> int:
        """Count the peak anew from here; what is alive now."""
        self.peak = self.now()
        self._history.clear()
        return self.peak

    def peak_without(self, tensors: Iterable[Tensor]) -> int:
        """The peak if these were not counted."""
        sizes = {_memory(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        left = (now - sum(sizes.get(key, 0) for key in alive) for now, alive in self._history)
        return max(left, default=0)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def most_alive(step: Any, weights: Iterable[Tensor]) -> int:
    """The most bytes of tensors at once that one step makes, without the gradients of weights.

    Gradients are there before it, as they are from the second step on; each step adds to them.
    """
    weights = list(weights)
    with torch.no_grad():
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
    with LiveBytes() as live:
        step()
    return live.peak
