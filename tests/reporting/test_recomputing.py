"""The race of schedules says when something was not reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.benches import recomputing
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
    (found,) = recomputing.run(("resnet18-cifar",), 1, False, lambda what: None)
    assert found.unreached == ("1%",) and not found.within
    ours = [point for point in found.points if point.who == OURS]
    peers = {point.what: point for point in found.points if point.who == THEIRS}
    assert len(ours) == len(peers) + 1 > 2
    for point in ours:
        peer = peers.get(point.what.removeprefix("as much as "))
        expected = (0.8, 99.0, None) if peer is None else (peer.memory, None, peer.time)
        assert (point.room, point.limit, point.rival) == expected
        assert point.exact and point.fits and 0 < point.memory < 1 and point.time > 0
