"""Plans that were rehearsed among the devices are foreseen to take as long as they did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manyhands import measuring
from manyhands.ir.profile import Line, Profile
from manyhands.planning.costs import Costs
from tests.planning.plans import lowered, small_net
from tests.planning.test_simulation import local, seconds, timed

TOOK = {"batch": 1.3, "rows": 1.05, "channels": 0.9}  # times as long as by the clock of each thread


def test_every_axis_has_a_stretch_of_its_own() -> None:
    graph = small_net()
    cluster = timed(graph, "ab", local("ab"), 1.0, 2.0)
    plans = {name: lowered(graph, 2, name) for name in TOOK}
    before = {name: seconds(found, cluster) for name, found in plans.items()}
    took = {found.plan: [TOOK[name] * before[name]] * 3 for name, found in plans.items()}
    after = measuring._calibrated(cluster, graph, took)
    for name, found in plans.items():
        assert seconds(found, after) == pytest.approx(TOOK[name] * before[name], rel=0.03)
    assert dict(after.profiles[0].stretches).keys() == {"batch", "map", "channels"}
    whole = graph.layers[1]
    tile = lowered(graph, 1, "single").territory("a").computed[whole.name]
    assert Costs(after).layer("a", whole, tile) == Costs(cluster).layer("a", whole, tile) == (1.0, 2.0)


@pytest.mark.parametrize(
    "factor,limit", [(10, measuring.MOST_STRETCHED), (0.1, 1 / measuring.MOST_STRETCHED)]
)
def test_a_disturbed_rehearsal_does_not_count_in_full(factor: float, limit: float) -> None:
    graph = small_net()
    cluster = timed(graph, "ab", local("ab"), 1.0, 2.0)
    found = lowered(graph, 2, "batch")
    took = {found.plan: [factor * seconds(found, cluster)]}
    (stretch,) = measuring._calibrated(cluster, graph, took).profiles[0].stretches
    assert stretch == ("batch", limit)


def test_messages_take_the_mean_of_all_axes() -> None:
    lines = (Line("send", 1.0, 0.0), Line("place", 1.0, 0.0))
    profile = Profile("a", 1, False, 0, (), lines, (("batch", 1.5), ("map", 1.1)))
    costs = Costs(replace(local("a"), profiles=(profile,)))
    assert costs.step("a", "send value", 8) == pytest.approx(1.3)
    assert costs.step("a", "place", 8) == 1.0


def test_a_round_lasts_as_long_as_the_slowest_device_takes() -> None:
    graph = small_net()
    plans = tuple(lowered(graph, 2, name).plan for name in ("single", "batch"))

    def event(name: str, plan: int, *seconds: float) -> dict[str, Any]:
        return {"event": name, "plan": plan, "seconds": seconds}

    said = {"a": [event("step", 1, 1.0, 5.0), event("other", 0, 9.0)], "b": [event("step", 1, 2.0, 3.0)]}
    assert measuring.slowest(said, "step", plans) == {plans[1]: [2.0, 5.0]}
    assert measuring.slowest({"b": said["b"]}, "other", plans) == {}
