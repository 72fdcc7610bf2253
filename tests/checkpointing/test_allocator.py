"""What a process takes does not depend on what was computed in it before. Each in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import manyhands
from manyhands.checkpointing import fitting
from manyhands.checkpointing.fitted import Fit
from manyhands.checkpointing.fitting import less
from manyhands.ir.schedule import Chain, Mode, Stage
from manyhands.planning.checkpoints import Table, plain
from manyhands.runtime.allocator import KEEPING, fill_holes, keep_freed_memory, return_freed_memory
from manyhands.runtime.process import current_memory

MB = 1 << 20


def _apart(work: Callable[[], None]) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(work).result()


def test_large_blocks_go_back_once_holes_are_filled() -> None:
    _apart(_leave_holes)


def _leave_holes() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    blocks = [torch.ones(MB) for _ in range(40)]
    del blocks[3::5], blocks[2::4]
    return_freed_memory()
    assert _left_behind() > 8 * MB, "there are no holes to fill, so this test shows nothing"
    return_freed_memory()
    before = current_memory()
    assert fill_holes() > 16 * MB
    assert current_memory() < before + MB
    assert _left_behind() < MB


def _left_behind() -> int:
    before = current_memory()
    blocks = [torch.ones(MB) for _ in range(4)]
    del blocks
    return current_memory() - before


def test_the_smallest_budget_that_fit_names_is_enough_after_other_work() -> None:
    _apart(_fit_after_other_work)


def _fit_after_other_work() -> None:
    """A result as large as any state, which whoever calls the model holds, as its gradient is."""
    torch.manual_seed(0)
    wide = nn.Sequential(*(nn.Conv2d(96, 96, 3, padding=1) for _ in range(8)))
    images = torch.randn(16, 96, 32, 32)
    wide(images).square().mean().backward()
    wide.zero_grad()
    facts: Fit = manyhands.fit(wide, images, "64GB").fit  # type: ignore[assignment]
    least = int(1.01 * facts.least_bytes)  # what was imported meanwhile
    again: Fit = manyhands.fit(wide, images, least).fit  # type: ignore[assignment]
    assert 0.96 * least < again.foreseen_bytes <= least


def test_the_smallest_schedule_is_tried_before_giving_up() -> None:
    mode = Mode(frozenset({0, 1}), 0, 100, 100, 1.0, 1.0, 1.0, 1.0)
    stages = tuple(Stage(str(n), 1.0, 1.0, 100, 0, (mode,)) for n in range(4))
    chain = Chain((100,) * 5, (100,) * 5, stages, tuple(frozenset({n}) for n in range(5)))
    everything = plain(chain)
    table = Table(chain, 2 * everything.peak_bytes)
    least = table.least_bytes
    assert least is not None and least < everything.peak_bytes
    assert less(table, everything, 1) == everything.peak_bytes - 1
    assert less(table, everything, everything.peak_bytes) == least
    smallest = table.plan(least)
    assert smallest is not None and less(table, smallest, 1) < smallest.peak_bytes


def test_no_table_of_schedules_is_held_while_a_step_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as large as some tensors, and would be counted as the model's."""
    made: list[weakref.ref[Table]] = []
    alive: list[bool] = []

    class Noted(Table):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    step = fitting._Fitting._step

    def noted(self: Any, script: Any) -> tuple[float, int]:
        alive.append(any(table() is not None for table in made))
        return step(self, script)

    monkeypatch.setattr(fitting, "Table", Noted)
    monkeypatch.setattr(fitting._Fitting, "_step", noted)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)))
    gc.disable()
    try:
        manyhands.fit(model, torch.randn(2, 4, 32, 32), "8GB")
    finally:
        gc.enable()
    assert made and alive and not any(alive)


def test_where_freed_memory_is_kept_later_steps_have_room_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tried step that nearly took the whole budget is followed by one with less, and by a lower limit."""
    budget = 8_000_000_000
    peaks = iter((int(0.995 * budget), int(0.5 * budget)))
    monkeypatch.setattr(fitting._Fitting, "_step", lambda self, script: (1.0, next(peaks) - self.state_bytes))
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)))
    fitted: Any = manyhands.fit(model, torch.randn(2, 4, 32, 32), budget)
    assert fitted.fit.foreseen_bytes == int(0.5 * budget) and not list(peaks)
    unsteady = 0.99 * budget - fitted._how.script.room.limit_bytes
    assert unsteady >= 0.05 * (0.99 * budget - fitted.fit.plain_bytes)


PAGES = """
import ctypes, resource, sys
if "told" in sys.argv:
    from manyhands.runtime.allocator import keep_all_freed_memory
    assert keep_all_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    libc.memset(block, 1, 64 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("before", "told"), [(KEEPING, ()), ((), ("told",))])
def test_who_keeps_all_freed_memory_has_no_pages_made_anew(before: tuple[str, ...], told: tuple[str]) -> None:
    """Of blocks that glibc gives pages of their own, if nobody tells it otherwise."""

    def new_pages(*words: str) -> int:
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    python = (sys.executable, "-c", PAGES)
    size = os.sysconf("SC_PAGE_SIZE")
    assert new_pages(*before, *python, *told) < 100 < (64 << 20) // size <= new_pages(*python)
