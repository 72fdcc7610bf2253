"""Dropout masks that depend on seed, step, layer and sample alone, so that every plan draws the same."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from manyhands.ir.geometry import Shape, Tile


def mask(
    seed: int, step: int, layer: str, shape: Shape, tile: Tile, probability: float, channels: bool
) -> Tensor:
    """Ones and zeros of a tile (True: kept); with `channels`, one draw for each sample's channel."""
    drawn = shape[1:2] + (1,) * (len(shape) - 2) if channels else shape[1:]
    inner = Tile.whole(shape[1:])
    where = Tile(tile.spans[1:]).within(inner)
    rows = []
    for sample in range(tile.spans[0].start, tile.spans[0].stop):
        name = f"{seed}/{step}/{layer}/{sample}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
        generator = torch.Generator().manual_seed(number)
        kept = torch.rand(drawn, generator=generator) >= probability
        rows.append(kept.expand(shape[1:])[where])
    return torch.stack(rows)
