"""Plans that were rehearsed among the devices are foreseen to take as long as they did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manyhands import measuring
from manyhands.ir.cluster import Trial
from manyhands.ir.profile import Line, Profile
from manyhands.planning.costs import Costs
from manyhands.planning.deciding import decide
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


def test_what_messages_take_longer_is_latency_and_not_a_stretch() -> None:
    """Of two plans with as much to compute, the one with more messages took longer by as many latencies."""
    graph = small_net()
    cluster = timed(graph, "ab", local("ab"), 1e-3, 2e-3)
    late = replace(cluster, latency_s=cluster.latency_s + 2e-3)
    plans = [lowered(graph, 2, name) for name in ("batch", "rows", "channels")]
    after = measuring._calibrated(cluster, graph, {each.plan: [seconds(each, late)] for each in plans})
    assert after.latency_s == pytest.approx(late.latency_s, rel=0.05)
    assert dict(after.profiles[0].stretches) == pytest.approx(
        {"batch": 1.0, "map": 1.0, "channels": 1.0}, rel=0.03
    )


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


def test_what_was_tried_decides_and_other_forecasts_need_to_promise_more() -> None:
    graph = small_net()
    cluster = timed(graph, "ab", local("ab"), 1.0, 2.0)
    foreseen = decide(graph, cluster).best
    slower = lowered(graph, 2, "rows").plan
    assert foreseen is not None and foreseen.plan != slower
    tried = Trial("rows", slower, 1.01 * foreseen.cost.seconds)
    with_rows = decide(graph, replace(cluster, trials=(tried,))).best
    assert with_rows is not None and with_rows.plan == slower
    long = replace(tried, seconds=foreseen.cost.seconds / 0.8)
    again = decide(graph, replace(cluster, trials=(long,))).best
    assert again is not None and again.plan == foreseen.plan
