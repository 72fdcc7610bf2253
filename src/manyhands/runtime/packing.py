"""Tiles of rectified layers without their zeros: a bit an element says which others follow.

Where a rectified result is zero, its layer stops the gradient; so that need not travel either. Who sent a
tile and who received it both know its gaps from forward, and gradients go back without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 8  # bytes: what follows the bits begins at a multiple of this
BLOCK = 1 << 16  # elements at a time, so that what is needed in between is small
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: numpy has no bfloat16


def bits_bytes(numel: int) -> int:
    return -(-numel // (8 * WORD)) * WORD


def _numbers(flat: Tensor) -> NDArray[Any]:
    """The same memory as whole numbers. A zero with a sign is none: what is packed comes back to the bit."""
    return flat.view(_NUMBERS[flat.itemsize]).numpy()


@dataclass(frozen=True)
class Gaps:
    """Which elements of a tile are not zero, in the order of the wire, as one bit each."""

    bits: Tensor
    numel: int
    count: int  # of the elements that are not left out

    @staticmethod
    def of(flat: Tensor) -> Gaps:
        numbers, bits, count = _numbers(flat), np.zeros(bits_bytes(flat.numel()), dtype=np.uint8), 0
        for start in range(0, flat.numel(), BLOCK):
            mask = numbers[start : start + BLOCK] != 0
            packed, count = np.packbits(mask), count + int(np.count_nonzero(mask))
            bits[start // 8 : start // 8 + len(packed)] = packed
        return Gaps(torch.from_numpy(bits), flat.numel(), count)

    @staticmethod
    def read(bits: Tensor, numel: int) -> Gaps:
        parts = np.split(bits.numpy(), range(BLOCK // 8, len(bits), BLOCK // 8))
        return Gaps(bits, numel, sum(int(np.count_nonzero(np.unpackbits(part))) for part in parts))

    def _others(self) -> Iterator[tuple[slice, NDArray[np.intp], slice]]:
        """Of each block, where the others are in it, and in what is packed. (Masks take far longer.)"""
        bits, position = self.bits.numpy(), 0
        for start in range(0, self.numel, BLOCK):
            stop = min(start + BLOCK, self.numel)
            mask = np.unpackbits(bits[start // 8 : -(-stop // 8)], count=stop - start)
            found = np.flatnonzero(mask.view(np.bool_))
            yield slice(start, stop), found, slice(position, position := position + len(found))

    def without(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """The others of a tensor of as many elements."""
        others = flat.new_empty(self.count) if out is None else out
        numbers, packed = _numbers(flat), _numbers(others)
        for block, found, place in self._others():
            np.take(numbers[block], found, out=packed[place], mode="clip")
        return others

    def filled(self, others: Tensor) -> Tensor:
        """The whole tensor, with zeros where there are gaps."""
        flat = others.new_zeros(self.numel)
        numbers, packed = _numbers(flat), _numbers(others)
        for block, found, place in self._others():
            numbers[block][found] = packed[place]
        return flat


def pack(flat: Tensor) -> tuple[Tensor, Gaps]:
    """What travels of a tile."""
    gaps, start = Gaps.of(flat), bits_bytes(flat.numel())
    packed = torch.empty(start + gaps.count * flat.itemsize, dtype=torch.uint8)
    packed[:start] = gaps.bits
    gaps.without(flat, out=packed[start:].view(flat.dtype))
    return packed, gaps


def unpack(buffer: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Gaps]:
    """The tile from what came; the buffer may be longer than that."""
    start = bits_bytes(numel)
    gaps = Gaps.read(buffer[:start].clone(), numel)
    return gaps.filled(buffer[start : start + gaps.count * dtype.itemsize].view(dtype)), gaps
