"""A plan's regions as each device sees them."""

from __future__ import annotations

from manyhands.ir.geometry import Span, Tile, empty_like
from manyhands.ir.graph import Graph, GroupNorm, Input, Layer, Statistic
from manyhands.ir.plan import Plan
from manyhands.ir.program import Forward, Program
from manyhands.ir.regions import group_range, needs
from manyhands.ir.territory import Bucket, Evaluation, Exchange, Share, Territory
from manyhands.planning.assignment import Assignment, statistic_domain, statistic_source
from manyhands.planning.liveness import Liveness
from manyhands.planning.weights import owned_pieces

Tiles = dict[str, Tile]


def statistic_domains(layer: Layer, source: Layer, regions: Assignment) -> tuple[Tiles, Tiles]:
    """(samples, channels) whose statistics each device can contribute to, and those it must know.

    A device must know them where it computes, and (to correct gradients) where it owns the input.
    """
    have = {d: statistic_domain(layer, tile) for d, tile in regions.home[source.name].items()}
    known = {}
    for device, tile in regions.computed[layer.name].items():
        tile = statistic_source(layer, tile, source.shape) if tile.numel else tile
        known[device] = statistic_domain(layer, tile)
        if layer.statistic is not Statistic.MEAN and source.differentiable:
            known[device] = known[device].hull(_grouped(layer, have[device]))
    return have, known


def _grouped(layer: Layer, domain: Tile) -> Tile:
    if not isinstance(layer.operation, GroupNorm) or not domain.numel:
        return domain
    size = layer.shape[1] // layer.operation.groups
    first, last = group_range(domain.spans[1], layer.shape[1], layer.operation.groups)
    return domain.with_span(1, Span(first * size, last * size))


def exchange(layer: Layer, source: Layer, regions: Assignment, device: str) -> Exchange:
    """How this device takes part in a layer's statistics."""
    have, known = statistic_domains(layer, source, regions)
    shares = {
        d: Share(d, tile, regions.home[source.name][d].numel // tile.numel)
        for d, tile in have.items()
        if tile.numel
    }
    cut = {d: have[d] & known[device] for d in shares}
    busy = {d for d, tile in regions.computed[layer.name].items() if tile.numel}
    readers = {d: have[device] & tile for d, tile in known.items() if d in busy}
    total = 1
    for size in source.shape[2:]:
        total *= size
    group = layer.shape[1] // layer.operation.groups if isinstance(layer.operation, GroupNorm) else 1
    return Exchange(
        own=shares.get(device),
        known=known[device] if known[device].numel else None,
        shares=tuple(Share(d, cut[d], s.count) for d, s in shares.items() if cut[d].numel),
        readers=tuple(Share(d, tile, 0) for d, tile in readers.items() if tile.numel),
        total=total * group * (source.shape[0] if layer.statistic is Statistic.BATCH_NORM else 1),
        group=group,
    )


def input_tiles(graph: Graph, computed: Tiles) -> tuple[Tile, ...]:
    """The part of each input of the model, by position, that a device reads."""
    layers = graph.by_name()
    sources = [layer for layer in graph.layers if isinstance(layer.operation, Input)]
    read = {layer.name: empty_like(layer.shape) for layer in sources}
    for layer in graph.layers:
        shapes = tuple(layers[name].shape for name in layer.inputs)
        for name, need in zip(layer.inputs, needs(layer, computed[layer.name], shapes), strict=True):
            if name in read:
                read[name] = read[name].hull(need)
    by_position = {s.operation.position: read[s.name] for s in sources if isinstance(s.operation, Input)}
    return tuple(by_position[position] for position in sorted(by_position))


def territory(
    program: Program,
    graph: Graph,
    regions: Assignment,
    holders: dict[str, dict[str, Tile]],
    buckets: tuple[Bucket, ...],
    plan: Plan,
) -> Territory:
    """What this program's device has to know."""
    device, layers = program.device, graph.by_name()
    evaluated = regions.evaluated(graph, device)
    liveness = Liveness(graph, regions, device)
    forwards = [step for step in program.steps if isinstance(step, Forward)]
    return Territory(
        device=device,
        home={name: tiles[device] for name, tiles in regions.home.items()},
        computed={name: tiles[device] for name, tiles in regions.computed.items()},
        needed={
            key: tiles[device] for key, tiles in regions.needed.items() if regions.assembled(*key, device)
        },
        weights={name: tiles[device] for name, tiles in holders.items() if device in tiles},
        exports={s.chunk: tuple(name for name, _ in liveness.made(s)) for s in forwards},
        segment_of=regions.segment_of,
        exchanges={
            name: exchange(layers[name], layers[layers[name].inputs[0]], regions, device)
            for name in regions.exchanged
        },
        tape_holds_input=frozenset(n for n in regions.exchanged if liveness.tape_holds_input(layers[n])),
        inputs=input_tiles(graph, {name: tiles[device] for name, tiles in regions.computed.items()}),
        owned=owned_pieces(graph, holders, buckets, device),
        buckets={bucket.index: bucket for bucket in buckets if device in dict(bucket.parts)},
        in_flight_bytes=plan.in_flight_bytes,
        wire=plan.wire,
        evaluation=Evaluation(evaluated, regions.tellers) if evaluated is not None else None,
    )
