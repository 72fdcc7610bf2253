"""The setting of the paper on tiled training: YOLOv2's first 16 layers on emulated Raspberry Pi 3."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from rich.table import Table

from manyhands import api
from manyhands.benches.emulated import (
    AUTO,
    Choose,
    Conditions,
    Lap,
    Setting,
    Tell,
    Verdict,
    all_reached,
    among,
    auto,
    by_name,
    check_settings,
    cluster,
    core_speed,
    laps,
    tell_at,
    verdicts_to_json,
)
from manyhands.emulation.boards import BOARDS
from manyhands.ir.plan import Plan
from manyhands.measuring import graph_of, memory_of
from manyhands.tasks import MeasureJob

MODEL, SHAPE = "yolov2-16", (3, 608, 608)
CORES, ONE_CORE = 4, "one-core"
JUDGED = 100.0  # Mbit/s, at which something is required, with the best batch
OVER_ONE_CORE = {6: 15.0, 2: 6.0}
OF_IDEAL = 0.75
LESS_MEMORY = 5.0  # on six devices
STEPS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """Some devices of four cores, a batch and a rate: seconds of a step."""

    devices: int
    batch: int
    mbit: float
    one_core: Lap
    one_device: Lap
    ways: tuple[Lap, ...]  # of grouping layers
    conditions: Conditions

    @property
    def one_core_s(self) -> float:
        """As measured, or what follows from one device, if that is less: of very small parts of a core the
        kernel may give too little.
        """
        return min(self.one_core.seconds, CORES * self.one_device_s)

    @property
    def one_device_s(self) -> float:
        return self.one_device.seconds

    @property
    def auto(self) -> Lap:
        return next(lap for lap in self.ways if lap.name == AUTO)

    @property
    def best_s(self) -> float:
        return self.auto.seconds

    @property
    def over_one_core(self) -> float:
        return self.one_core_s / self.best_s

    @property
    def of_ideal(self) -> float:
        """Of the speed-up that as many devices would have if nothing had to be sent."""
        return self.one_device_s / self.best_s / self.devices


@dataclass(frozen=True, slots=True)
class Memory:
    """Growth of a process in a step over what it has when it is ready: activations, gradients, momentum."""

    devices: int
    batch: int
    mbit: float
    strategy: str
    one_bytes: int
    most_bytes: int

    @property
    def less(self) -> float:
        return self.one_bytes / self.most_bytes


@dataclass(frozen=True, slots=True)
class Result:
    rows: tuple[Row, ...]
    memory: tuple[Memory, ...]

    def best(self, devices: int, mbit: float = JUDGED) -> Row | None:
        found = [row for row in self.rows if row.devices == devices and row.mbit == mbit]
        return max(found, key=lambda row: row.over_one_core, default=None)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of everything that is required."""
        found = []
        for devices, times in OVER_ONE_CORE.items():
            row = self.best(devices)
            what = f"{devices} devices at {JUDGED:g} Mbit/s: times as fast as one core"
            found.append(Verdict(what, times, None if row is None else row.over_one_core))
        six = self.best(6)
        found.append(Verdict("6 devices: of the ideal", OF_IDEAL, None if six is None else six.of_ideal))
        less = [m.less for m in self.memory if m.devices == 6 and m.mbit == JUDGED]
        what = "6 devices: times less that a process grows by in a step"
        found.append(Verdict(what, LESS_MEMORY, min(less, default=None)))
        return tuple(found)

    @property
    def within(self) -> bool | None:
        """Is all that is required reached?"""
        return all_reached(self.verdicts)


WAYS: dict[str, Choose] = {
    AUTO: auto,
    "per layer": by_name("rows"),
    "all fused": by_name("rows", fuse=()),  # cut once for the whole network: exchanged only in the end
}


def run(
    counts: tuple[int, ...],
    batches: tuple[int, ...],
    rates: tuple[float, ...],
    dilation: float | None,
    rounds: int,
    memory: bool,
    tell: Tell,
) -> Result:
    core = core_speed(tell)
    plans: dict[Row, Plan] = {}
    settings = {case: _setting(*case) for case in product(counts, batches, rates)}
    check_settings(settings.values(), core, dilation)
    for number, ((_, _, mbit), setting) in enumerate(settings.items(), 1):
        telling = partial(tell_at, tell, f"{number} of {len(settings)}")
        row, plan = _row(setting, mbit, core, dilation, rounds, telling)
        plans[row] = plan
    result = Result(tuple(plans), ())
    best = (result.best(count, mbit) for count in counts for mbit in rates if memory)
    found = [_memory(row, plans[row], tell) for row in best if row is not None]
    return replace(result, memory=tuple(found))


