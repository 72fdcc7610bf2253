"""Operations and bytes of a tile of a layer."""

from __future__ import annotations

from math import prod

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import ITEM_BYTES, Convolve, Deconvolve, Graph, Layer, Linear, Pool, Whole


def forward_flops(layer: Layer, tile: Tile) -> int:
    """Multiplications and additions to compute a tile; a pass over memory counts as a few."""
    weight = layer.parameter("weight")
    match layer.operation:
        case Convolve() | Linear() if weight is not None:
            return 2 * tile.numel * prod(weight.shape[1:])
        case Deconvolve(window) if weight is not None:
            taps = window.rows.kernel * window.columns.kernel / (window.rows.stride * window.columns.stride)
            return int(2 * tile.numel * weight.shape[0] * taps)
        case Pool(_, window):
            return tile.numel * window.rows.kernel * window.columns.kernel
        case Whole():
            return 10 * prod(layer.shape)
        case _:
            return 5 * tile.numel


def tile_bytes(layer: Layer, tile: Tile) -> int:
    return tile.numel * layer.item_bytes


def weight_bytes(graph: Graph, tiles: dict[str, Tile]) -> int:
    """Bytes of the pieces of weights and buffers held somewhere."""
    parameters = graph.parameters()
    return sum(tile.numel * ITEM_BYTES[parameters[name].dtype] for name, tile in tiles.items())
