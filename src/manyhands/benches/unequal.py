"""One fast device and three slow ones: what unequal shares are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from manyhands.benches.emulated import (
    AUTO,
    Conditions,
    Lap,
    Setting,
    Tell,
    Verdict,
    all_reached,
    among,
    by_name,
    cluster,
    core_speed,
    laps,
    untried,
    verdicts_to_json,
    with_all,
)
from manyhands.emulation.boards import BOARDS
from manyhands.errors import RunError
from manyhands.ir.cluster import Cluster
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan

MODEL, SHAPE, BATCH = "yolov2-16", (3, 224, 224), 8
FAST = "pi-5"
DEVICES = {FAST: "raspberry-pi-5"} | dict.fromkeys(("pi-3a", "pi-3b", "pi-3c"), "raspberry-pi-3")
EQUAL = ("batch", "rows")
OVER_EQUAL = 2.5
ALONE = "pi-5 alone"
PROMPT, USUAL_S = "auto, if messages were never late", 0.5e-3  # as a switch takes: judged is `auto`
# So many of them, all of which have to take part, by the plan that is foreseen to be fastest then.
SHARED = {"pi-5 and one pi-3": 2, "pi-5 and two pi-3": 3, "all four": 4}


@dataclass(frozen=True, slots=True)
class Result:
    mbit: float
    laps: tuple[Lap, ...]
    chosen: tuple[str, ...]  # the devices of `auto`
    conditions: Conditions

    def seconds(self, name: str) -> float:
        return next(lap.seconds for lap in self.laps if lap.name == name)

    @property
    def alone_is_chosen(self) -> bool:
        return self.chosen == (FAST,)

    def is_shared_if_prompt(self, lap: Lap) -> bool:
        return lap.name == PROMPT and lap.layouts != next(x.layouts for x in self.laps if x.name == ALONE)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of everything that is required, which depends on what the planner says."""
        equal = min(lap.seconds for lap in self.laps if lap.name.startswith("equal"))
        if self.alone_is_chosen:
            several = [
                lap.seconds for lap in self.laps if lap.name in SHARED or self.is_shared_if_prompt(lap)
            ]
            shared = min(equal, *several) / self.seconds(ALONE)
            what = "the Pi 5 alone, as the planner says: times as fast as the fastest of several"
            return (Verdict(what, 1, shared),)
        ours = self.seconds(AUTO)
        over_equal = Verdict("times as fast as the better of equal shares", OVER_EQUAL, equal / ours)
        return over_equal, Verdict("times as fast as the Pi 5 alone", 1, self.seconds(ALONE) / ours)

    @property
    def within(self) -> bool | None:
        return all_reached(self.verdicts)


def run(mbit: float, dilation: float | None, rounds: int, tell: Tell) -> Result:
    speeds = {name: 1e9 * BOARDS[board].gflops for name, board in DEVICES.items()}
    plans = {AUTO: untried, ALONE: among((FAST,), by_name("single")), PROMPT: prompt}
    plans |= {name: among(tuple(DEVICES)[:number], with_all) for name, number in SHARED.items()}
    plans |= {f"equal {name}": by_name(name) for name in EQUAL}
    setting = Setting(MODEL, SHAPE, BATCH, cluster(speeds, mbit))
    found, chosen, conditions = laps(setting, core_speed(tell), dilation, plans, (), rounds, tell)
    if missing := plans.keys() - chosen.keys():
        why = "; ".join(f"{name}: {reason}" for name, reason in conditions.refused)
        raise RunError(f"without {', '.join(sorted(missing))} there is nothing to compare with: {why}")
    return Result(mbit, found, chosen[AUTO].devices, conditions)


def prompt(graph: Graph, cluster: Cluster) -> Sequence[Plan]:
    """What is chosen where messages take as long as at a switch. Emulated devices, with parts of a core,
    are late for each other by much more, and a planner that knows it may pass sharing over for that alone.
    """
    factor = cluster.devices[0].flops_per_s / (1e9 * BOARDS[DEVICES[FAST]].gflops)
    return untried(graph, replace(cluster, latency_s=USUAL_S / factor))


def to_json(result: Result) -> dict[str, Any]:
    return asdict(result) | verdicts_to_json(result.verdicts)


def bars(result: Result) -> dict[str, dict[str, float]]:
    """For a plot: seconds of a step."""
    return {"seconds of a step": {lap.name: lap.seconds for lap in result.laps}}


def table(result: Result) -> Table:
    setting = f"{MODEL} at {SHAPE[1]}, batch {BATCH}, {result.mbit:g} Mbit/s"
    table = Table(title=f"{setting}: a Pi 5 and three Pi 3, emulated")
    for heading in ("contestant", "a step", "between", "foreseen", "layouts"):
        table.add_column(heading)
    for lap in result.laps:
        foreseen = "" if lap.foreseen_s is None else f"{lap.foreseen_s:.2f} s"
        table.add_row(lap.name, f"{lap.seconds:.2f} s", lap.spread, foreseen, lap.layouts)
    table.caption = "\n".join((str(result.conditions), *map(str, result.verdicts)))
    return table
