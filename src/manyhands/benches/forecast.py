"""Foreseen against measured: the seconds of a step and the peak memory, and what choosing a plan costs.

A machine is not equally fast all the time. So what a forecast is made from and what it is held against are
measured in turns by the same processes, and so are the plans among which `auto` chooses.
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
from manyhands.measuring import CUTS, ROUNDS, graph_of, memory_of, rehearse, rehearsed_plans
from manyhands.planning.strategies import NAMES
from manyhands.runtime.ranks import launch
from manyhands.tasks import MeasureJob

MODELS = (
    ("resnet18", (3, 128, 128), 6),
    ("yolov2-16", (3, 224, 224), 6),
    ("mobilenetv2", (3, 128, 128), 6),
    ("unet-small", (3, 128, 128), 6),
)
MEDIAN, WORST = 0.10, 0.25  # of the errors in time
MEMORY_MEDIAN, MEMORY_WORST, MEMORY_UNDER = 0.05, 0.10, 0.05
PLENTY = 10**12
REGRET = 1.05  # of the chosen plan over the best named one


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one case: foreseen from a rehearsal, and stepped in the turns of that rehearsal."""

    model: str
    devices: int
    strategy: str
    foreseen: Cost
    measured_s: float  # the slowest device's, median of the rounds
    spread_s: float  # half the distance between the quartiles
    measured_peaks: tuple[int, ...] = ()  # of each device, where memory was measured

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
class Choice:
    """One case: the chosen plan and all named ones, stepped in turn; seconds, foreseen and measured."""

    model: str
    devices: int
    times: tuple[tuple[str, float, float], ...]

    @property
    def regret(self) -> float:
        """The chosen plan's time over the best named one's."""
        measured = {name: seconds for name, _, seconds in self.times}
        return measured["auto"] / min(seconds for name, seconds in measured.items() if name != "auto")


@dataclass(frozen=True, slots=True)
class Result:
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]

    @property
    def errors(self) -> list[float]:
        return [abs(row.error) for row in self.rows]

    @property
    def memory_errors(self) -> list[float]:
        return [error for row in self.rows for error in row.memory_errors]

    @property
    def within(self) -> bool:
        time = statistics.median(self.errors) <= MEDIAN and max(self.errors) <= WORST
        memory = not self.memory_errors or (
            statistics.median(map(abs, self.memory_errors)) <= MEMORY_MEDIAN
            and max(map(abs, self.memory_errors)) <= MEMORY_WORST
            and min(self.memory_errors) >= -MEMORY_UNDER
        )
        return time and memory and all(choice.regret <= REGRET for choice in self.choices)


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
    choices: list[Choice] = []
    counts = (2, 4) if cores_here() >= 4 else (2, 3)
    for model, shape, batch in (case for case in MODELS if not models or case[0] in models):
        graph = graph_of(model, (shape,), batch)
        for count in counts:
            where = f"{model} on {count} devices"
            progress(f"{where}: rehearsing plans and stepping them, in turns")
            job = PlansJob(model, (shape,), rehearsed_plans(graph, count), ROUNDS, 0, stepped=True)
            cluster, stepped = rehearse(job, graph, count)
            for plan, seconds in stepped.items():
                strategy = next(name for name in CUTS if api.plan(graph, count, name) == plan)
                peaks: tuple[int, ...] = ()
                if memory:
                    progress(f"{where}: memory of {strategy}")
                    facts = memory_of(MeasureJob(model, (shape,), plan, 4, 0, True))
                    peaks = tuple(facts[device]["peak_bytes"] for device in plan.devices)
                low, middle, high = statistics.quantiles(seconds, n=4)
                foreseen = _foreseen(graph, plan, cluster)
                rows.append(Row(model, count, strategy, foreseen, middle, (high - low) / 2, peaks))
            if regret:
                progress(f"{where}: auto and every named plan, in turns")
                choices.append(_choice(model, shape, graph, cluster, rounds))
    return Result(tuple(rows), tuple(choices))


def _foreseen(graph: Graph, plan: Plan, cluster: Cluster) -> Cost:
    """With plenty of memory, but limited: such devices give freed memory back at once."""
    limited = replace(cluster, devices=tuple(replace(d, memory_bytes=PLENTY) for d in cluster.devices))
    return api.simulate(api.lower(graph, plan), limited).cost


def _choice(model: str, shape: tuple[int, ...], graph: Graph, cluster: Cluster, rounds: int) -> Choice:
    plans = _plans(graph, cluster, ("auto", *NAMES))
    different = tuple(dict.fromkeys(plans.values()))  # a plan that is chosen may be a named one
    measured = _times(PlansJob(model, (shape,), different, rounds, 0), cluster)
    times = []
    for name, plan in plans.items():
        foreseen_s = _foreseen(graph, plan, cluster).seconds
        times.append((name, foreseen_s, statistics.median(measured[different.index(plan)])))
    return Choice(model, len(cluster.devices), tuple(times))


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
    rows = [encode(row) | {"error": row.error, "memory_errors": row.memory_errors} for row in result.rows]
    choices = [encode(choice) | {"regret": choice.regret} for choice in result.choices]
    time = {"median": statistics.median(result.errors), "worst": max(result.errors)}
    return {"rows": rows, "time_error": time, "choices": choices, "within": result.within}


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
    return Group(table, *lines, *([_choices(result.choices)] if result.choices else []))


def _choices(choices: tuple[Choice, ...]) -> Table:
    table = Table(title="The chosen plan and every named one, stepped in turns: ms foreseen / measured")
    names = list(dict.fromkeys(name for choice in choices for name, *_ in choice.times))
    for heading in ("model", "devices", *names, f"regret (limit {REGRET:g})"):
        table.add_column(heading)
    for choice in choices:
        times = {name: f"{1e3 * a:.0f} / {1e3 * b:.0f}" for name, a, b in choice.times}
        cells = [times.get(name, "") for name in names]
        table.add_row(choice.model, str(choice.devices), *cells, f"{choice.regret:.3f}")
    return table
