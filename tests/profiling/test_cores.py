"""How fast a busy core is: timed until it becomes no slower, and other cores really are busy meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from manyhands.ir.cluster import cores_here
from manyhands.profiling import device


@pytest.mark.parametrize(
    ("speeds", "found", "looks"),
    [
        ([100, 100, 100, 100, 7], 100, device.LEAST_LOOKS),
        ([120, 110, 100, 95, 94.9, 7], 94.9, 5),  # it settles with the fifth
        ([120, 110, 100, 90, 80, 70, 60, 7], 60, device.MOST_LOOKS),
    ],
)
def test_a_core_is_looked_at_until_it_becomes_no_slower(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], found: float, looks: int
) -> None:
    """All cores at once, which differ: their mean counts."""
    seen: list[float] = []
    turn, all_look = threading.Lock(), threading.Barrier(2)

    def look(make: object, seconds: float) -> device.Rounds:
        assert make is device._convolution
        all_look.wait(30)  # stands still for good unless both cores are looked at together
        with turn:
            speed = speeds[len(seen) // 2] * (0.9 if len(seen) % 2 else 1.1)
            seen.append(seconds)
        all_look.wait(30)
        return device.Rounds(flops=1000, seconds=(1000 / speed,))

    monkeypatch.setattr(device, "cores_here", lambda: 2)
    monkeypatch.setattr(device, "_one_core", look)
    threads = torch.get_num_threads()
    assert device.core_flops_per_s() == pytest.approx(found)
    assert seen == [device.LOOK_S] * 2 * looks and torch.get_num_threads() == threads


def test_the_speed_of_a_core_is_that_of_the_work_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LOOK_S", 0.05)
    monkeypatch.setattr(device, "cores_here", lambda: 1)

    def make() -> device.Work:
        return 1_000_000, lambda: sum(range(20_000))

    took = min(device.timed(make()[1], time.thread_time) for _ in range(20))
    assert device.core_flops_per_s(make) == pytest.approx(1_000_000 / took, rel=0.6)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu.max": "10000 100000"}, 1),
        ({}, 64),
    ],
)
def test_a_container_has_as_many_cores_as_its_time_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    """In both versions of control groups."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores_here(tmp_path) == cores


def test_cores_are_busy_meanwhile_and_not_afterwards() -> None:
    threads = torch.get_num_threads()
    with device.busy(1):
        spent = -time.process_time()
        time.sleep(1.0)
        spent += time.process_time()
    assert spent > 0.2  # of a machine that others use, too
    idle = -time.process_time()
    time.sleep(0.3)
    assert idle + time.process_time() < 0.1 and torch.get_num_threads() == threads


def test_who_is_stopped_while_cores_become_busy_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(device.ThreadPoolExecutor):
        def submit(self, *given: object, **named: object) -> None:  # type: ignore[override]
            super().submit(*given, **named)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    monkeypatch.setattr(device, "ThreadPoolExecutor", Stopped)
    ended = threading.Event()

    def begin() -> None:
        with pytest.raises(KeyboardInterrupt), device.busy(2):
            pytest.fail("it began")
        ended.set()

    threading.Thread(target=begin, daemon=True).start()
    assert ended.wait(30)
