"""A lowered plan as a drawing needs it: of every map who owns what, who reaches beyond, and what travels."""

from __future__ import annotations

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Input, Layer
from manyhands.ir.program import Content, Receive
from manyhands.ir.report import CutMap, DrawnSegment, PlanFacts, PlanPicture
from manyhands.planning.lowering import Lowered
from manyhands.planning.territories import input_tiles

EXCHANGED = {Content.VALUE, Content.GRADIENT, Content.MOMENTS, Content.SUMS}  # weights and norms apart


def picture(model: str, facts: PlanFacts, lowered: Lowered) -> PlanPicture:
    """What there is to draw of a plan, whose facts these are."""
    devices, end = lowered.plan.devices, len(lowered.plan.segments)
    received = [dict.fromkeys(devices, 0) for _ in range(end + 1)]
    earlier: list[dict[int, int]] = [{} for _ in range(end + 1)]
    for program in lowered.programs:
        for step in program.steps:
            if not isinstance(step, Receive) or step.message.content not in EXCHANGED:
                continue
            message = step.message
            received[message.segment][program.device] += message.expected_bytes
            source = lowered.regions.segment_of[message.layer]
            if source < message.segment - 1:
                skipped = earlier[message.segment]
                skipped[source] = skipped.get(source, 0) + message.expected_bytes
    return PlanPicture(
        model,
        facts,
        _inputs(lowered),
        tuple(
            DrawnSegment(
                _result(lowered, i),
                tuple(device for device in devices if not _busy(lowered, i, device)),
                tuple(received[i].items()),
                tuple(sorted(earlier[i].items())),
            )
            for i in range(end)
        ),
        tuple(received[end].items()),
    )


def _busy(lowered: Lowered, index: int, device: str) -> bool:
    computed = lowered.regions.computed
    return any(computed[name][device].numel for name in lowered.plan.segments[index].layers)


def _result(lowered: Lowered, index: int) -> CutMap:
    """The last result of a segment: what is computed of it, and what later segments need of it."""
    layer, regions = lowered.graph.by_name()[lowered.plan.segments[index].layers[-1]], lowered.regions
    used = [regions.computed[layer.name]]
    used += [tiles for (name, _), tiles in regions.needed.items() if name == layer.name]
    return _cut_map(layer, regions.home[layer.name], used)


def _inputs(lowered: Lowered) -> tuple[CutMap, ...]:
    """The inputs of the model, which every device reads for itself: tiles as the first reader has them."""
    graph, computed = lowered.graph, lowered.regions.computed
    sources = [layer for layer in graph.layers if isinstance(layer.operation, Input)]
    positions = sorted(s.operation.position for s in sources if isinstance(s.operation, Input))
    read = {
        d: input_tiles(graph, {name: tiles[d] for name, tiles in computed.items()})
        for d in lowered.plan.devices
    }
    maps = []
    for source in sources:
        assert isinstance(source.operation, Input)
        place = positions.index(source.operation.position)
        readers = [lowered.regions.segment_of[name] for name in graph.readers()[source.name]]
        layout = lowered.plan.segments[min(readers, default=0)].layout
        maps.append(_cut_map(source, layout.tiles(source.shape), [{d: read[d][place] for d in read}]))
    return tuple(maps)


def _cut_map(layer: Layer, home: dict[str, Tile], used: list[dict[str, Tile]]) -> CutMap:
    owned = {device: tile for device, tile in home.items() if tile.numel}
    beyond = dict.fromkeys(  # each once, in the order of devices
        (device, tiles[device])
        for device in used[0]
        for tiles in used
        if device in tiles and tiles[device].numel
        if device not in owned or not owned[device].covers(tiles[device])
    )
    return CutMap(layer.name, layer.shape, tuple(owned.items()), tuple(beyond))
