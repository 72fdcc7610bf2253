"""Which piece of each weight a device holds, and which pieces have to be added up among whom."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product

from manyhands.ir.geometry import Span, Tile
from manyhands.ir.graph import ITEM_BYTES, Graph
from manyhands.ir.program import Piece, Sum
from manyhands.ir.regions import parameter_tiles
from manyhands.planning.assignment import Assignment, is_source
from manyhands.planning.chunks import Chunk

BUCKET_BYTES = 4 << 20  # small gradients wait for each other until they make this
ALONE_BYTES = 1 << 20  # one of this size goes alone, and need not be copied


def held(graph: Graph, assignment: Assignment, device: str) -> dict[str, Tile]:
    """The piece of each weight and buffer that this device holds: all that any of its tiles needs."""
    tiles: dict[str, Tile] = {}
    for layer in graph.layers:
        if is_source(layer):
            for parameter in layer.parameters:  # read directly in forward: small, and whole everywhere
                tiles[parameter.name] = Tile.whole(parameter.shape)
            continue
        for parameter, tile in parameter_tiles(layer, assignment.computed[layer.name][device]):
            tiles[parameter.name] = tiles.get(parameter.name, tile).hull(tile)
    return tiles


def all_held(graph: Graph, assignment: Assignment, devices: tuple[str, ...]) -> dict[str, dict[str, Tile]]:
    """Who holds which piece, by weight."""
    holders: dict[str, dict[str, Tile]] = {}
    for device in devices:
        for name, tile in held(graph, assignment, device).items():
            holders.setdefault(name, {})[device] = tile
    for name, parameter in graph.parameters().items():
        tiles, whole = holders.setdefault(name, {}), Tile.whole(parameter.shape)
        if (
            sum(tile.numel for _, tile in pieces_of(tiles)) < whole.numel
        ):  # no result that is read needs the rest
            tiles[next(iter(tiles), devices[0])] = whole
    return holders


def pieces_of(holders: dict[str, Tile]) -> list[tuple[tuple[str, ...], Tile]]:
    """Disjoint boxes of one weight, each with the devices that hold all of it."""
    if not holders:
        return []
    rank = len(next(iter(holders.values())).spans)
    edges = [
        sorted({edge for tile in holders.values() for edge in (tile.spans[d].start, tile.spans[d].stop)})
        for d in range(rank)
    ]
    pieces = []
    for box in product(*(list(zip(e, e[1:], strict=False)) for e in edges)):
        tile = Tile(tuple(Span(start, stop) for start, stop in box))
        among = tuple(device for device, held_tile in holders.items() if held_tile.covers(tile))
        if among:
            pieces.append((among, tile))
    return pieces


def sums_after(
    graph: Graph, holders: dict[str, dict[str, Tile]], all_chunks: tuple[Chunk, ...]
) -> dict[int, list[Sum]]:
    """The sums to start after each chunk's backward, in buckets of a few megabytes, the same for everyone."""
    first_use = _first_chunk_using(graph, all_chunks)
    waiting: dict[tuple[str, ...], list[Sum]] = {}
    result: dict[int, list[Sum]] = {chunk.index: [] for chunk in all_chunks}
    parameters = graph.parameters()
    for chunk in reversed(all_chunks):
        ready: list[Sum] = []
        for name in (n for n, index in first_use.items() if index == chunk.index):
            for among, tile in pieces_of(holders.get(name, {})):
                size = tile.numel * ITEM_BYTES[parameters[name].dtype]
                alone = Sum(0, among, (Piece(name, tile),), size)
                if len(among) > 1:
                    (ready if size >= ALONE_BYTES else waiting.setdefault(among, [])).append(alone)
        for among, small in waiting.items():
            total = sum(one.num_bytes for one in small)
            if small and (total >= BUCKET_BYTES or chunk.index == 0):
                ready.append(Sum(0, among, tuple(piece for one in small for piece in one.pieces), total))
                waiting[among] = []
        result[chunk.index] = ready
    numbers = count()
    return {index: [replace(s, bucket=next(numbers)) for s in sums] for index, sums in result.items()}


def _first_chunk_using(graph: Graph, all_chunks: tuple[Chunk, ...]) -> dict[str, int]:
    """Backward is done with a weight when it has passed the first chunk that uses it."""
    layers = graph.by_name()
    first: dict[str, int] = {}
    for chunk in reversed(all_chunks):
        for layer in (layers[name] for name in chunk.layers):
            sources = [layers[name] for name in layer.inputs if is_source(layers[name])]
            for parameter in (p for owner in (layer, *sources) for p in owner.parameters):
                if parameter.trainable:
                    first[parameter.name] = chunk.index
    return first
