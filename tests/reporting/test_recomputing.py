"""The race of schedules says when something was not reached."""

from __future__ import annotations

from dataclasses import replace

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
