"""Foreseen against measured: the seconds of a step and the peak memory, and what choosing a plan costs.

Every plan of a case is stepped in turn by the same processes, so that whatever disturbs one disturbs all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, cores_here
from manyhands.ir.codec import encode
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Cost, Plan
from manyhands.measurements import PlansJob
from manyhands.measuring import graph_of, memory_of, profile_local
from manyhands.planning.strategies import NAMES
from manyhands.runtime.ranks import launch
from manyhands.tasks import MeasureJob

MODELS = (
    ("resnet18", (3, 128, 128), 6),
    ("yolov2-16", (3, 224, 224), 6),
    ("mobilenetv2", (3, 128, 128), 6),
    ("unet-small", (3, 128, 128), 6),
)
JUDGED = ("batch", "rows", "channels")
MEDIAN, WORST = 0.10, 0.25  # of the errors in time
MEMORY_MEDIAN, MEMORY_WORST, MEMORY_UNDER = 0.05, 0.10, 0.05
PLENTY = 10**12
REGRET = 1.05  # of the chosen plan over the best named one


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one case."""

    model: str
    devices: int
    strategy: str
    foreseen: Cost
    measured_s: float  # the slowest device's, median of the rounds
    spread_s: float  # half the distance between the quartiles
    measured_peaks: tuple[int, ...] = ()  # of each device, where memory was measured

    @property
    def judged(self) -> bool:
        return self.strategy in JUDGED

    @property
    def error(self) -> float:
        return self.foreseen.seconds / self.measured_s - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        foreseen = [num_bytes for _, num_bytes in self.foreseen.peak_bytes]
        if not self.measured_peaks:
            return ()
        return tuple(f / m - 1 for f, m in zip(foreseen, self.measured_peaks, strict=True))


@dataclass(frozen=True, slots=True)
class Result:
    rows: tuple[Row, ...]

    @property
    def errors(self) -> list[float]:
        return [abs(row.error) for row in self.rows if row.judged]

    @property
    def memory_errors(self) -> list[float]:
        return [error for row in self.rows if row.judged for error in row.memory_errors]

    @property
    def regrets(self) -> dict[tuple[str, int], float]:
        """Of each case in which a plan was chosen among the named ones: its time over the best of them."""
        cases: dict[tuple[str, int], dict[str, float]] = {}
        for row in self.rows:
            cases.setdefault((row.model, row.devices), {})[row.strategy] = row.measured_s
        return {
            case: times["auto"] / min(t for name, t in times.items() if name != "auto")
            for case, times in cases.items()
            if "auto" in times
        }

    @property
    def within(self) -> bool:
        time = statistics.median(self.errors) <= MEDIAN and max(self.errors) <= WORST
        memory = not self.memory_errors or (
            statistics.median(map(abs, self.memory_errors)) <= MEMORY_MEDIAN
            and max(map(abs, self.memory_errors)) <= MEMORY_WORST
            and min(self.memory_errors) >= -MEMORY_UNDER
        )
        return time and memory and all(regret <= REGRET for regret in self.regrets.values())


