"""Is memory really divided: activations by rows, weights by channels, on four processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from manyhands import api
from manyhands.measuring import graph_of, memory_of
from manyhands.tasks import MeasureJob

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """Each device's memory as a part of what one device needs for all."""

    case: str
    measure: str
    single_bytes: int
    device_bytes: tuple[int, ...]
    limit: float | None  # none: for information

    @property
    def worst(self) -> float:
        return max(self.device_bytes) / self.single_bytes

    @property
    def within(self) -> bool:
        return self.limit is None or self.worst <= self.limit


def run() -> tuple[Row, ...]:
    """Four steps each. Thrifty processes give freed memory back at once, as where memory is short."""
    rows, one = (
        _facts("yolov2-16", (3, 608, 608), 1, *how) for how in (("rows", 4, True), ("single", 1, True))
    )
    loose, alone = (_facts("yolov2-16", (3, 608, 608), 1, *how) for how in (("rows", 4), ("single", 1)))
    channels = _facts("vgg16", (3, 224, 224), 1, "channels", 4)
    whole = _facts("vgg16", (3, 224, 224), 1, "single", 1)
    case = "yolov2-16 at 608, batch 1, rows on 4 devices"
    return (
        _growth(case, "peak over the idle process, thrifty", one, rows, "ready_bytes", 0.35),
        _growth(case, "the same, with the allocator's defaults", alone, loose, "ready_bytes", None),
        _growth(
            case, "peak over a process that has only imported torch, thrifty", one, rows, "bare_bytes", None
        ),
        Row(
            "vgg16, channels on 4 devices",
            "weights + gradients + momentum",
            whole[0]["held_bytes"],
            tuple(facts["held_bytes"] for facts in channels),
            0.30,
        ),
    )


def _growth(case: str, what: str, one: list[Facts], many: list[Facts], base: str, limit: float | None) -> Row:
    grown = [facts["peak_bytes"] - facts[base] for facts in (*one, *many)]
    return Row(case, what, grown[0], tuple(grown[1:]), limit)


def _facts(
    name: str, shape: tuple[int, ...], batch: int, strategy: str, devices: int, thrifty: bool = False
) -> list[Facts]:
    """What every process said of its memory after four steps."""
    plan = api.plan(graph_of(name, (shape,), batch), devices, strategy)
    return list(memory_of(MeasureJob(name, (shape,), plan, 4, 0, thrifty)).values())


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"worst": row.worst, "within": row.within} for row in rows]


def table(rows: tuple[Row, ...]) -> Table:
    table = Table(title="Memory of each device as a part of one device's")
    for heading in ("case", "measure", "one device", "each of four", "worst", "limit", "within"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row.case,
            row.measure,
            f"{row.single_bytes / 1e6:.0f} MB",
            " ".join(f"{size / 1e6:.0f}" for size in row.device_bytes) + " MB",
            f"{row.worst:.1%}",
            "" if row.limit is None else f"{row.limit:.0%}",
            "" if row.limit is None else "yes" if row.within else "NO",
        )
    return table