def _setting(count: int, batch: int, mbit: float) -> Setting:
    speed = 1e9 * BOARDS["raspberry-pi-3"].gflops
    names = tuple(f"pi-{i}" for i in range(count))
    devices = cluster(dict.fromkeys(names, speed) | {ONE_CORE: speed / CORES}, mbit)
    return Setting(MODEL, SHAPE, batch, devices, names)


def _row(
    setting: Setting, mbit: float, core: float, dilation: float | None, rounds: int, tell: Tell
) -> tuple[Row, Plan]:
    """The race, and what the planner's own plan was in it."""
    names, batch = setting.sharing, setting.batch
    telling = partial(tell_at, tell, f"{len(names)} devices, batch {batch}, {mbit:g} Mbit/s")
    plans = {name: among(names, choose) for name, choose in WAYS.items()}
    plans |= {name: among((name,), by_name("single")) for name in (names[0], ONE_CORE)}
    raced, chosen, conditions = laps(setting, core, dilation, plans, (), rounds, telling)
    found = {lap.name: lap for lap in raced}
    alone = found.pop(ONE_CORE), found.pop(names[0])
    return Row(len(names), batch, mbit, *alone, tuple(found.values()), conditions), chosen[AUTO]


def _memory(row: Row, plan: Plan, tell: Tell) -> Memory:
    """Growth of a process over what it has when it is ready, weights included, while it takes some steps."""
    tell(f"memory of {row.devices} devices")
    single = api.plan(graph_of(MODEL, (SHAPE,), row.batch), 1, "single")
    one_bytes, most_bytes = (
        max(each["peak_bytes"] - each["ready_bytes"] for each in facts.values())
        for facts in (memory_of(MeasureJob(MODEL, (SHAPE,), p, STEPS, 0, True)) for p in (single, plan))
    )
    return Memory(row.devices, row.batch, row.mbit, row.auto.layouts, one_bytes, most_bytes)


def to_json(result: Result) -> dict[str, Any]:
    rows = [asdict(r) | {"over_one_core": r.over_one_core, "of_ideal": r.of_ideal} for r in result.rows]
    memory = [asdict(m) | {"less": m.less} for m in result.memory]
    return {"rows": rows, "memory": memory} | verdicts_to_json(result.verdicts)


def bars(result: Result) -> dict[str, dict[str, float]]:
    """For a plot: how many times as fast as one core."""
    return {
        f"{r.devices} x batch {r.batch}\n{r.mbit:g} Mbit/s": {
            lap.name: r.one_core_s / lap.seconds for lap in r.ways
        }
        for r in result.rows
    }


def table(result: Result) -> Table:
    table = Table(title=f"{MODEL} at {SHAPE[1]} on emulated Raspberry Pi 3: times as fast as one core")
    for heading in ("devices", "batch", "Mbit/s", "one core", "one device", *WAYS, "plan of auto"):
        table.add_column(heading)
    for row in result.rows:
        raced = {lap.name: lap.seconds for lap in row.ways}
        cells = [
            f"{row.one_core_s / raced[way]:.1f}x ({row.one_device_s / raced[way] / row.devices:.0%})"
            if way in raced
            else "cannot be"
            for way in WAYS
        ]
        setting = (str(row.devices), str(row.batch), f"{row.mbit:g}")
        alone = (f"{row.one_core_s:.1f} s", f"{row.one_device_s:.1f} s")
        table.add_row(*setting, *alone, *cells, row.auto.plan)
    told = []
    for row in result.rows:
        where = f"{row.devices} devices, batch {row.batch}, {row.mbit:g} Mbit/s"
        told.append(f"{where}: {row.conditions}")
        for lap in (row.one_core, row.one_device, *row.ways):
            told.append(f"{where}, {lap.name}: {lap.spread}; a device spends {lap.spent}")
    if result.memory:
        parts = [
            f"{m.devices}, batch {m.batch}, {m.mbit:g} Mbit/s: {m.less:.2f} times less" for m in result.memory
        ]
        told.append(
            "growth of the fullest of so many plain local processes in a step, by auto, "
            f"memory handed back at once as under a limit: {', '.join(parts)}"
        )
    table.caption = "\n".join((*told, *map(str, result.verdicts)))
    return table
