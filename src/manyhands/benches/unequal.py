"""One fast device and three slow ones: what unequal shares are worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from manyhands.benches.emulated import (
    Conditions,
    Lap,
    Setting,
    Tell,
    among,
    by_name,
    cluster,
    core_speed,
    laps,
    untried,
    with_all,
)
from manyhands.emulation.boards import BOARDS
from manyhands.errors import RunError

MODEL, SHAPE, BATCH = "yolov2-16", (3, 224, 224), 8
FAST = "pi-5"
DEVICES = {FAST: "raspberry-pi-5"} | dict.fromkeys(("pi-3a", "pi-3b", "pi-3c"), "raspberry-pi-3")
EQUAL = ("batch", "rows")
OVER_EQUAL = 2.5
ALONE, ALL = "pi-5 alone", "all four, shares by the planner"


@dataclass(frozen=True, slots=True)
class Result:
    mbit: float
    laps: tuple[Lap, ...]
    chosen: tuple[str, ...]  # the devices of `auto`
    conditions: Conditions

    def seconds(self, name: str) -> float:
        return next(lap.seconds for lap in self.laps if lap.name == name)

    @property
    def over_equal(self) -> float:
        """How many times as fast as the better of the equal shares `auto` is."""
        equal = [lap.seconds for lap in self.laps if lap.name.startswith("equal")]
        return min(equal) / self.seconds("auto")

    @property
    def over_alone(self) -> float:
        return self.seconds(ALONE) / self.seconds("auto")

    @property
    def alone_is_chosen(self) -> bool:
        return self.chosen == (FAST,)

    @property
    def within(self) -> bool:
        if self.alone_is_chosen:  # which has to be better than the best that all of them can do
            return self.seconds(ALONE) == min(lap.seconds for lap in self.laps if lap.name != "auto")
        return self.over_equal >= OVER_EQUAL and self.over_alone > 1


def run(mbit: float, dilation: float | None, rounds: int, tell: Tell) -> Result:
    speeds = {name: 1e9 * BOARDS[board].gflops for name, board in DEVICES.items()}
    plans = {"auto": untried, ALONE: among((FAST,), by_name("single")), ALL: with_all}
    plans |= {f"equal {name}": by_name(name) for name in EQUAL}
    setting = Setting(MODEL, SHAPE, BATCH, cluster(speeds, mbit))
    found, chosen, conditions = laps(setting, core_speed(tell), dilation, plans, (), rounds, tell)
    if missing := plans.keys() - chosen.keys():
        raise RunError(f"no plan could be made for {', '.join(sorted(missing))}: nothing to compare with.")
    return Result(mbit, found, chosen["auto"].devices, conditions)


def to_json(result: Result) -> dict[str, Any]:
    more = {"over_equal": result.over_equal, "over_alone": result.over_alone, "within": result.within}
    return asdict(result) | more


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
    if result.alone_is_chosen:
        said = "the planner says that the Pi 5 alone is best; "
        said += "so it is" if result.within else "another is faster"
    else:
        said = (
            f"auto is {result.over_equal:.2f} times as fast as equal shares (required {OVER_EQUAL:g}) and "
            f"{result.over_alone:.2f} times as fast as the Pi 5 alone"
        )
    table.caption = f"{result.conditions}\n{said}"
    return table
