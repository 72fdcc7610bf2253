"""What training a model on one device takes, before a board is bought: memory by time, time by memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table as View

from manyhands.checkpointing.fitting import SPARE, tidy, with_spare
from manyhands.checkpointing.lasting import later_bytes, result_bytes
from manyhands.checkpointing.measuring import measure
from manyhands.ir.schedule import Disk
from manyhands.loading import load_model
from manyhands.planning.checkpoints import Table, plain
from manyhands.reporting.text import amount
from manyhands.runtime.allocator import return_freed_memory
from manyhands.runtime.process import current_memory
from manyhands.runtime.recipes import recipe_for
from manyhands.tracing.stages import staged

FACTORS = (1.1, 1.2, 1.3, 1.5)
BOARDS = (512 * 10**6, 10**9, 2 * 10**9, 4 * 10**9)


@dataclass(frozen=True, slots=True)
class Row:
    """One batch size. Bytes are of the whole process, times relative to keeping everything."""

    batch: int
    plain_bytes: int
    plain_s: float
    by_factor: dict[float, int]
    least_bytes: int
    least_factor: float
    by_board: dict[int, float | None]  # None: it does not fit


Shapes = tuple[tuple[int, ...], ...]


def survey(name: str, shapes: Shapes, batch: int, disk: Disk | None = None) -> Row:
    """Every stage is run on this machine, one at a time; a schedule is put together from what they take."""
    tidy()  # of what was surveyed before
    model = load_model(name).train()
    images = [torch.randn(batch, *shape) for shape in shapes]
    cut = staged(model, images)
    recipes = [recipe_for(code) for code in cut.stages]
    tidy()
    chain, _ = measure(cut, recipes, images, model, 2, resident=True)
    return_freed_memory()
    base = current_memory() + later_bytes(model, None) + result_bytes(cut)
    everything = plain(chain)
    table = Table(chain, everything.peak_bytes, disk=disk)
    seconds = table.seconds
    quickest = float(min(everything.seconds, seconds.min()))
    least = table.least_bytes
    assert least is not None

    def within(num_bytes: int) -> float | None:
        found = table.plan(min(num_bytes, everything.peak_bytes))
        return None if found is None else found.seconds / quickest

    def smallest(factor: float) -> int:
        slots = int(np.flatnonzero(seconds <= factor * quickest)[0])
        return with_spare(base + table.bytes_of(slots))

    slowest = within(least)
    assert slowest is not None
    return Row(
        batch,
        with_spare(base + everything.peak_bytes),
        everything.seconds,
        {factor: smallest(factor) for factor in FACTORS},
        with_spare(base + least),
        slowest,
        {board: within(int(board * (1 - SPARE)) - base) for board in BOARDS},
    )


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def view(name: str, shapes: Shapes, rows: tuple[Row, ...], disk: Disk | None = None) -> View:
    sizes = ", ".join("x".join(map(str, shape)) for shape in shapes)
    table = View(title=f"{name}, images of {sizes}: memory of the whole process")
    table.add_column("batch", justify="right")
    table.add_column("plain", justify="right")
    for factor in FACTORS:
        table.add_column(f"x{factor} time", justify="right")
    table.add_column("smallest", justify="right")
    for board in BOARDS:
        table.add_column(f"in {amount(board).replace('.0', '')}", justify="right")
    for row in rows:
        boards = ("no" if f is None else "plain" if f < 1.005 else f"x{f:.2f}" for f in row.by_board.values())
        table.add_row(
            str(row.batch),
            amount(row.plain_bytes),
            *(amount(size) for size in row.by_factor.values()),
            f"{amount(row.least_bytes)} (x{row.least_factor:.2f})",
            *boards,
        )
    table.caption = (
        "Stages measured on this machine, one by one; schedules estimated from them. With this process, "
        "weights, gradients and the state of SGD with momentum. manyhands.fit tries a whole step."
    )
    if disk is not None:
        speeds = (f"{amount(int(speed))}/s" for speed in (disk.write_bytes_per_s, disk.read_bytes_per_s))
        table.caption += f" States may be on disk, which writes {' and reads '.join(speeds)} as measured."
    return table
