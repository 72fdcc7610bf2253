"""Which piece of each weight a device holds, and which pieces have to be added up among whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, product

from manyhands.ir.geometry import Span, Tile, divide, empty_like
from manyhands.ir.graph import ITEM_BYTES, Graph
from manyhands.ir.plan import Plan
from manyhands.ir.program import Content, Message
from manyhands.ir.regions import parameter_tiles
from manyhands.ir.territory import Bucket, Piece
from manyhands.planning.assignment import Assignment, is_source
from manyhands.planning.chunks import Chunk
from manyhands.planning.packing import item_bytes

BUCKET_BYTES = 1 << 20  # gradients wait for each other until they make this


class BucketMail:
    """What travels of buckets: gradients from every device to each owner, and new weights back."""

    def __init__(self, plan: Plan, tags: Iterator[int]) -> None:
        self.plan, self.tags = plan, tags
        self.known: dict[tuple[int, Content], list[Message]] = {}

    def of(self, bucket: Bucket, content: Content) -> list[Message]:
        key = bucket.index, content
        if key not in self.known:
            devices = [device for device, _ in bucket.parts]
            ways = [(d, owner) for owner in devices for d in devices if d != owner and bucket.part(owner)]
            size = item_bytes(self.plan, content, f"float{8 * bucket.item_bytes}")
            self.known[key] = [
                Message(content, "bucket", bucket.index, Tile(()), source, target, next(self.tags), num_bytes)
                for device, owner in ways
                for num_bytes in [bucket.numel(owner) * size]
                for source, target in [(device, owner) if content is Content.SLOPES else (owner, device)]
            ]
        return self.known[key]


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


def buckets_after(
    graph: Graph, holders: dict[str, dict[str, Tile]], all_chunks: tuple[Chunk, ...]
) -> dict[int, list[Bucket]]:
    """The buckets that are ready after each chunk's backward, about a megabyte each, alike for everyone."""
    first_use, parameters = first_chunk_using(graph, all_chunks), graph.parameters()
    waiting: dict[tuple[tuple[str, ...], str], list[Piece]] = {}
    result: dict[int, list[Bucket]] = {}
    numbers = count()
    for chunk in reversed(all_chunks):
        for name in (n for n, index in first_use.items() if index == chunk.index):
            for among, tile in pieces_of(holders[name]):
                if len(among) > 1:
                    waiting.setdefault((among, parameters[name].dtype), []).append(Piece(name, tile))
        result[chunk.index] = []
        for (among, dtype), pieces in waiting.items():
            size = ITEM_BYTES[dtype] * sum(piece.tile.numel for piece in pieces)
            if pieces and (size >= BUCKET_BYTES or chunk.index == 0):
                result[chunk.index].append(_bucket(next(numbers), among, pieces, ITEM_BYTES[dtype]))
                waiting[among, dtype] = []
    return result


def _bucket(index: int, among: tuple[str, ...], pieces: list[Piece], item_bytes: int) -> Bucket:
    """Every piece divided among its holders, along its longest side."""
    parts: dict[str, list[Piece]] = {device: [] for device in among}
    for piece in pieces:
        for device, tile in zip(among, divided(piece.tile, len(among)), strict=True):
            if tile.numel:
                parts[device].append(Piece(piece.parameter, tile))
    return Bucket(index, tuple((device, tuple(owned)) for device, owned in parts.items()), item_bytes)


def divided(tile: Tile, count: int) -> list[Tile]:
    """A tile in equal parts along its longest side; a scalar goes to the first."""
    if not tile.spans:
        return [tile] + [empty_like(())] * (count - 1)
    longest = max(range(len(tile.spans)), key=lambda d: len(tile.spans[d]))
    return [tile.with_span(longest, span) for span in divide(tile.spans[longest], (1,) * count)]


def owned_pieces(
    graph: Graph, holders: dict[str, dict[str, Tile]], buckets: Iterable[Bucket], device: str
) -> tuple[Piece, ...]:
    """The trainable weights of which this device decides: its parts of buckets, and what it alone holds."""
    shared = [piece for bucket in buckets for piece in dict(bucket.parts).get(device, ())]
    alone = [
        Piece(name, tile)
        for name, parameter in graph.parameters().items()
        if parameter.trainable
        for among, tile in pieces_of(holders[name])
        if among == (device,)
    ]
    return (*alone, *shared)


def owned_bytes(
    graph: Graph, holders: dict[str, dict[str, Tile]], buckets: Iterable[Bucket]
) -> dict[str, int]:
    """Bytes of the trainable weights of which each device decides; devices that own none are left out."""
    owned: dict[str, int] = {}
    for bucket in buckets:
        for device, _ in bucket.parts:
            owned[device] = owned.get(device, 0) + bucket.num_bytes(device)
    for name, parameter in graph.parameters().items():
        for among, tile in pieces_of(holders[name]) if parameter.trainable else ():
            if len(among) == 1:
                owned[among[0]] = owned.get(among[0], 0) + tile.numel * ITEM_BYTES[parameter.dtype]
    return owned


def kept_pieces(graph: Graph, holders: dict[str, dict[str, Tile]], device: str) -> tuple[Piece, ...]:
    """The frozen weights and buffers that this device contributes to the whole model: each has one keeper."""
    return tuple(
        Piece(name, tile)
        for name, parameter in graph.parameters().items()
        if not parameter.trainable
        for among, tile in pieces_of(holders[name])
        if among[0] == device
    )


def first_chunk_using(graph: Graph, all_chunks: tuple[Chunk, ...]) -> dict[str, int]:
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