def run(
    rounds: int,
    *,
    models: tuple[str, ...] = (),
    regret: bool = False,
    memory: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Every model (or those named) on two numbers of devices; with `regret`, the chosen plan too."""
    if unknown := [name for name in models if name not in [each for each, *_ in MODELS]]:
        raise RequestError(f"{unknown[0]} is not one of {', '.join(name for name, *_ in MODELS)}.")
    rows: list[Row] = []
    counts = (2, 4) if cores_here() >= 4 else (2, 3)
    for model, shape, batch in (case for case in MODELS if not models or case[0] in models):
        for count in counts:
            progress(f"{model} on {count} devices: profiling")
            cluster = profile_local(model, (shape,), batch, count, fresh=True)
            graph = graph_of(model, (shape,), batch)
            plans = _plans(graph, cluster, ("auto", *NAMES) if regret else JUDGED)
            progress(f"{model} on {count} devices: stepping {len(plans)} plans in turn")
            different = tuple(dict.fromkeys(plans.values()))  # a plan that is chosen may be a named one
            times = _times(PlansJob(model, (shape,), different, rounds, 0), cluster)
            for strategy, plan in plans.items():
                seconds = times[different.index(plan)]
                quartiles = statistics.quantiles(seconds, n=4) if seconds[1:] else seconds * 3
                foreseen = api.simulate(api.lower(graph, plan), _limited(cluster)).cost
                spread, peaks = (quartiles[2] - quartiles[0]) / 2, tuple[int, ...]()
                if memory and strategy in JUDGED:
                    progress(f"{model} on {count} devices: memory of {strategy}")
                    facts = memory_of(MeasureJob(model, (shape,), plan, 4, 0, True))
                    peaks = tuple(facts[device]["peak_bytes"] for device in plan.devices)
                measured = statistics.median(seconds)
                rows.append(Row(model, count, strategy, foreseen, measured, spread, peaks))
    return Result(tuple(rows))


def _limited(cluster: Cluster) -> Cluster:
    """With plenty of memory, but limited: such devices give freed memory back at once."""
    return replace(cluster, devices=tuple(replace(d, memory_bytes=PLENTY) for d in cluster.devices))


def _plans(graph: Graph, cluster: Cluster, strategies: tuple[str, ...]) -> dict[str, Plan]:
    """By strategy, as far as the model can be cut so."""
    plans = {}
    for strategy in strategies:
        try:
            plans[strategy] = api.plan(graph, cluster, strategy)
        except RequestError:
            continue
    return plans


def _times(job: PlansJob, cluster: Cluster) -> list[list[float]]:
    """For every plan the seconds of its rounds, each those of the slowest device."""
    said = launch("compare", encode(job), cluster.names)
    times = []
    for number in range(len(job.plans)):
        by_device = [
            [event["seconds"] for event in events if event["event"] == "step" and event["plan"] == number]
            for events in (said[device] for device in job.plans[number].devices)
        ]
        times.append([max(seconds) for seconds in zip(*by_device, strict=True)][1:])
    return times


def to_json(result: Result) -> dict[str, Any]:
    rows = [
        encode(row) | {"judged": row.judged, "error": row.error, "memory_errors": row.memory_errors}
        for row in result.rows
    ]
    regrets = [{"model": m, "devices": n, "regret": r} for (m, n), r in result.regrets.items()]
    time = {"median": statistics.median(result.errors), "worst": max(result.errors)}
    return {"rows": rows, "time_error": time, "regrets": regrets, "within": result.within}


def table(result: Result) -> Group:
    table = Table(title="Seconds of a step, foreseen and measured (local processes, one thread each)")
    for heading in ("model", "devices", "strategy", "foreseen", "measured", "error", "peak memory, error"):
        table.add_column(heading)
    for row in result.rows:
        table.add_row(
            row.model,
            str(row.devices),
            row.strategy,
            f"{row.foreseen.seconds * 1e3:.0f} ms",
            f"{row.measured_s * 1e3:.0f} ± {row.spread_s * 1e3:.0f} ms",
            f"{row.error:+.1%}",
            " ".join(f"{error:+.1%}" for error in row.memory_errors),
        )
    lines = [
        f"time: median error {statistics.median(result.errors):.1%} (limit {MEDIAN:.0%}), "
        f"worst {max(result.errors):.1%} (limit {WORST:.0%}), over {len(result.errors)} plans"
    ]
    if errors := result.memory_errors:
        lines.append(
            f"memory: median error {statistics.median(map(abs, errors)):.1%} (limit {MEMORY_MEDIAN:.0%}), "
            f"worst {max(map(abs, errors)):.1%} (limit {MEMORY_WORST:.0%}), "
            f"most under {min(errors):+.1%} (limit {-MEMORY_UNDER:+.0%})"
        )
    for (model, count), regret in result.regrets.items():
        lines.append(f"{model} on {count}: auto over the best named plan {regret:.3f} (limit {REGRET:g})")
    return Group(table, *lines)
