"""The race of schedules says when something was not reached."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands import RequestError
from manyhands.benches import recomputing, rotor
from manyhands.benches.recomputing import OURS, THEIRS, Point, Result

REACHED = Point(OURS, "as much as 3 segments", 0.40, 1.10, exact=True, room=0.41, rival=1.12)
PEER = Point(THEIRS, "3 segments", 0.41, 1.12, exact=False)


def test_a_race_is_won_only_if_nothing_is_above_its_bound() -> None:
    won = Result("resnet18", 1, 1.0, (REACHED, PEER), ())
    assert won.within
    lost = (
        replace(REACHED, memory=0.42),
        replace(REACHED, time=1.13),
        replace(REACHED, exact=False),
        replace(REACHED, limit=1.05),
    )
    assert not any(replace(won, points=(point, PEER)).within for point in lost)
    assert not replace(won, unreached=("as much as 9 segments",)).within


def test_a_small_race_has_a_rival_for_every_peer_and_tells_what_no_schedule_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputing, "SIZE", 32)
    monkeypatch.setattr(recomputing, "TARGETS", {"resnet18-cifar": ((0.8, 99.0), (0.01, 99.0))})
    (found,) = recomputing.run(("resnet18-cifar",), 1, False, None, lambda what: None)
    assert found.unreached == ("1%",) and not found.within
    ours = [point for point in found.points if point.who == OURS]
    peers = {point.what: point for point in found.points if point.who == THEIRS}
    assert len(ours) == len(peers) + 1 > 2
    for point in ours:
        peer = peers.get(point.what.removeprefix(f"as much as {THEIRS} "))
        expected = (0.8, 99.0, None) if peer is None else (peer.memory, None, peer.time)
        assert (point.room, point.limit, point.rival) == expected
        assert point.exact and point.fits and 0 < point.memory < 1 and point.time > 0


# rotor's interface as far as the race uses it: a schedule is its limit, and below 0.33 there is none.
INTERFACE = """
import torch

class memory:
    class MemSize(int):
        pass

    class MeasureMemory:
        pass

class Checkpointable(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.used = model, []

    def measure(self, images):
        _, self.kept, self.most = memory.MeasureMemory().measure(self.model, images)

    def compute_pytorch_sequence(self):
        self.sequence = self.most

    def get_expected_memory(self):
        return self.sequence

    def compute_sequence(self, limit):
        if limit < 0.33 * self.most:
            raise ValueError("Can not process this chain")
        self.sequence = limit

    def forward(self, images):
        Checkpointable.used.append(self.sequence)
        return self.model(images)

Checkpointable.used = []
"""


def test_rotor_is_raced_in_every_memory_that_it_can_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rotor.py").write_text(INTERFACE)
    monkeypatch.delitem(sys.modules, "rotor", raising=False)
    parts = nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 3)), nn.ReLU())
    found = dict(rotor.steps(rotor.imported(tmp_path), parts, torch.randn(1, 1, 64, 64)))
    assert list(found) == ["in 80%", "in 60%", "in 45%", "in 35%", "in 33%"]
    for step in reversed(found.values()):
        step()
    used = sys.modules.pop("rotor").Checkpointable.used
    most = 2 * 62 * 62 * 4  # bytes of both results, which it was told
    assert used[1:] == [int(part * most) for part in (0.35, 0.45, 0.6, 0.8)]
    assert 0.33 <= used[0] / most <= 0.34


def test_another_rotor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rotor", raising=False)
    with pytest.raises(RequestError, match="No module named 'rotor'"):
        recomputing.run((), 1, False, tmp_path, lambda what: None)
    (tmp_path / "rotor.py").write_text("")
    with pytest.raises(RequestError, match="so it is not INRIA's"):
        rotor.imported(tmp_path)
    sys.modules.pop("rotor")
