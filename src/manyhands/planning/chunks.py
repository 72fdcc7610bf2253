"""Segments into chunks: runs of layers that compute without waiting for anybody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from manyhands.ir.geometry import Tile, samples_at_a_time
from manyhands.ir.graph import ITEM_BYTES, Along, Constant, Graph, Layer, Statistic, Whole
from manyhands.ir.plan import Plan, Segment
from manyhands.ir.portions import ROWS, can_be_cut
from manyhands.ir.regions import needs
from manyhands.planning.assignment import Assignment

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    segment: int
    layers: tuple[str, ...]


def chunks(graph: Graph, plan: Plan, assignment: Assignment) -> tuple[Chunk, ...]:
    """A new chunk at every segment, where a layer waits for statistics of what was just computed, and where
    enough weights have come together that their gradients can travel while backward goes on."""
    layers, readers = graph.by_name(), graph.readers()
    result: list[Chunk] = []
    for index, segment in enumerate(plan.segments):
        run: list[str] = []
        for name in _in_order(segment, layers, readers, assignment.exchanged):
            waits = name in assignment.exchanged and set(layers[name].inputs) & set(run)
            if run and (waits or len(plan.devices) > 1 and _weight_bytes(layers, run) >= CHUNK_BYTES):
                result.append(Chunk(len(result), index, tuple(run)))
                run = []
            run.append(name)
        result.append(Chunk(len(result), index, tuple(run)))
    return tuple(result)


def _in_order(
    segment: Segment,
    layers: Mapping[str, Layer],
    readers: Mapping[str, tuple[str, ...]],
    exchanged: frozenset[str],
) -> list[str]:
    """The layers of a segment. One whose statistics will be waited for comes before the next such wait, if
    what it reads is there by then: so they travel meanwhile, and both are waited for at once.

    What is computed again keeps its order: it would have to be held longer.
    """
    order = list(segment.layers)
    for name in () if segment.redo else segment.layers:
        if name in exchanged or exchanged.isdisjoint(readers[name]):
            continue  # norms keep their order: one module may be called twice
        place, inputs = order.index(name), layers[name].inputs
        ready = max((order.index(source) + 1 for source in inputs if source in order), default=0)
        wait = next((n for n in range(ready, place) if order[n] in exchanged), place)
        order.insert(wait, order.pop(place))
    return order


def is_per_sample(
    names: tuple[str, ...], layers: Mapping[str, Layer], assignment: Assignment, device: str
) -> bool:
    """Can a device compute some samples of these layers without the others?"""
    tiles = {name: assignment.computed[name][device] for name in names}
    samples = {tile.spans[:1] for tile in tiles.values()}
    if len(samples) > 1 or () in samples:
        return False
    for name, tile in tiles.items():
        layer = layers[name]
        if layer.statistic is Statistic.BATCH_NORM and name not in assignment.exchanged:
            return False
        each = samples_at_a_time(tile, 1)
        shapes = tuple(layers[source].shape for source in layer.inputs)
        for sample in {each[0], each[len(each) // 2], each[-1]}:  # of all, those where others would show
            for source, need in zip(layer.inputs, needs(layer, sample, shapes), strict=True):
                if not isinstance(layers[source].operation, Constant) and need.spans[:1] != sample.spans[:1]:
                    return False
    return True


def num_bands(wanted: int, tiles: dict[str, Tile], layers: Mapping[str, Layer], leaving: list[str]) -> int:
    """In how many bands of rows these layers can be computed: in one, if a layer has to see all rows."""
    if any(sees_all_rows(layers[name]) for name in tiles):
        return 1
    bands = min(wanted, *(len(tiles[name].spans[ROWS]) for name in leaving))
    return bands if can_be_cut(tuple(tiles), leaving, tiles, layers, bands) else 1


def sees_all_rows(layer: Layer) -> bool:
    """Can it not be computed for some rows without the others, or has it none?"""
    if layer.statistic or len(layer.shape) != 4 or isinstance(layer.operation, Whole):
        return True
    return isinstance(layer.operation, Along) and ROWS in layer.operation.dimensions


def leaving(names: Iterable[str], graph: Graph) -> list[str]:
    """Those of a chunk's layers whose results are not only read by others of it, or by nobody."""
    readers, inside = graph.readers(), set(names)
    inner = {name for name in inside if readers[name] and set(readers[name]) <= inside}
    return [name for name in names if name not in inner or name in graph.outputs]


def _weight_bytes(layers: dict[str, Layer], names: list[str]) -> int:
    parameters = {p.name: p for name in names for p in layers[name].parameters if p.trainable}
    return sum(prod(p.shape) * ITEM_BYTES[p.dtype] for p in parameters.values())
