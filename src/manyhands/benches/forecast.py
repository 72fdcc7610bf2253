"""Foreseen against measured: the seconds of a step and the peak memory, and what choosing a plan costs.

A machine is not equally fast all the time. So what a forecast is made from and what it is held against are
measured in turns by the same processes, and so are the plans among which `auto` chooses.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, cores_here
from manyhands.ir.codec import encode
from manyhands.ir.graph import Convolve, Graph
from manyhands.ir.plan import Cost, Plan
from manyhands.measurements import PlansJob
from manyhands.measuring import (
    CUTS,
    ROUNDS,
    graph_of,
    memory_of,
    rehearse,
    rehearsed_plans,
    slowest,
    with_trials,
)
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
    rehearsed: bool  # so the forecast was fitted to it; if not, it is foreseen from others
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
class Time:
    """Seconds of a step of a plan."""

    strategy: str
    foreseen_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One case: the chosen plan and every named one, stepped in turn."""

    model: str
    devices: int
    auto: Time
    named: tuple[Time, ...]

    @property
    def regret(self) -> float:
        """The chosen plan's time over the best named one's."""
        return self.auto.measured_s / min(time.measured_s for time in self.named)


@dataclass(frozen=True, slots=True)
class Result:
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]

    def errors(self, rehearsed: bool) -> list[float]:
        return [abs(row.error) for row in self.rows if row.rehearsed == rehearsed]

    @property
    def memory_errors(self) -> list[float]:
        return [error for row in self.rows for error in row.memory_errors]

    @property
    def within(self) -> bool:
        groups = self.errors(rehearsed=True), self.errors(rehearsed=False)
        time = all(statistics.median(group) <= MEDIAN and max(group) <= WORST for group in groups)
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
            known, plans = rehearsed_plans(graph, count), _judged(graph, count)
            job = PlansJob(model, (shape,), known, ROUNDS, 0, stepped=tuple(plans.values()))
            cluster, stepped = rehearse(job, graph, count)
            for strategy, plan in plans.items():
                peaks: tuple[int, ...] = ()
                if memory:
                    progress(f"{where}: memory of {strategy}")
                    facts = memory_of(MeasureJob(model, (shape,), plan, 4, 0, True))
                    peaks = tuple(facts[device]["peak_bytes"] for device in plan.devices)
                low, middle, high = statistics.quantiles(stepped[plan], n=4)
                foreseen, spread = _foreseen(graph, plan, cluster), (high - low) / 2
                rows.append(Row(model, count, strategy, plan in known, foreseen, middle, spread, peaks))
            if regret:
                progress(f"{where}: auto and every named plan, in turns")
                choices.append(_choice(model, shape, graph, with_trials(job, graph, cluster), rounds))
    return Result(tuple(rows), tuple(choices))


def _judged(graph: Graph, count: int) -> dict[str, Plan]:
    """The usual cuts, which are rehearsed, and three that are not: another axis, uneven shares, a mixture."""
    plans = {strategy: api.plan(graph, count, strategy) for strategy in (*CUTS, "columns")}
    shares = (2, *(1,) * (count - 1))
    plans[f"batch, shares {':'.join(map(str, shares))}"] = api.plan(graph, count, "batch", shares=shares)
    convolutions = [layer.name for layer in graph.layers if isinstance(layer.operation, Convolve)]
    mixture = f"rows; {convolutions[len(convolutions) // 2]} = batch"
    return plans | {mixture: api.plan(graph, count, mixture)}


def _foreseen(graph: Graph, plan: Plan, cluster: Cluster) -> Cost:
    """With plenty of memory, but limited: such devices give freed memory back at once."""
    limited = replace(cluster, devices=tuple(replace(d, memory_bytes=PLENTY) for d in cluster.devices))
    return api.simulate(api.lower(graph, plan), limited).cost


def _choice(model: str, shape: tuple[int, ...], graph: Graph, cluster: Cluster, rounds: int) -> Choice:
    plans = {"auto": api.plan(graph, cluster)}
    for strategy in NAMES:
        with suppress(RequestError):  # the model cannot be cut so
            plans[strategy] = api.plan(graph, 1 if strategy == "single" else cluster, strategy)
    different = tuple(dict.fromkeys(plans.values()))  # a plan that is chosen may be a named one
    said = launch("compare", encode(PlansJob(model, (shape,), different, rounds, 0)), cluster.names)
    took = slowest(said, "stepped", different)
    auto, *named = (
        Time(name, _foreseen(graph, plan, cluster).seconds, statistics.median(took[plan]))
        for name, plan in plans.items()
    )
    return Choice(model, len(cluster.devices), auto, tuple(named))


def to_json(result: Result) -> dict[str, Any]:
    rows = [encode(row) | {"error": row.error, "memory_errors": row.memory_errors} for row in result.rows]
    choices = [encode(choice) | {"regret": choice.regret} for choice in result.choices]
    time = {
        name: {"median": statistics.median(errors), "worst": max(errors)}
        for name, errors in _groups(result).items()
    }
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
        f"time, plans {name}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, "
        f"over {len(errors)} plans (limits {MEDIAN:.0%} and {WORST:.0%})"
        for name, errors in _groups(result).items()
    ]
    if errors := result.memory_errors:
        lines.append(
            f"memory: median error {statistics.median(map(abs, errors)):.1%} (limit {MEMORY_MEDIAN:.0%}), "
            f"worst {max(map(abs, errors)):.1%} (limit {MEMORY_WORST:.0%}), "
            f"most under {min(errors):+.1%} (limit {-MEMORY_UNDER:+.0%})"
        )
    return Group(table, *lines, *([_choices(result.choices)] if result.choices else []))


def _groups(result: Result) -> dict[str, list[float]]:
    return {"rehearsed": result.errors(rehearsed=True), "not rehearsed": result.errors(rehearsed=False)}


def _choices(choices: tuple[Choice, ...]) -> Table:
    table = Table(title="The chosen plan and every named one, stepped in turns: ms foreseen / measured")
    for heading in ("model", "devices", "auto", *NAMES, f"regret (limit {REGRET:g})"):
        table.add_column(heading)
    for choice in choices:
        times = {t.strategy: f"{1e3 * t.foreseen_s:.0f} / {1e3 * t.measured_s:.0f}" for t in choice.named}
        auto = f"{1e3 * choice.auto.foreseen_s:.0f} / {1e3 * choice.auto.measured_s:.0f}"
        cells = [auto, *(times.get(name, "") for name in NAMES)]
        table.add_row(choice.model, str(choice.devices), *cells, f"{choice.regret:.3f}")
    return table
