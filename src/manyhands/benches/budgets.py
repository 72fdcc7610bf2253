"""Do fitted models stay within their budgets, where the kernel kills who needs more?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from random import Random
from typing import Any

from rich.table import Table

from manyhands.emulation.cgroups import limited, why_not
from manyhands.errors import RequestError, RunError
from manyhands.reporting.text import amount

OFF = 0.05  # of the peak that was measured
PLANNING_S = 1.0
STEPS = 3
PLENTY = 10**12
RUN = 0.6  # of the cases; others have a budget that is too small
Tell = Callable[[str], None]
MODELS = (
    ("resnet18", 224, 8),
    ("resnet34", 128, 8),
    ("resnet50", 160, 8),
    ("resnet101", 128, 4),
    ("resnet152", 96, 4),
    ("resnet18-cifar", 32, 64),
    ("vgg11", 128, 8),
    ("vgg16-bn", 128, 8),
    ("mobilenetv2", 192, 16),
    ("unet", 192, 4),
    ("unet-small", 256, 8),
    ("yolov2-16", 288, 4),
)


@dataclass(frozen=True, slots=True)
class Case:
    """`part`: where the budget lies between the smallest schedule (0) and keeping everything (1)."""

    model: str
    size: int
    batch: int
    part: float | None = None
    memory_bytes: int | None = None
    threads: int | None = None  # None: its part of the cores

    def __str__(self) -> str:
        return f"{self.model} at {self.size}, batch {self.batch}"


GIB = 1 << 30  # a board of 2 GB has two of these
# A ResNet-152 at 500x500 in the 2 GB of the paper on training on the edge, and large images on a small board.
HEADLINE = (
    Case("resnet152", 500, 8, memory_bytes=2 * GIB),
    # In one thread: with two, the smallest schedule needed 1.5 GB.
    Case("resnet50", 1500, 1, memory_bytes=int(1.3 * GIB), threads=1),
)


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    budget_bytes: int
    plain_bytes: int
    foreseen_bytes: int
    peak_bytes: int
    planning_s: float
    slowdown: float
    verdict: str  # "held", "refused" or what went wrong

    @property
    def error(self) -> float:
        return self.foreseen_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0

    @property
    def within(self) -> bool:
        return self.verdict == "refused" or (
            self.verdict == "held" and abs(self.error) <= OFF and self.planning_s < PLANNING_S
        )


def headline(only: str | None) -> list[Case]:
    return [case for case in HEADLINE if _is_meant(case.model, only, [case.model for case in HEADLINE])]


def random_cases(seed: int, only: str | None) -> Iterator[Case]:
    """Without end."""
    random = Random(seed)
    models = [each for each in MODELS if _is_meant(each[0], only, [model for model, *_ in MODELS])]
    while True:
        name, size, batch = random.choice(models)
        size = max(32, int(size * random.uniform(0.5, 1.0)) // 32 * 32)
        yield Case(name, size, random.randint(max(2, batch // 4), batch), random.uniform(-0.1, 1.0))


def _is_meant(model: str, only: str | None, models: list[str]) -> bool:
    if only is not None and only not in models:
        raise RequestError(f"--only {only}: there are cases of {', '.join(models)}.")
    return only in (None, model)


def run_until(count: int, seed: int, only: str | None, jobs: int, tell: Tell) -> tuple[Row, ...]:
    """Random cases until at least so many were not refused beforehand."""
    cases, rows = random_cases(seed, only), list[Row]()
    while (missing := count - sum(row.verdict != "refused" for row in rows)) > 0:
        rows += run(list(islice(cases, int(missing / RUN) + 1)), jobs, tell)
    return tuple(rows)


def run(cases: list[Case], jobs: int, tell: Tell) -> tuple[Row, ...]:
    """So many cases at a time, each on its part of the cores."""
    if reason := why_not():
        raise RequestError(f"{reason}.")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    tell(f"{jobs} of {len(cases)} at a time")
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda number: _row(cases[number], number, threads), range(len(cases))):
            rows.append(row)
            tell(f"{len(rows)} of {len(cases)} done, the last: {row.case}, {row.verdict}")
    return tuple(rows)


def _row(case: Case, number: int, threads: int) -> Row:
    """In a process of its own that has the budget and no more."""
    budget, least = case.memory_bytes, 0
    if budget is None:
        assert case.part is not None
        free = _trial(case, PLENTY, 1, threads)
        least, most = free["least_bytes"], free["plain_bytes"]
        budget = int(least + case.part * (most - least))
    with limited(f"budget-{number}", memory_bytes=budget) as group:
        try:
            found = _trial(case, budget, STEPS, threads, group.before)
        except RunError as error:
            verdict = "killed" if group.kills else str(error)
            return Row(str(case), budget, 0, 0, 0, 0.0, 0.0, verdict)
    if "refused" in found:
        verdict = "refused" if budget <= 1.02 * least else f"needlessly refused: {found['refused']}"
        return Row(str(case), budget, 0, 0, 0, 0.0, 0.0, verdict)
    verdict = "held" if found["peak_bytes"] <= budget else "above its budget"
    return Row(
        str(case),
        budget,
        found["plain_bytes"],
        found["foreseen_bytes"],
        found["peak_bytes"],
        found["planning_s"],
        min(found["seconds"]) / found["plain_s"],
        verdict,
    )


def _trial(case: Case, memory: int, steps: int, threads: int, before: tuple[str, ...] = ()) -> dict[str, Any]:
    channels = 1 if case.model == "demo" else 3
    asked = {
        "model": case.model,
        "shape": [channels, case.size, case.size],
        "batch": case.batch,
        "memory": memory,
        "steps": steps,
    }
    command = [*before, sys.executable, "-m", "manyhands.checkpointing.trial", json.dumps(asked)]
    environment = os.environ | {"OMP_NUM_THREADS": str(case.threads or threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        raise RunError(f"{case}: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"error": row.error, "within": row.within} for row in rows]


def table(rows: tuple[Row, ...]) -> Table:
    table = Table(title="Fitted models under limits that the kernel keeps")
    for heading in (
        "case",
        "plain",
        "budget",
        "foreseen",
        "measured",
        "error",
        "planned in",
        "time",
        "verdict",
    ):
        table.add_column(heading, justify="left" if heading in ("case", "verdict") else "right")
    for row in rows:
        sizes = row.plain_bytes, row.budget_bytes, row.foreseen_bytes, row.peak_bytes
        figures = (f"{row.error:+.1%}", f"{row.planning_s:.2f} s", f"x{row.slowdown:.2f}")
        ran = row.peak_bytes > 0
        shown = [amount(size) if size else "" for size in sizes]
        table.add_row(row.case, *shown, *(figures if ran else ("", "", "")), row.verdict)
    held = [row for row in rows if row.verdict == "held"]
    refused = sum(row.verdict == "refused" for row in rows)
    worst = max((abs(row.error) for row in held), default=0.0)
    table.caption = (
        f"{len(held)} held, {refused} refused beforehand, {len(rows) - len(held) - refused} failed; peaks "
        f"foreseen within {worst:.1%}. Time: of a step with its optimiser, over forward and backward of "
        "plain stages as measured one by one"
    )
    return table
