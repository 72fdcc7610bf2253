"""Two ends for a piece of autograd: where gradients leave it, and where they are handed in.

A chunk of layers is one autograd graph between its sources and its roots. Neither end holds on to the
tensor it stands for, so a tensor lives only as long as backward itself needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from manyhands.ir.graph import Layer
from manyhands.ir.program import Forward


@dataclass
class Box:
    """A place to put a gradient down and pick it up."""

    tensor: Tensor | None = None
    alone: bool = False  # nobody else holds it: it may be overwritten

    def take(self) -> Tensor | None:
        tensor, self.tensor = self.tensor, None
        return tensor


class Source(Function):
    """`data` as the start of a graph; its gradient arrives in the box."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return data.new_empty(0).set_(data)  # type: ignore[call-overload]  # shares memory, but is no view

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.box.tensor = gradients[0]
        return None, None, None


class Root(Function):
    """A scalar in whose backward the gradient in the box flows on; the box is emptied by that."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return result.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.box.take(), None


@dataclass
class Tape:
    """One chunk's graph: roots by layer, sources by buffer, and the norms waiting for sums."""

    roots: dict[str, tuple[Tensor, Box]] = field(default_factory=dict)
    sources: dict[tuple[str, int | None], Box] = field(default_factory=dict)
    sums: dict[str, Box] = field(default_factory=dict)

    def backward(self, gradients: dict[str, Tensor]) -> None:
        """Run the graph backward from those results for which a gradient is given."""
        starts = []
        for name, (root, box) in self.roots.items():
            gradient = gradients.pop(name, None)
            if gradient is not None and root.requires_grad:
                box.tensor = gradient
                starts.append(root)
                del gradient
        if starts:
            torch.autograd.backward(starts)


def last_uses(step: Forward, layers: dict[str, Layer]) -> dict[str, set[str]]:
    """The tensors that are no longer read in a chunk after each of its layers."""
    last: dict[str, str] = {}
    for name in step.layers:
        last |= {source: name for source in layers[name].inputs}
        last.setdefault(name, name)
    frees: dict[str, set[str]] = {name: set() for name in step.layers}
    for tensor, name in last.items():
        frees[name].add(tensor)
    return frees
