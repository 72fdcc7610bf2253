"""What the engine costs on one device, in time and memory, against the loop anybody would write."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from manyhands import api
from manyhands.ir.codec import encode
from manyhands.ir.plan import Plan
from manyhands.loading import load_model
from manyhands.measuring import graph_of
from manyhands.runtime.computing import Batch
from manyhands.runtime.formats import faster_format
from manyhands.runtime.ranks import launch
from manyhands.runtime.transport import Loopback, Mailroom
from manyhands.tasks import MeasureJob, mean_square, random_inputs

CASES = (("yolov2-16", (3, 416, 416), 4), ("resnet18", (3, 224, 224), 4))
LIMIT = 1.05


@dataclass(frozen=True, slots=True)
class Row:
    """Engine over plain, both measured alternately in one run."""

    case: str
    time_ratio: float
    time_spread: float  # half the distance between the quartiles of the ratios
    memory_ratio: float
    plain_seconds: float
    plain_bytes: int

    @property
    def within(self) -> bool:
        return self.time_ratio <= LIMIT and self.memory_ratio <= LIMIT


def run(rounds: int, progress: Callable[[str], None] = lambda text: None) -> tuple[Row, ...]:
    rows = []
    for model, shape, batch in CASES:
        progress(f"{model}: time")
        ratios, plain = _times(model, shape, batch, rounds)
        progress(f"{model}: memory")
        memory, plain_bytes = _memory(model, shape, batch)
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        spread = (quartiles[2] - quartiles[0]) / 2
        case = f"{model} at {shape[1]}, batch {batch}"
        rows.append(Row(case, statistics.median(ratios), spread, memory, plain, plain_bytes))
    return tuple(rows)


def _times(name: str, shape: tuple[int, ...], batch: int, rounds: int) -> tuple[list[float], float]:
    """Ratios of neighbouring steps in one process, one thread, and the plain step's median seconds."""
    torch.set_num_threads(1)
    model = load_model(name)
    example = (torch.empty(batch, *shape, device="meta"),)
    traced = api.trace(model, *example)
    lowered = api.lower(traced.graph, api.plan(traced.graph, 1, "single"))
    device = lowered.plan.devices[0]
    worker = api.make_worker(traced, lowered, copy.deepcopy(model), device, Loopback(device, Mailroom()))
    worker.use_format(faster_format(traced.graph, worker.territory, torch.float32))
    worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 1e-3, 0.9))
    theirs = torch.optim.SGD(model.parameters(), 1e-3, 0.9)
    inputs = random_inputs(example, 0)

    def plain_step() -> None:
        theirs.zero_grad()
        mean_square((model(*inputs),)).backward()
        theirs.step()

    pairs = []
    for index in range(rounds + 1):
        steps: list[Callable[[], Any]] = [plain_step, lambda: worker.step(Batch(inputs, mean_square))]
        seconds = [0.0, 0.0]
        for which in (0, 1) if index % 2 else (1, 0):  # neither always goes first
            start = time.perf_counter()
            steps[which]()
            seconds[which] = time.perf_counter() - start
        pairs.append((seconds[0], seconds[1]))
    pairs = pairs[1:]  # the first warms up
    return [engine / plain for plain, engine in pairs], statistics.median(plain for plain, _ in pairs)


def _memory(name: str, shape: tuple[int, ...], batch: int) -> tuple[float, int]:
    """Growth of a fresh process's peak over its idle state, engine over plain, medians of three."""
    growth: dict[str, list[int]] = {"measure": [], "plain": []}
    plan = _single_plan(name, shape, batch)
    job = encode(MeasureJob(name, (shape,), plan, 4, 0))
    for _ in range(3):
        for task, values in growth.items():
            (events,) = launch(task, job, plan.devices).values()
            facts = next(event for event in events if event["event"] == "memory")
            values.append(facts["peak_bytes"] - facts["ready_bytes"])
    plain = statistics.median(growth["plain"])
    return statistics.median(growth["measure"]) / plain, int(plain)


def _single_plan(name: str, shape: tuple[int, ...], batch: int) -> Plan:
    return api.plan(graph_of(name, (shape,), batch), 1, "single")


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"limit": LIMIT, "within": row.within} for row in rows]


def table(rows: tuple[Row, ...]) -> Table:
    table = Table(title="One device: the engine over a plain PyTorch loop (one thread, alternating)")
    for heading in ("case", "time", "peak memory growth", "plain step", "plain growth", f"within {LIMIT:g}"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row.case,
            f"{row.time_ratio:.3f} ± {row.time_spread:.3f}",
            f"{row.memory_ratio:.3f}",
            f"{row.plain_seconds:.2f} s",
            f"{row.plain_bytes / 1e6:.0f} MB",
            "yes" if row.within else "NO",
        )
    return table
