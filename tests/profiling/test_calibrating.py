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


def test_every_axis_has_a_stretch_of_its_own() -> None:
    graph = small_net()
    cluster = timed(graph, "ab", local("ab"), 1.0, 2.0)
    plans = {name: lowered(graph, 2, name) for name in TOOK}
    before = {name: seconds(found, cluster) for name, found in plans.items()}
    took = {found.plan: [TOOK[name] * before[name]] * 3 for name, found in plans.items()}
    after = measuring._calibrated(cluster, graph, took)
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
    took = {found.plan: [10 * seconds(found, cluster)]}
    (stretch,) = measuring._calibrated(cluster, graph, took).profiles[0].stretches
    assert stretch == ("batch", measuring.MOST_STRETCHED)


def test_a_round_lasts_as_long_as_the_slowest_device_takes() -> None:
    graph = small_net()
    plans = tuple(lowered(graph, 2, name).plan for name in ("single", "batch"))

    def event(plan: int, together: bool, *seconds: float) -> dict[str, Any]:
        return {"event": "rehearsed", "plan": plan, "together": together, "seconds": seconds, "stepped": ()}

    said = {"a": [event(0, False, 9.0, 9.0), event(1, True, 1.0, 5.0)], "b": [event(1, True, 2.0, 3.0)]}
    assert measuring._slowest(said, plans, "seconds") == {plans[1]: [2.0, 5.0]}
    assert measuring._slowest(said, plans, "stepped") == {}
