"""A plan that needs too much memory, made to fit: what costs least time is computed a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, takewhile
from math import prod

from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Convolve, Deconvolve, Graph, Layer, Linear
from manyhands.ir.plan import Plan, Segment
from manyhands.ir.portions import ROWS
from manyhands.planning.chunks import sees_all_rows
from manyhands.planning.costs import Costs, tile_bytes
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.memory import layer_bytes

Fill = Callable[[Plan], float]
EVERY = (4, 3, 2)  # of so many neighbours, one keeps what it was given
BANDS = (2, 4, 8, 16, 32)


def lightened(graph: Graph, plan: Plan, costs: Costs, fill: Fill) -> Plan:
    """The plan with as little computed a second time as makes it fit, or else the smallest that was found.

    `fill` says how much memory a plan needs, as a part of what there is; it is asked some dozen times.
    """
    found: dict[Plan, float] = {}

    def first_that_fits(plans: Iterable[Plan]) -> Plan | None:
        for some in plans:
            if some not in found:
                found[some] = fill(some)
            if found[some] <= 1.0:
                return some
        return None

    light = first_that_fits(_lighter(graph, plan))
    if light is None:
        in_bands = list(_in_bands(graph, plan))
        most = {place: banded for place, banded in in_bands}  # bands, for each length of the group
        if first_that_fits(most.values()):  # or else fewer would not fit either
            light = first_that_fits(banded for _, banded in in_bands)
    if light is None:
        return min(found, key=found.__getitem__)
    return _kept_again(lower(graph, light), costs, fill)


def _lighter(graph: Graph, plan: Plan) -> Iterator[Plan]:
    """Everything computed a second time, sample by sample, and more and more given nothing for it."""
    fine = _in_grains(graph, plan)
    redone = tuple(replace(segment, redo=1) for segment in fine.segments)
    for refilled in _refills(lower(graph, fine)):
        segments = tuple(replace(s, refill=index in refilled) for index, s in enumerate(redone))
        yield replace(fine, segments=segments)


def _kept_again(lowered: Lowered, costs: Costs, fill: Fill) -> Plan:
    """Of what is computed a second time for least, as much kept as fits."""
    plan, order = lowered.plan, _by_worth(lowered, costs)
    low, high = 0, len(order)  # of those that are least worth it, how many can be kept
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fill(_keeping(plan, order[:middle])) <= 1.0 else (low, middle - 1)
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


def _in_bands(graph: Graph, plan: Plan) -> Iterator[tuple[int, Plan]]:
    """The first layers as one group in bands of rows, the others computed a second time sample by sample.

    In more and more bands, with groups of all lengths that can be cut into so many; with each, its length.
    """
    layout = plan.segments[0].layout
    if any(cut.axis is Axis.CHANNELS for cut in layout.cuts):
        return
    devices = prod(cut.count for cut in layout.cuts if cut.axis is Axis.ROWS)
    alike = takewhile(lambda segment: segment.layout == layout, plan.segments)
    places = _places(graph, [name for segment in alike for name in segment.layers])
    for bands in BANDS:
        for place, rows in places:
            if rows // devices >= bands:
                yield place, _banded(graph, plan, place, bands)


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


def _places(graph: Graph, first: list[str]) -> list[tuple[int, int]]:
    """Numbers of layers that can be a group in bands, where less is handed on than after fewer; and rows."""
    layers, readers = graph.by_name(), graph.readers()
    order = {layer.name: number for number, layer in enumerate(graph.layers)}
    last = {name: max((order[reader] for reader in readers[name]), default=len(order)) for name in first}
    last |= {name: len(order) for name in graph.outputs}
    found: dict[int, tuple[int, int]] = {}  # by bytes handed on
    for number, name in enumerate(first, 1):
        if sees_all_rows(layers[name]):
            break
        leaving = [layers[n] for n in first[:number] if last[n] > order[name]]
        size = sum(layer.num_bytes for layer in leaving)
        if number > 1 and size <= min(found, default=size):
            found[size] = number, min(layer.shape[ROWS] for layer in leaving)
    return list(found.values())
