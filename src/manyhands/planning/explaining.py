"""Why a step takes as long as it does: the time of every segment, and what the step waits for most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from manyhands.ir.cluster import Cluster
from manyhands.ir.plan import Cost
from manyhands.ir.program import (
    Backward,
    Content,
    Correct,
    Drop,
    Expect,
    Finish,
    Forward,
    Keep,
    Measure,
    Place,
    Prepare,
    Program,
    Receive,
    Redo,
    Rerun,
    Restore,
    Return,
    Send,
    Slope,
    Step,
)
from manyhands.planning.lowering import Lowered
from manyhands.planning.simulation import Timeline, simulate

Seconds = dict[str, float]
COMPUTING, HANDING_OVER = "computing", "handing over"
_TILES, _STATISTICS, _WEIGHTS = "waiting for tiles", "waiting for statistics", "waiting for weights"
WAITING = {
    Content.VALUE: _TILES,
    Content.GRADIENT: _TILES,
    Content.MOMENTS: _STATISTICS,
    Content.SUMS: _STATISTICS,
    Content.SQUARES: _STATISTICS,
    Content.LOSS: _STATISTICS,
    Content.SLOPES: _WEIGHTS,
    Content.WEIGHTS: _WEIGHTS,
}


def forecast(lowered: Lowered, cluster: Cluster) -> Cost:
    """What a step is expected to cost, down to each segment and device."""
    timeline = simulate(lowered, cluster)
    segments = tuple(tuple(seconds.items()) for seconds in segment_seconds(lowered, timeline))
    return replace(timeline.cost, segments=segments)


def segment_seconds(lowered: Lowered, timeline: Timeline) -> list[Seconds]:
    """How long each device computes in each segment, forward and backward."""
    totals: list[Seconds] = [dict.fromkeys(lowered.plan.devices, 0.0) for _ in lowered.plan.segments]
    places = {program.device: segments_of(lowered, program) for program in lowered.programs}
    for event in timeline.events:
        segment = places[event.device].get(event.step)
        if segment is not None:
            totals[segment][event.device] += event.stop_s - event.start_s
    return totals


def segments_of(lowered: Lowered, program: Program) -> dict[int, int]:
    """The segment in which each step that computes belongs, by the position of the step."""
    chunks: dict[int, int] = {}
    found: dict[int, int] = {}
    for position, step in enumerate(program.steps):
        segment = _segment(lowered, step, chunks)
        if segment is not None:
            found[position] = segment
    return found


def _segment(lowered: Lowered, step: Step, chunks: dict[int, int]) -> int | None:
    match step:
        case Forward(chunk, layers):
            chunks[chunk] = lowered.regions.segment_of[layers[0]]
            return chunks[chunk]
        case Backward(chunk) | Slope(chunk) | Rerun(chunk) | Redo(chunk) | Finish(chunk):
            return chunks[chunk]
        case Measure(layer) | Correct(layer):
            return lowered.regions.segment_of[layer]
        case _:
            return None


def spent_by_kind(program: Program, spent_s: Sequence[float]) -> Seconds:
    """What a device did in a step by its own clock, given the seconds of each step of its program."""
    found = dict.fromkeys((COMPUTING, HANDING_OVER, *WAITING.values()), 0.0)
    for step, seconds in zip(program.steps, spent_s, strict=True):
        found[_kind(step)] += seconds
    return found


def _kind(step: Step) -> str:
    match step:
        case Receive(message):
            return WAITING[message.content]
        case Send() | Expect() | Place() | Prepare() | Keep() | Restore() | Return() | Drop():
            return HANDING_OVER
        case _:
            return COMPUTING


def bound(lowered: Lowered, timeline: Timeline, cluster: Cluster) -> str:
    """What keeps a step from being shorter: a device that computes, or a link that carries, most of it."""
    seconds = max(timeline.cost.seconds, 1e-12)
    busy: Seconds = defaultdict(float)
    for event in timeline.events:
        busy[event.device] += (event.stop_s - event.start_s) / seconds
    links: dict[tuple[str, str], float] = defaultdict(float)
    for program in lowered.programs:
        for step in program.steps:
            if isinstance(step, Send):
                way = step.message.source, step.message.target
                links[way] += step.message.expected_bytes / cluster.link(*way).bytes_per_s / seconds
    device = max(busy, key=lambda name: busy[name])
    if cluster.shared_bytes_per_s is not None:
        carried = timeline.cost.traffic_bytes / cluster.shared_bytes_per_s / seconds
        if carried > busy[device]:
            return f"the network that all share: it carries for {min(carried, 1):.0%} of the step"
    sending: Seconds = defaultdict(float)
    for (source, _), part in links.items():
        sending[source] += part
    busiest = max(sending, key=lambda name: sending[name], default=None)
    if busiest is None or busy[device] >= sending[busiest]:
        rest = 1 - busy[device]
        waits = f", waiting {rest:.0%}" if rest >= 0.05 else ""
        return f"computing of {device} ({min(busy[device], 1):.0%} of the step{waits})"
    target = max((way for way in links if way[0] == busiest), key=lambda way: links[way])[1]
    return f"the network: {busiest} sends for {min(sending[busiest], 1):.0%} of the step, most to {target}"
