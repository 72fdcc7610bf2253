"""A plan that needs too much memory, made to fit: what costs least time is computed a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Convolve, Deconvolve, Graph, Layer, Linear
from manyhands.ir.plan import Plan, Segment
from manyhands.planning.costs import Costs, tile_bytes
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.memory import layer_bytes

Fits = Callable[[Plan], bool]
EVERY = (4, 3, 2)  # of so many neighbours, one keeps what it was given


def lightened(graph: Graph, plan: Plan, costs: Costs, fits: Fits) -> Plan:
    """The plan with as little computed a second time as makes it fit, or else the smallest there is.

    `fits` is asked about a dozen times; it says whether a plan needs no more memory than there is.
    """
    plan = _in_grains(graph, plan)
    lowered = lower(graph, plan)
    order = _by_worth(lowered, costs)
    lightest = plan
    for refilled in _refills(lowered):
        lightest = _redone(plan, order, refilled)
        if fits(lightest):
            low, high = 0, len(order)  # of those that are least worth it, how many can be kept
            while low < high:
                middle = (low + high + 1) // 2
                some = _redone(plan, order[middle:], refilled)
                low, high = (middle, high) if fits(some) else (low, middle - 1)
            return _redone(plan, order[low:], refilled)
    return lightest


def _redone(plan: Plan, redone: list[int], refilled: set[int]) -> Plan:
    """With some segments computed a second time, sample by sample, and some of those given nothing."""
    both = refilled & set(redone)
    segments = tuple(
        replace(segment, redo=int(index in redone), refill=index in both)
        for index, segment in enumerate(plan.segments)
    )
    return replace(plan, segments=segments)


def _by_worth(lowered: Lowered, costs: Costs) -> list[int]:
    """Segments, those first that save least memory for the time of computing them a second time."""
    layers, computed = lowered.graph.by_name(), lowered.regions.computed

    def worth(segment: Segment) -> float:
        saved, seconds = 0, 0.0
        for device in lowered.plan.devices:
            tiles = [(layers[name], computed[name][device]) for name in segment.layers]
            saved = max(saved, sum(layer_bytes(layer, tile) for layer, tile in tiles[:-1]))
            again = tiles[:-1] if isinstance(tiles[-1][0].operation, Convolve) else tiles
            seconds = max(seconds, sum(costs.layer(device, layer, tile)[0] for layer, tile in again))
        return saved / max(seconds, 1e-9)

    segments = lowered.plan.segments
    return sorted(range(len(segments)), key=lambda index: worth(segments[index]))


def _refills(lowered: Lowered) -> Iterator[set[int]]:
    """Segments that keep not even what they were given: none, the few that were given most, more and more."""
    segments, layers = lowered.plan.segments, lowered.graph.by_name()
    yield set()

    def given(index: int) -> int:
        last = segments[index - 1].layers[-1]
        tiles = lowered.regions.computed[last].values()
        return max(tile_bytes(layers[last], tile) for tile in tiles)

    largest = sorted(range(1, len(segments)), key=given, reverse=True)
    for count in (1, 2, 4):
        if count < len(largest):
            yield set(largest[:count])
    for stride in EVERY:
        yield {index for index in range(1, len(segments)) if index % stride}


def _in_grains(graph: Graph, plan: Plan) -> Plan:
    """Neighbours that exchange nothing are cut after every layer with weights: else all is redone at once."""
    layers = graph.by_name()
    segments: list[Segment] = []
    for segment in plan.segments:
        if any(cut.axis is not Axis.BATCH for cut in segment.layout.cuts):
            segments.append(segment)
            continue
        ends = [i + 1 for i, name in enumerate(segment.layers) if _is_grain(layers[name])]
        places = sorted({0, len(segment.layers), *ends})
        segments += [replace(segment, layers=segment.layers[a:b]) for a, b in pairwise(places)]
    return replace(plan, segments=tuple(segments))


def _is_grain(layer: Layer) -> bool:
    return isinstance(layer.operation, Convolve | Deconvolve | Linear)
