"""How late emulated devices are for each other: whoever has used up its part of a core stands still until the
next period, and so does everybody who waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import mean

import torch
import torch.distributed as dist

from manyhands.emulation.devices import Emulation
from manyhands.emulation.network import PLUG
from manyhands.runtime.ranks import launch, say
from manyhands.runtime.transport import Gloo

WORKS_S = (2e-3, 8e-3)  # of the fastest device between two exchanges, as between statistics of a network
ROUNDS = 40


def keep_pace(gloo: Gloo, speeds: Mapping[str, float]) -> None:
    """Compute and tell everybody, again and again; say how long a round takes, and how much it computes."""
    others, note, tag = [device for device in gloo.ranks if device != gloo.device], torch.zeros(128), 0
    for work_s in WORKS_S:
        dist.barrier()
        began, computed = time.perf_counter(), time.process_time()
        for _ in range(ROUNDS):
            tag += 1
            coming = [gloo.expect(torch.empty_like(note), other, tag) for other in others]
            _work(work_s * speeds[gloo.device])
            for other in others:
                gloo.send(note, other, tag)
            for pending in coming:
                pending.wait()
            gloo.flush()
        seconds, used_s = time.perf_counter() - began, time.process_time() - computed
        say("paced", seconds=seconds / ROUNDS, used_s=used_s / ROUNDS)


def _work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def lateness_s(emulation: Emulation, names: tuple[str, ...]) -> float:
    """How much longer than the busiest of these devices computes a round takes in which all wait for all."""
    cores = {name: emulation.cores[name] for name in names}
    if len(names) < 2:
        return 0.0
    speeds = {name: cores[name] / max(cores.values()) for name in names}
    said = launch("pace", speeds, names, within=emulation.within, interface=PLUG)
    paced = {name: [event for event in said[name] if event["event"] == "paced"] for name in names}
    waits = [
        min(paced[name][number]["seconds"] - paced[name][number]["used_s"] / cores[name] for name in names)
        for number in range(len(WORKS_S))
    ]
    return max(mean(waits), 0.0)
