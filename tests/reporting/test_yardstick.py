"""How fast the devices of `bench peers` are: as a step by torch says."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.benches import peers
from manyhands.racing import Raced, RaceJob


def test_devices_are_as_fast_as_a_step_by_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.5 s for a device of 25 GFLOP/s; and it is a training step, in which weights and statistics change."""
    named, seen = list[str](), list[object]()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 8), torch.nn.BatchNorm2d(4))
    model.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))

    def load(name: str) -> torch.nn.Module:
        named.append(name)
        return model

    monkeypatch.setattr(peers, "load_model", load)
    operations, step = peers.yardstick()
    step()
    state = model.state_dict()
    assert operations == 25e9 * 3.5 and (named, seen) == (["resnet18"], [(8, 3, 224, 224)])
    assert state["1.num_batches_tracked"] == 1 and not torch.equal(state["1.weight"], torch.ones(4))


def test_a_device_is_as_fast_as_asked_for_with_its_part_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes 4.2 s instead of 3.5 has to be told that cores are slower than they seemed."""

    def race(emulation: Any, job: RaceJob) -> dict[str, Raced]:
        assert (job.model, job.batch, job.plans, job.peers) == ("resnet18", 8, (), (peers.ONE,))
        return {peers.ONE: Raced((1.0, 2.1, 9.0), {})}

    monkeypatch.setattr(peers, "race", race)
    monkeypatch.setattr(peers, "emulated", lambda *_: nullcontext(SimpleNamespace(dilation=2.0)))
    assert peers.part_speed(60e9, None, lambda _: None) == pytest.approx(50e9)
