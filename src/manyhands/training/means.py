"""Losses that are means, so that every device can evaluate its own part of the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyhands.ir.geometry import Axis, Tile

Loss = Callable[[Any, Tensor], Tensor]  # of the outputs (one tensor, or a tuple of several) and the targets


@dataclass(frozen=True)
class MeanOf:
    """A loss that is the mean over some axes of the output, so that parts of it can be evaluated apart.

    `take`: of the targets, those of a part of the output (its tensor, its tile, and the tile of the whole).
    """

    loss: Loss
    axes: tuple[Axis, ...]
    take: Callable[[Tensor, Tensor, Tile, Tile], Tensor]

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        whole = Tile.whole(tuple(output.shape))
        return self.part(output, targets, whole, whole)

    def part(self, output: Tensor, targets: Tensor, tile: Tile, whole: Tile) -> Tensor:
        """What a part of the output makes of the loss of the whole."""
        mean = self.loss(output, self.take(targets, output, tile, whole))
        return mean if tile == whole else mean * (tile.numel / whole.numel)


def axes_of(loss: Loss) -> tuple[Axis, ...]:
    """The axes along which a loss is a sum of parts; none for a function that nothing is known of."""
    return loss.axes if isinstance(loss, MeanOf) else ()
