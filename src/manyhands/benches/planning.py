"""How long it takes to choose a plan for a deep network on many unequal devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from manyhands import api
from manyhands.ir.cluster import Cluster, Device
from manyhands.measuring import graph_of

MODEL, SHAPE, BATCH = "resnet152", (3, 224, 224), 32
LIMITS_S = {16: 10.0, 100: 60.0}  # by the number of devices


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one core, and what was chosen."""

    devices: int
    seconds: float
    limit_s: float
    used: int  # devices of the plan
    segments: int
    step_s: float  # foreseen, by nominal speeds

    @property
    def within(self) -> bool:
        return self.seconds <= self.limit_s


def run(tell: Callable[[str], None]) -> tuple[Row, ...]:
    graph = graph_of(MODEL, (SHAPE,), BATCH)
    rows = []
    for count, limit_s in LIMITS_S.items():
        tell(f"{MODEL} for {count} devices")
        start = time.process_time()
        best = api.choose(graph, unequal(count)).best
        seconds = time.process_time() - start
        assert best is not None
        plan = best.plan
        rows.append(Row(count, seconds, limit_s, len(plan.devices), len(plan.segments), best.cost.seconds))
    return tuple(rows)


def unequal(count: int) -> Cluster:
    """Devices of four speeds, 4 to 10 GFLOP/s, on 100 Mbit/s."""
    rates = ((1 + index % 4 / 2) * 4e9 for index in range(count))
    return Cluster(tuple(Device(f"d{i}", flops_per_s=rate) for i, rate in enumerate(rates)), 12.5e6, 0.5e-3)


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"within": row.within} for row in rows]


def table(rows: tuple[Row, ...]) -> Table:
    table = Table(title=f"Choosing a plan for {MODEL}, batch {BATCH}, on unequal devices (one core)")
    for heading in ("devices", "planning", "limit", "devices used", "segments", "foreseen step", "within"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            str(row.devices),
            f"{row.seconds:.1f} s",
            f"{row.limit_s:g} s",
            str(row.used),
            str(row.segments),
            f"{row.step_s:.1f} s",
            "yes" if row.within else "NO",
        )
    return table
