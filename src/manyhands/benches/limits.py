"""Are memory limits kept: random models, clusters and limits, run where the kernel kills who needs more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from rich.table import Table

from manyhands import api
from manyhands.emulation.cgroups import limited, why_not
from manyhands.errors import RequestError, RunError
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.graph import Graph
from manyhands.measuring import graph_of, memory_of
from manyhands.reporting.text import amount
from manyhands.tasks import MeasureJob

MODELS = (
    ("resnet18", (3, 96, 96)),
    ("mobilenetv2", (3, 96, 96)),
    ("unet-small", (3, 96, 96)),
    ("yolov2-16", (3, 160, 160)),
    ("resnet50", (3, 96, 96)),
)
STEPS = 3
PLENTY = 10**12
LOOSER = 1.15  # limits under which a plan is looked for that was perhaps refused needlessly
ROOM = 1.08  # a plan is refused needlessly if as much more than it takes is there: 3 % stay free, 5 % may err


@dataclass(frozen=True, slots=True)
class Row:
    """One case: refused beforehand, or run under a real limit and then held, or not.

    Of a case that was refused, the plan is the one that came nearest, run without a limit.
    """

    case: str
    plan: str  # its layouts
    limit_bytes: tuple[int, ...]  # of each device of the plan
    foreseen_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    verdict: str  # "refused", "held" or what went wrong

    @property
    def within(self) -> bool:
        return self.verdict in ("refused", "held")


def run(count: int, seed: int, tell: Callable[[str], None]) -> tuple[Row, ...]:
    if reason := why_not():
        raise RequestError(f"{reason}.")
    random, rows = Random(seed), []
    for number in range(count):
        tell(f"case {number + 1} of {count}")
        rows.append(_case(random))
    return tuple(rows)


def _case(random: Random) -> Row:
    """A random model, batch and cluster; a limit around what the best plan without one would need."""
    name, shape = random.choice(MODELS)
    batch, num_devices = random.choice((2, 4, 8)), random.choice((1, 2, 3))
    graph = graph_of(name, (shape,), batch)
    devices = tuple(
        Device(f"device-{i}", memory_bytes=PLENTY, flops_per_s=random.choice((1e9, 2e9, 4e9)))
        for i in range(num_devices)
    )
    cluster = Cluster(devices, random.choice((1e7, 1e9)), 1e-4)
    free = api.choose(graph, cluster).best
    assert free is not None
    peak = max(size for _, size in free.cost.peak_bytes)
    limits = {device.name: int(peak * random.uniform(0.75, 1.2)) for device in devices}
    case = f"{name} {shape[1]}, batch {batch}, {num_devices} devices"
    return _judge(case, name, shape, graph, cluster, limits)


def _judge(
    case: str, name: str, shape: tuple[int, ...], graph: Graph, cluster: Cluster, limits: dict[str, int]
) -> Row:
    decision = api.choose(graph, _with_memory(cluster, limits, 1.0))
    option = decision.best
    if option is None:  # what would do if there were a little more
        option = api.choose(graph, _with_memory(cluster, limits, LOOSER)).best or decision.smallest
    assert option is not None
    layouts = ", ".join(dict.fromkeys(str(segment.layout) for segment in option.plan.segments))
    own = tuple(limits[device] for device in option.plan.devices)
    foreseen = tuple(size for _, size in option.cost.peak_bytes)
    try:
        measured = _peaks(
            MeasureJob(name, (shape,), option.plan, STEPS, 0, True), own if decision.best else ()
        )
    except RunError as error:
        return Row(case, layouts, own, foreseen, (), str(error))
    short = any(ROOM * size > limit for size, limit in zip(measured, own, strict=True))
    verdict = "held" if decision.best else "refused" if short else "needlessly refused"
    return Row(case, layouts, own, foreseen, measured, verdict)


def _with_memory(cluster: Cluster, limits: dict[str, int], factor: float) -> Cluster:
    devices = (replace(d, memory_bytes=int(factor * limits[d.name])) for d in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _peaks(job: MeasureJob, limits: tuple[int, ...]) -> tuple[int, ...]:
    """Peak of each process; where there are limits, every one is in a group of its own that keeps it."""
    with ExitStack() as groups:
        within = {
            device: groups.enter_context(limited(device, memory_bytes=limit)).before
            for device, limit in zip(job.plan.devices, limits, strict=False)
        }
        facts = memory_of(job, within)
    return tuple(facts[device]["peak_bytes"] for device in job.plan.devices)


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"within": row.within} for row in rows]


def table(rows: tuple[Row, ...]) -> Table:
    table = Table(title="Memory limits that the kernel keeps")
    for heading in ("case", "plan", "limit", "foreseen", "measured", "verdict"):
        table.add_column(heading)
    for row in rows:
        sizes = (row.limit_bytes, row.foreseen_bytes, row.measured_bytes)
        table.add_row(row.case, row.plan, *(" ".join(map(amount, each)) for each in sizes), row.verdict)
    held = sum(row.verdict == "held" for row in rows)
    refused = sum(row.verdict == "refused" for row in rows)
    table.caption = f"{held} held, {refused} refused beforehand, {len(rows) - held - refused} failed"
    return table
