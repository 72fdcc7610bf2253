"""A device that dies or freezes ends the run everywhere, soon, with its name, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from manyhands.errors import DeviceLost, RunError
from manyhands.ir.codec import encode
from manyhands.requests import Request
from manyhands.runtime.ranks import Event, launch
from manyhands.tasks import MeasureJob


def endless(num_devices: int, strategy: str) -> tuple[dict[str, object], tuple[str, ...]]:
    request = Request.read("demo", "1x28x28", 8, None, num_devices, strategy, None, None)
    plan = request.plan()
    return encode(MeasureJob("demo", request.inputs, plan, 100_000, 0)), plan.devices


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "manyhands.rank" in " ".join(p.cmdline())]


def rank_process(index: int) -> psutil.Process:
    return sorted(children(), key=lambda process: process.pid)[index]


@pytest.mark.parametrize("strategy", ["rows", "batch"])
def test_a_killed_device_is_named_and_nobody_is_left(strategy: str) -> None:
    job, devices = endless(3, strategy)
    killed_at: list[float] = []

    def on_event(device: str, event: Event) -> None:
        if device == "device-2" and event["event"] == "step" and not killed_at:
            killed_at.append(time.monotonic())
            rank_process(1).kill()

    with pytest.raises(DeviceLost, match=r"^device-1: its process was ended by SIGKILL"):
        launch("measure", job, devices, on_event)
    assert time.monotonic() - killed_at[0] < 10
    assert not children()


def test_a_frozen_device_is_named_within_the_deadline() -> None:
    job, devices = endless(3, "rows")
    frozen_at: list[float] = []

    def on_event(device: str, event: Event) -> None:
        if event["event"] == "step" and not frozen_at:
            frozen_at.append(time.monotonic())
            rank_process(0).send_signal(signal.SIGSTOP)

    with pytest.raises(DeviceLost, match="device-0: no answer within 3 s"):
        launch("measure", job, devices, on_event, timeout_s=3)
    assert time.monotonic() - frozen_at[0] < 13
    assert not children()


def test_a_device_that_raises_is_named_with_its_reason(tmp_path: Path) -> None:
    model = tmp_path / "net.py"
    model.write_text(
        "import os, torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.conv = nn.Conv2d(3, 4, 3); self.sick = Sick()\n"
        "    def forward(self, x): return self.sick(self.conv(x))\n"
        "class Sick(nn.Module):\n"
        "    def forward(self, x):\n"
        "        if isinstance(x, torch.fx.Proxy): raise ValueError('not to be seen through')\n"
        "        if not x.is_meta: raise ValueError('the sensor is gone')\n"
        "        return x\n"
        "def build(): return Net()\n"
    )
    request = Request.read(f"{model}:build", "3x8x8", 2, None, 2, "rows", None, None)
    job = encode(MeasureJob(request.model, request.inputs, request.plan(), 1, 0))
    with pytest.raises(RunError, match=r"^device-\d failed: ValueError: the sensor is gone$"):
        launch("measure", job, request.cluster.names)
    assert not children()


def test_processes_end_when_their_starter_is_killed() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-m", "manyhands.cli", "demo", "--steps", "100000"], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        ranks: list[psutil.Process] = []
        while len(ranks) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
            ranks = psutil.Process(starter.pid).children(recursive=True)
        assert len(ranks) == 4
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
    finally:
        starter.kill()
        starter.wait()
