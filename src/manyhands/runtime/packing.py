"""Tiles of rectified layers without their zeros: a bit an element says which others follow.

Where a rectified result is zero, its layer stops the gradient; so that need not travel either. Who sent a
tile and who received it both know its gaps from forward, and gradients go back without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 8  # bytes: what follows the bits begins at a multiple of this
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: numpy has no bfloat16


def bits_bytes(numel: int) -> int:
    return -(-numel // (8 * WORD)) * WORD


@dataclass(frozen=True)
class Gaps:
    """Which elements of a tile are not zero, in the order of the wire, as one bit each."""

    bits: Tensor
    numel: int

    @staticmethod
    def of(flat: Tensor) -> Gaps:
        """A zero with a sign is none of them: what is packed comes back to the bit."""
        others = flat.view(_NUMBERS[flat.itemsize]).numpy() != 0
        bits = np.zeros(bits_bytes(flat.numel()), dtype=np.uint8)
        packed = np.packbits(others)
        bits[: len(packed)] = packed
        return Gaps(torch.from_numpy(bits), flat.numel())

    @property
    def others(self) -> Tensor:
        """Where what is not left out is. (Selecting by a mask takes several times as long.)"""
        return torch.from_numpy(np.flatnonzero(self._mask))

    @property
    def count(self) -> int:
        """Of the elements that are not left out."""
        return int(np.count_nonzero(self._mask))

    @property
    def _mask(self) -> NDArray[np.bool_]:
        return np.unpackbits(self.bits.numpy(), count=self.numel).view(np.bool_)

    def without(self, flat: Tensor) -> Tensor:
        """The others of a tensor of as many elements."""
        return flat.index_select(0, self.others)

    def filled(self, others: Tensor) -> Tensor:
        """The whole tensor, with zeros where there are gaps."""
        return others.new_zeros(self.numel).scatter_(0, self.others, others)


def pack(flat: Tensor) -> tuple[Tensor, Gaps]:
    """What travels of a tile."""
    gaps = Gaps.of(flat)
    return torch.cat([gaps.bits, gaps.without(flat).view(torch.uint8)]), gaps


def unpack(buffer: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Gaps]:
    """The tile from what came; the buffer may be longer than that."""
    start = bits_bytes(numel)
    gaps = Gaps(buffer[:start].clone(), numel)
    return gaps.filled(buffer[start : start + gaps.count * dtype.itemsize].view(dtype)), gaps
