"""A plan in a part of its memory: what it takes of each process, what travels, how long, and is it exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from rich.table import Table

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, local_cluster
from manyhands.ir.codec import encode, graph_digest
from manyhands.ir.plan import Plan
from manyhands.ir.program import Forward
from manyhands.measuring import graph_of
from manyhands.planning.deciding import made_to_fit
from manyhands.proving import prove_all
from manyhands.requests import Request
from manyhands.runtime.ranks import Event, launch
from manyhands.tasks import MeasureJob

WIRE, TOLERANCE = 1.10, 1e-9
STEPS, ROUNDS = 2, 2
PROVED_BATCH = 4  # in float64, beside the whole network on one device
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Device:
    """Peak memory of one process, by the plan as it is and in less memory."""

    name: str
    plain_bytes: int
    foreseen_bytes: int
    light_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    part: float  # of the plain plan's memory that each device has
    devices: tuple[Device, ...]
    redone: int  # segments
    refilled: int
    segments: int
    bands: int  # of rows, in the segment that has most
    plain_sent_bytes: int  # in a step, by all
    light_sent_bytes: int
    seconds_ratio: float  # median of alternate runs
    difference: float  # the largest from plain PyTorch

    @property
    def memory(self) -> float:
        """Of the device that comes nearest to its limit."""
        return max(device.light_bytes / device.plain_bytes for device in self.devices)

    @property
    def within(self) -> bool:
        travels = self.light_sent_bytes <= WIRE * self.plain_sent_bytes
        return self.memory <= self.part and travels and self.difference <= TOLERANCE


def run(
    model: str, shape: tuple[int, ...], batch: int, strategy: str, count: int, part: float, tell: Tell
) -> Result:
    """Measure a plan, give every device a part of what it took, and measure what is made of it."""
    graph = graph_of(model, (shape,), batch)
    plain = api.plan(graph, count, strategy)
    tell("the plan as it is")
    first = _measured(model, shape, plain)
    bare = min(facts["ready_bytes"] - facts["weight_bytes"] for facts in _memory(first).values())
    limits = {device: int(part * facts["peak_bytes"]) for device, facts in _memory(first).items()}
    cluster = _limited(plain.devices, limits, bare)
    light = made_to_fit(graph, plain, cluster)
    if light == plain:
        raise RequestError(f"nothing fits in {part:.0%} of the memory; try a larger batch or part.")
    lowered = api.lower(graph, light)
    foreseen = dict(api.simulate(lowered, cluster).cost.peak_bytes)
    runs: dict[Plan, list[dict[str, list[Event]]]] = {plain: [first], light: []}
    for round_ in range(ROUNDS):
        for plan in (light, plain) if round_ else (light,):
            tell(f"round {round_ + 1} of {ROUNDS}: {'in less memory' if plan is light else 'as it is'}")
            runs[plan].append(_measured(model, shape, plan))
    tell("is it exact? In float64, against plain PyTorch")
    peaks = {
        plan: {d: max(_memory(run)[d]["peak_bytes"] for run in runs[plan]) for d in plain.devices}
        for plan in runs
    }
    sent = {plan: sum(f["sent_bytes"] for f in _memory(runs[plan][0]).values()) // STEPS for plan in runs}
    return Result(
        f"{model} at {'x'.join(map(str, shape[1:]))}, batch {batch}, {strategy} on {count} device"
        + "s" * (count > 1),
        part,
        tuple(Device(d, peaks[plain][d], foreseen[d], peaks[light][d]) for d in plain.devices),
        sum(segment.redo > 0 for segment in light.segments),
        sum(segment.refill for segment in light.segments),
        len(light.segments),
        max(step.bands for p in lowered.programs for step in p.steps if isinstance(step, Forward)),
        sent[plain],
        sent[light],
        median(_seconds(run) for run in runs[light]) / median(_seconds(run) for run in runs[plain]),
        _difference(model, shape, light),
    )


def _measured(model: str, shape: tuple[int, ...], plan: Plan) -> dict[str, list[Event]]:
    return launch("measure", encode(MeasureJob(model, (shape,), plan, STEPS, 0, True)), plan.devices)


def _memory(said: dict[str, list[Event]]) -> dict[str, Event]:
    return {device: next(e for e in events if e["event"] == "memory") for device, events in said.items()}


def _seconds(said: dict[str, list[Event]]) -> float:
    """Of the last step, on the slowest device."""
    return max([e["seconds"] for e in events if e["event"] == "step"][-1] for events in said.values())


def _limited(devices: tuple[str, ...], limits: dict[str, int], bare: int) -> Cluster:
    cluster = local_cluster(len(devices))
    found = tuple(
        replace(device, memory_bytes=limits[device.name], bare_bytes=bare) for device in cluster.devices
    )
    return replace(cluster, devices=found)


def _difference(model: str, shape: tuple[int, ...], light: Plan) -> float:
    """Of the same plan with fewer samples, which plain PyTorch can train beside it in float64."""
    text = "x".join(map(str, shape))
    count = len(light.devices)
    batch = min(PROVED_BATCH, light.batch)
    request = Request.read(model, text, batch, None, count, "single", None, None, precision="float64")
    plan = replace(light, graph=graph_digest(request.traced.graph), batch=batch)
    (difference,) = prove_all([(request, plan)])
    return difference.worst


def to_json(result: Result) -> dict[str, Any]:
    return asdict(result) | {"memory": result.memory, "within": result.within}


def table(result: Result) -> Table:
    wire = result.light_sent_bytes / result.plain_sent_bytes if result.plain_sent_bytes else 1.0
    bands = f", some in {result.bands} bands of rows" if result.bands > 1 else ""
    table = Table(
        title=f"{result.what}: in {result.part:.0%} of the memory",
        caption=f"{result.redone} of {result.segments} segments computed a second time, "
        f"{result.refilled} with what they read{bands}. "
        f"Largest process {result.memory:.1%} of plain (limit {result.part:.0%}); "
        f"on the wire x{wire:.3f} (below {WIRE}); time x{result.seconds_ratio:.2f}; "
        f"from one device {result.difference:.1e} (limit {TOLERANCE:g})",
    )
    for heading in ("device", "plain", "foreseen", "measured", "part"):
        table.add_column(heading)
    for device in result.devices:
        sizes = (device.plain_bytes, device.foreseen_bytes, device.light_bytes)
        part = f"{device.light_bytes / device.plain_bytes:.1%}"
        table.add_row(device.name, *(f"{size / 1e6:.0f} MB" for size in sizes), part)
    return table
