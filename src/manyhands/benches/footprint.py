"""Is peak memory foreseen: of every process of a run, in both ways in which memory is given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from rich.table import Table

from manyhands import api
from manyhands.measuring import graph_of, memory_of
from manyhands.planning.lowering import Lowered
from manyhands.planning.memory import peaks
from manyhands.tasks import MeasureJob

MEDIAN, WORST, WORST_UNDER = 0.05, 0.10, 0.05
STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    size: int
    batch: int
    strategy: str
    devices: int
    thrifty: bool = True
    packed: bool = False
    wire: str | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1 if self.model == "demo" else 3, self.size, self.size

    def __str__(self) -> str:
        freed = "freed at once" if self.thrifty else "allocator's defaults"
        zeros, rounded = ", zeros left out" * self.packed, f", {self.wire}" if self.wire else ""
        way = f"{self.strategy} on {self.devices}{zeros}{rounded}"
        return f"{self.model} at {self.size}, batch {self.batch}, {way}, {freed}"


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    device: str
    foreseen_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.foreseen_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors over all rows, as parts of what was measured."""

    median: float
    worst: float
    worst_under: float

    @property
    def within(self) -> bool:
        return self.median <= MEDIAN and self.worst <= WORST and self.worst_under <= WORST_UNDER


_MODELS = (
    ("resnet18", 128),
    ("yolov2-16", 224),
    ("yolov2-16", 416),
    ("mobilenetv2", 128),
    ("vgg11-bn", 128),
    ("unet", 128),
)
_WAYS = (
    (4, "single", 1),
    (8, "batch", 2),
    (4, "rows", 2),
    (4, "channels", 2),
    (6, "batch", 3),
    (4, "rows", 3),
)
_RECTIFIED = ("resnet18", "mobilenetv2", "vgg11-bn", "unet")
CASES = (
    *(
        Case(model, size, batch, strategy, devices, thrifty)
        for thrifty in (True, False)
        for batch, strategy, devices in _WAYS
        for model, size in _MODELS
    ),
    *(Case(model, size, 4, "channels", 2, packed=True) for model, size in _MODELS if model in _RECTIFIED),
)


def run(
    cases: tuple[Case, ...] = CASES, on_case: Callable[[str], None] = lambda name: None
) -> tuple[Row, ...]:
    """What was foreseen and what was measured, of every device of every case."""
    on_case("the bare process")
    bare, rows = _bare_bytes(), list[Row]()
    for case in cases:
        on_case(str(case))
        lowered = _lower(case)
        foreseen = peaks(lowered, bare_bytes=bare, thrifty=case.thrifty)
        measured = {device: facts["peak_bytes"] for device, facts in _measure(case, lowered).items()}
        rows += [Row(str(case), device, foreseen[device], measured[device]) for device in foreseen]
    return tuple(rows)


def _bare_bytes() -> int:
    """Of a process here that is ready to train and holds next to no weights."""
    case = Case("demo", 28, 1, "single", 1)
    (facts,) = _measure(case, _lower(case)).values()
    return int(facts["ready_bytes"])


def _lower(case: Case) -> Lowered:
    graph = graph_of(case.model, (case.shape,), case.batch)
    plan = api.plan(graph, case.devices, case.strategy, wire=case.wire)
    return api.lower(graph, replace(plan, packed=case.packed))


def _measure(case: Case, lowered: Lowered) -> dict[str, dict[str, Any]]:
    """What every process said of its memory after a few steps."""
    return memory_of(MeasureJob(case.model, (case.shape,), lowered.plan, STEPS, 0, case.thrifty))


def summarise(rows: tuple[Row, ...]) -> Summary:
    errors = [row.error for row in rows]
    return Summary(median(map(abs, errors)), max(map(abs, errors)), max(0.0, -min(errors)))


def to_json(rows: tuple[Row, ...]) -> dict[str, Any]:
    summary = summarise(rows)
    return {
        "rows": [asdict(row) | {"error": row.error} for row in rows],
        "summary": asdict(summary) | {"within": summary.within},
    }


def table(rows: tuple[Row, ...]) -> Table:
    summary = summarise(rows)
    table = Table(
        title="Peak memory of each process, foreseen and measured",
        caption=f"median {summary.median:.1%} (limit {MEDIAN:.0%}), worst {summary.worst:.1%} ({WORST:.0%}), "
        f"worst under {summary.worst_under:.1%} ({WORST_UNDER:.0%})",
    )
    for heading in ("case", "device", "foreseen", "measured", "error"):
        table.add_column(heading)
    for row in rows:
        sizes = (f"{size / 1e6:.0f} MB" for size in (row.foreseen_bytes, row.measured_bytes))
        table.add_row(row.case, row.device, *sizes, f"{row.error:+.1%}")
    return table
