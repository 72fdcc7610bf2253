"""Plans that were rehearsed among the devices are foreseen to take as long as they did."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands import measuring
from manyhands.planning.costs import Costs
from tests.planning.plans import lowered, small_net
from tests.planning.test_simulation import local, seconds, timed

TOOK = {"batch": 1.3, "rows": 1.05, "channels": 0.9}  # times as long as by the clock of each thread
AXES = {"batch": "batch", "rows": "map", "channels": "channels"}


def said_of(foreseen: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
    """What two devices said of the plans; they waited for each other, so one of them is not slower."""
    events = [
        {"event": "rehearsed", "plan": number, "together": True, "seconds": [TOOK[name] * time] * 3}
        for number, (name, time) in enumerate(foreseen.items())
    ]
    return {"a": events, "b": [event | {"seconds": [0.1] * 3} for event in events]}


def test_every_axis_has_a_stretch_of_its_own() -> None:
    graph = small_net()
    cluster = timed(graph, "ab", local("ab"), 1.0, 2.0)
    plans = {name: lowered(graph, 2, name) for name in TOOK}
    before = {name: seconds(found, cluster) for name, found in plans.items()}
    given = tuple(found.plan for found in plans.values())
    after = measuring._calibrated(cluster, graph, given, said_of(before))
    for name, found in plans.items():
        assert seconds(found, after) == pytest.approx(TOOK[name] * before[name], rel=0.03)
    assert dict(after.profiles[0].stretches).keys() == set(AXES.values())
    whole = graph.layers[1]
    tile = lowered(graph, 1, "single").territory("a").computed[whole.name]
    assert Costs(after).layer("a", whole, tile) == Costs(cluster).layer("a", whole, tile) == (1.0, 2.0)


def test_a_disturbed_rehearsal_does_not_count_in_full() -> None:
    graph = small_net()
    cluster = timed(graph, "ab", local("ab"), 1.0, 2.0)
    found = lowered(graph, 2, "batch")
    said = said_of({"batch": 10 * seconds(found, cluster)})
    (stretch,) = measuring._calibrated(cluster, graph, (found.plan,), said).profiles[0].stretches
    assert stretch == ("batch", measuring.MOST_STRETCHED)
