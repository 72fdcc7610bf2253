"""A lowered plan in facts that a person reads: what is cut how, what travels, what is done twice."""

from __future__ import annotations

from manyhands.ir.cluster import Cluster
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Whole
from manyhands.ir.program import Content, Finish, Forward, Receive
from manyhands.ir.report import Advice, PlanFacts, SegmentFacts, WholeLayer
from manyhands.planning.costs import forward_flops, weight_bytes
from manyhands.planning.explaining import Seconds, bound, segment_seconds
from manyhands.planning.lowering import Lowered
from manyhands.planning.simulation import simulate


def summarise(lowered: Lowered, cluster: Cluster, advice: Advice | None = None) -> PlanFacts:
    """The facts of a plan."""
    timeline = simulate(lowered, cluster)
    seconds = segment_seconds(lowered, timeline)
    received = [0] * (len(lowered.plan.segments) + 1)
    for program in lowered.programs:
        for step in program.steps:
            if isinstance(step, Receive) and step.message.content not in (Content.SLOPES, Content.WEIGHTS):
                received[step.message.segment] += step.message.expected_bytes
    shared = sum(bucket.num_bytes(owner) for bucket in lowered.buckets for owner, _ in bucket.parts)
    held = {
        d: {name: tiles[d] for name, tiles in lowered.holders.items() if d in tiles}
        for d in lowered.plan.devices
    }
    return PlanFacts(
        batch=lowered.plan.batch,
        devices=lowered.plan.devices,
        exact=lowered.plan.exact,
        segments=tuple(_segment(lowered, i, received[i], seconds[i]) for i in range(len(seconds))),
        whole=_whole(lowered),
        summed_bytes=shared,
        weight_bytes=tuple((d, weight_bytes(lowered.graph, tiles)) for d, tiles in held.items()),
        forecast=timeline.cost,
        packed=lowered.plan.packed,
        ahead=any(isinstance(step, Finish) for program in lowered.programs for step in program.steps),
        wire=None if lowered.plan.exact else lowered.plan.wire,
        measured=all(cluster.profile(device) is not None for device in lowered.plan.devices),
        limits=tuple((device, cluster.device(device).memory_bytes) for device in lowered.plan.devices),
        bound=bound(lowered, timeline, cluster),
        advice=advice,
    )


def _segment(lowered: Lowered, index: int, received_bytes: int, seconds: Seconds) -> SegmentFacts:
    segment, layers = lowered.plan.segments[index], lowered.graph.by_name()
    names = segment.layers
    flops = {
        device: sum(forward_flops(layers[n], lowered.regions.computed[n][device]) for n in names)
        for device in lowered.plan.devices
    }
    steps = (step for program in lowered.programs for step in program.steps)
    forwards = (step for step in steps if isinstance(step, Forward))
    once = sum(forward_flops(layers[n], Tile.whole(layers[n].shape)) for n in names)
    total = sum(flops.values()) or 1
    return SegmentFacts(
        first=names[0],
        last=names[-1],
        num_layers=len(names),
        layout=str(segment.layout),
        shape=layers[names[-1]].shape,
        received_bytes=received_bytes,
        redundant=max(total - once, 0) / once,
        shares=tuple((device, count / total) for device, count in flops.items()),
        seconds=tuple(seconds.items()),
        redo=segment.redo,
        refill=segment.refill,
        bands=max((step.bands for step in forwards if step.layers[0] in names), default=1),
    )


def _whole(lowered: Lowered) -> tuple[WholeLayer, ...]:
    found = []
    for layer in lowered.graph.layers:
        if isinstance(layer.operation, Whole):
            busy = sum(bool(tile.numel) for tile in lowered.regions.computed[layer.name].values())
            flops = forward_flops(layer, Tile.whole(layer.shape))
            found.append(WholeLayer(layer.name, layer.operation.reason, flops * max(busy - 1, 0)))
    return tuple(found)
