"""A plan that needs too much memory, made to fit: what costs least time is computed a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, takewhile

from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Convolve, Deconvolve, Graph, Layer, Linear
from manyhands.ir.plan import Plan, Segment
from manyhands.planning.costs import Costs, tile_bytes
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.memory import layer_bytes

Fits = Callable[[Plan], bool]
EVERY = (4, 3, 2)  # of so many neighbours, one keeps what it was given
BANDS = (2, 4, 8, 16, 32)


def lightened(graph: Graph, plan: Plan, costs: Costs, fits: Fits) -> Plan:
    """The plan with as little computed a second time as makes it fit, or else the smallest there is.

    `fits` is asked about a dozen times; it says whether a plan needs no more memory than there is.
    """
    lightest = plan
    for lightest in (*_lighter(graph, plan), *_in_bands(graph, plan)):
        if fits(lightest):
            return _kept_again(lower(graph, lightest), costs, fits)
    return lightest


def _lighter(graph: Graph, plan: Plan) -> Iterator[Plan]:
    """Everything computed a second time, sample by sample, and more and more given nothing for it."""
    fine = _in_grains(graph, plan)
    redone = tuple(replace(segment, redo=1) for segment in fine.segments)
    for refilled in _refills(lower(graph, fine)):
        segments = tuple(replace(s, refill=index in refilled) for index, s in enumerate(redone))
        yield replace(fine, segments=segments)


def _kept_again(lowered: Lowered, costs: Costs, fits: Fits) -> Plan:
    """Of what is computed a second time for least, as much kept as fits."""
    plan, order = lowered.plan, _by_worth(lowered, costs)
    low, high = 0, len(order)  # of those that are least worth it, how many can be kept
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(_keeping(plan, order[:middle])) else (low, middle - 1)
    return _keeping(plan, order[:low])


def _keeping(plan: Plan, kept: list[int]) -> Plan:
    segments = tuple(
        replace(segment, redo=0, refill=False) if index in kept else segment
        for index, segment in enumerate(plan.segments)
    )
    return replace(plan, segments=segments)


def _by_worth(lowered: Lowered, costs: Costs) -> list[int]:
    """Segments in one band, those first that save least for the time of computing them a second time."""
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
    whole = [index for index, segment in enumerate(segments) if segment.bands == 1]
    return sorted(whole, key=lambda index: worth(segments[index]))


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


def _in_bands(graph: Graph, plan: Plan) -> Iterator[Plan]:
    """The first layers as one group in bands of rows, the others computed a second time sample by sample."""
    layout = plan.segments[0].layout
    if any(cut.axis is Axis.CHANNELS for cut in layout.cuts):
        return
    alike = takewhile(lambda segment: segment.layout == layout, plan.segments)
    places = _places(graph, [name for segment in alike for name in segment.layers])
    for bands in BANDS:
        for place in places:
            yield _banded(graph, plan, place, bands)


def _banded(graph: Graph, plan: Plan, place: int, bands: int) -> Plan:
    """So many layers as one group, whatever they were before."""
    names = [name for segment in plan.segments for name in segment.layers]
    group = Segment(tuple(names[:place]), plan.segments[0].layout, redo=1, bands=bands)
    left, others = set(names[place:]), []
    for segment in plan.segments:
        if rest := tuple(name for name in segment.layers if name in left):
            others.append(replace(segment, layers=rest, redo=1))
    fine = _in_grains(graph, replace(plan, segments=tuple(others))).segments
    return replace(plan, segments=(group, *fine))


def _places(graph: Graph, first: list[str]) -> list[int]:
    """Numbers of layers that can be a group in bands, where less is handed on than after fewer layers."""
    layers, readers = graph.by_name(), graph.readers()
    found: dict[int, int] = {}  # bytes handed on -> layers
    inside: set[str] = set()
    for number, name in enumerate(first, 1):
        layer = layers[name]
        if layer.statistic or len(layer.shape) != 4:
            break
        inside.add(name)
        leaving = [n for n in inside if n in graph.outputs or not set(readers[n]) <= inside]
        size = sum(layers[n].num_bytes for n in leaving)
        if number > 1 and size <= min(found, default=size):
            found[size] = number
    return list(found.values())
