"""Large patient messages go over connections of their own, and wait for others where they are sorted."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

DEVICES = ("a", "b")


def priorities() -> list[int]:
    """Of every connection of this process over the network."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
        except OSError:  # the listing itself
            continue
        with socket.socket(fileno=os.dup(int(name))) as same:
            if same.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                same.getpeername()
            except OSError:  # it listens
                continue
            found.append(same.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
    return sorted(found)


def join(rank: int, store: str, results: multiprocessing.Queue[tuple[list[int], list[int], int]]) -> None:
    import torch
    import torch.distributed as dist

    from manyhands.runtime.transport import Gloo

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    before = priorities()
    gloo = Gloo(DEVICES[rank], DEVICES, 30.0)
    after, other = priorities(), DEVICES[1 - rank]
    received = torch.zeros(1, dtype=torch.int64)
    pending = gloo.expect(received, other, 7, patient=True)
    gloo.send(torch.tensor([rank + 10]), other, 7, patient=True)
    pending.wait()
    gloo.flush()
    results.put((before, after, int(received)))
    dist.barrier()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of connections are a thing of Linux")
def test_patient_connections_let_others_pass(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    store = str(tmp_path / "store")
    processes = [spawn.Process(target=join, args=(rank, store, results), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    told = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(received for *_, received in told) == [10, 11]
    for before, after, _ in told:
        assert before and set(before) == {0}
        assert after == [*before, 2], "one more, to the other device; the usual ones are as they were"


def play(rank: int, store: str, delay_s: float, results: multiprocessing.Queue[float]) -> None:
    """Some messages there, and as many back when all have come: how long that takes, the best of three."""
    import torch
    import torch.distributed as dist

    from manyhands.ir.cluster import DELAY
    from manyhands.runtime.transport import Gloo

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", DELAY: str(delay_s)}
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    gloo, other = Gloo(DEVICES[rank], DEVICES, 30.0), DEVICES[1 - rank]
    taken = []
    for _ in range(3):
        received = [torch.zeros(1, dtype=torch.int64) for _ in range(10)]
        pending = [gloo.expect(buffer, other, tag) for tag, buffer in enumerate(received)]
        dist.barrier()
        start = time.perf_counter()
        for turn in (0, 1):
            if rank == turn:
                for tag in range(10):
                    gloo.send(torch.tensor([100 * rank + tag]), other, tag)
            else:
                for each in pending:
                    each.wait()
        taken.append(time.perf_counter() - start)
        gloo.flush()
        assert [int(value) for value in received] == [100 * (1 - rank) + tag for tag in range(10)]
    if rank == 0:
        results.put(min(taken))
    dist.barrier()


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_messages_are_held_back_together_and_not_one_after_another(tmp_path: Path, delay_s: float) -> None:
    spawn = multiprocessing.get_context("spawn")
    results, store = spawn.Queue(), str(tmp_path / "store")
    processes = [spawn.Process(target=play, args=(r, store, delay_s, results), daemon=True) for r in (0, 1)]
    for process in processes:
        process.start()
    taken = results.get(timeout=60)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert 2 * delay_s <= taken < 2 * delay_s + 0.15, "there and back"
