"""Step time and efficiency by the number of devices: measured on emulated ones, simulated for many."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.table import Table

from manyhands import api
from manyhands.benches.emulated import (
    AUTO,
    Conditions,
    Lap,
    Setting,
    Tell,
    among,
    auto,
    by_name,
    check_settings,
    cluster,
    core_speed,
    laps,
    tell_at,
)
from manyhands.emulation.boards import BOARDS
from manyhands.measuring import graph_of
from manyhands.planning.simulation import simulate

MODEL, SHAPE = "resnet18", (3, 224, 224)
BOARD = "raspberry-pi-4"
ONE = "one device"
LATENCY_S = 0.5e-3  # of simulated messages, as cluster files have it that say none
SIMULATED = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Row:
    """So many devices; the batch grows with them, so that there is work for all."""

    devices: int
    batch: int
    auto: Lap
    one: Lap  # the same batch on one device
    conditions: Conditions | None = None  # where it was measured; else it is simulated

    @property
    def how(self) -> str:
        return "simulated, batch" if self.conditions is None else "measured, auto"

    @property
    def efficiency(self) -> float:
        """The ideal time over this one."""
        return self.one.seconds / self.devices / self.auto.seconds


def run(
    counts: tuple[int, ...], each: int, mbit: float, dilation: float | None, rounds: int, tell: Tell
) -> tuple[Row, ...]:
    core, speed, rows = core_speed(tell), 1e9 * BOARDS[BOARD].gflops, []
    devices = {count: cluster({f"pi-{i}": speed for i in range(count)}, mbit) for count in counts}
    settings = {count: Setting(MODEL, SHAPE, each * count, some) for count, some in devices.items()}
    check_settings(settings.values(), core, dilation)
    plans = {AUTO: auto, ONE: among(("pi-0",), by_name("single"))}
    for number, (count, setting) in enumerate(settings.items(), 1):
        telling = partial(tell_at, tell, f"{number} of {len(settings)}: {count} devices")
        (ours, alone), _, conditions = laps(setting, core, dilation, plans, (), rounds, telling)
        rows.append(Row(count, setting.batch, ours, alone, conditions))
    for count in SIMULATED:
        tell(f"{count} devices, simulated")
        rows.append(_simulated(count, each * count, mbit, speed))
    return tuple(rows)


def _simulated(count: int, batch: int, mbit: float, speed: float) -> Row:
    """By nominal speeds: samples divided among all devices, the weights added up among all of them."""
    graph = graph_of(MODEL, (SHAPE,), batch)
    devices = replace(cluster({f"pi-{i}": speed for i in range(count)}, mbit), latency_s=LATENCY_S)
    alone = cluster({"pi-0": speed}, mbit)
    seconds, one_s = (
        simulate(api.lower(graph, api.plan(graph, some, strategy)), some, memory=False).cost.seconds
        for some, strategy in ((devices, "batch"), (alone, "single"))
    )
    return Row(count, batch, Lap(AUTO, seconds, layouts="batch"), Lap(ONE, one_s))


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"efficiency": row.efficiency} for row in rows]


def bars(rows: tuple[Row, ...]) -> dict[str, dict[str, float]]:
    """For a plot: efficiency."""
    return {
        str(count): {row.how: row.efficiency for row in rows if row.devices == count}
        for count in sorted({row.devices for row in rows})
    }


def table(rows: tuple[Row, ...]) -> Table:
    table = Table(title=f"{MODEL} at {SHAPE[1]} on Raspberry Pi 4, emulated or by simulation")
    for heading in (
        "devices",
        "batch",
        "a step",
        "between",
        "one device",
        "between",
        "efficiency",
        "",
        "plan",
    ):
        table.add_column(heading)
    for row in rows:
        seconds = [text for lap in (row.auto, row.one) for text in (f"{lap.seconds:.2f} s", lap.spread)]
        words = (*seconds, f"{row.efficiency:.0%}", row.how, row.auto.plan)
        table.add_row(str(row.devices), str(row.batch), *words)
    told = [f"{row.devices} devices: {row.conditions}" for row in rows if row.conditions]
    told.append(f"simulated: by nominal speeds, {1e3 * LATENCY_S:g} ms a message; nothing of it was measured")
    table.caption = "\n".join(told)
    return table
