"""The programs on paper: what overlaps, what is shared, and what measured times make of a plan."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.ir.cluster import Cluster, Device, Link
from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Axis, Cut, Layout, Tile
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan, Segment
from manyhands.ir.profile import Factor, Line, Profile, Timing, kind_of
from manyhands.planning.costs import Costs
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.simulation import Event, _Port, simulate
from tests.planning.plans import lowered, small_net, two_convs


def timed(graph: Graph, names: str, cluster: Cluster, forward_s: float, backward_s: float) -> Cluster:
    """The cluster with profiles: every layer takes as long, whole or not, and other steps take no time."""
    kinds = {kind_of(layer, flag) for layer in graph.layers for flag in (False, True)}
    flat = tuple((axis, (Factor(0.01, 1.0, 1.0),)) for axis in ("batch", "channels", "map"))
    timings = tuple(Timing(kind, graph.layers[0].shape[0], forward_s, backward_s, flat) for kind in kinds)
    profiles = tuple(Profile(name, 1, False, 0, timings, ()) for name in names)
    return replace(cluster, profiles=profiles)


def local(names: str, bytes_per_s: float = 1e12, latency_s: float = 0.0, **others: object) -> Cluster:
    return Cluster(tuple(Device(name) for name in names), bytes_per_s, latency_s, **others)  # type: ignore[arg-type]


def seconds(found: Lowered, cluster: Cluster) -> float:
    return simulate(found, cluster).cost.seconds


def test_one_device_takes_the_sum_of_its_layers() -> None:
    graph = small_net()
    cluster = timed(graph, "a", local("a"), 1.0, 2.0)
    assert seconds(lowered(graph, 1, "single"), cluster) == pytest.approx(7 * 3.0)


@pytest.mark.parametrize("cores,stretch", [(4, 1.0), (3, 1.0), (2, 1.5), (1, 3.0)])
def test_devices_that_compute_at_once_share_the_cores(cores: int, stretch: float) -> None:
    graph = small_net(6)
    found = lowered(graph, 3, "rows")
    free = timed(graph, "abc", local("abc"), 1.0, 2.0)
    assert seconds(found, replace(free, cores=cores)) == pytest.approx(
        stretch * seconds(found, free), rel=1e-3
    )


def test_one_busy_device_is_not_slowed_by_idle_ones() -> None:
    graph = small_net()
    found = lowered(graph, 3, "single")
    free = timed(graph, "abc", local("abc"), 1.0, 2.0)
    assert seconds(found, replace(free, cores=1)) == pytest.approx(seconds(found, free))


def test_messages_of_a_shared_medium_go_one_after_another() -> None:
    """Both devices send 48 bytes after the first layer: 0.48 s each, at once or one after the other."""
    graph = two_convs()
    found = lowered(graph, 2, "rows")
    alone = timed(graph, "ab", local("ab", 100.0), 1.0, 1.0)
    shared = simulate(found, replace(alone, shared_bytes_per_s=100.0))
    assert shared.cost.seconds >= shared.cost.traffic_bytes / 100.0
    for timeline, starts in ((simulate(found, alone), (1.48, 1.48)), (shared, (1.48, 1.96))):
        second = [
            next(e for e in timeline.events if e.device == d and e.stop_s >= e.start_s + 1 > 2) for d in "ab"
        ]
        assert sorted(event.start_s for event in second) == pytest.approx(starts)


def test_messages_of_several_to_one_come_in_no_faster_than_one_by_one() -> None:
    """Three devices send 96 bytes to the first after a layer of one second: 0.96 s alone, 2.88 s together."""
    graph = two_convs()
    rows = Layout(tuple("abcd"), (Cut(Axis.ROWS, 4),), (1, 1, 1, 1))
    segments = Segment(("one",), rows), Segment(("two",), Layout(("a",), (), (1,)))
    found = lower(graph, Plan(graph_digest(graph), 1, tuple("abcd"), segments))
    own = timed(graph, "abcd", local("abcd", 100.0), 1.0, 1.0)
    for cluster, begins in ((own, 3.88), (replace(own, cores=4), 1.96)):  # on one machine, cores are shared
        events = [e for e in simulate(found, cluster).events if e.device == "a" and e.stop_s - e.start_s == 1]
        assert events[1].start_s == pytest.approx(begins)
    slow = tuple(Link(source, "a", 10.0, 0.0) for source in "bcd")
    wide = replace(own, bytes_per_s=1e4, links=slow[:2])  # d is fast, so a's own link is
    events = [e for e in simulate(found, wide).events if e.device == "a" and e.stop_s - e.start_s == 1]
    assert events[1].start_s == pytest.approx(1 + 9.6)


def test_no_step_of_a_device_overlaps_another_of_its_own() -> None:
    graph = small_net(6)
    cluster = timed(graph, "abc", local("abc", 1e4, 0.1, cores=2, shared_bytes_per_s=2e4), 1.0, 2.0)
    events: dict[str, list[Event]] = {}
    for event in simulate(lowered(graph, 3, "rows"), cluster).events:
        events.setdefault(event.device, []).append(event)
    for own in events.values():
        assert all(a.stop_s <= b.start_s + 1e-9 for a, b in zip(own, own[1:], strict=False))
        assert all(event.start_s <= event.stop_s for event in own)


def test_a_step_is_not_over_before_everything_has_left() -> None:
    """The last messages are the new weights; at one byte a second they decide."""
    graph = two_convs()
    found = lowered(graph, 2, "rows")
    cluster = timed(graph, "ab", local("ab", 1.0), 0.0, 0.0)
    sent = max(sum(bucket.num_bytes(owner) for bucket in found.buckets) for owner in "ab")
    assert seconds(found, cluster) >= 2 * sent


speeds = st.floats(1e3, 1e9)


@settings(deadline=None)
@given(
    strategy=st.sampled_from(["rows", "batch", "channels", "columns"]),
    rate=speeds,
    factor=st.floats(1.0, 100.0),
    latency_s=st.floats(0, 1e-2),
    layer_s=st.floats(1e-4, 1.0),
)
def test_faster_parts_never_make_a_step_slower(
    strategy: str, rate: float, factor: float, latency_s: float, layer_s: float
) -> None:
    graph = small_net(6)
    found = lowered(graph, 3, strategy)
    given = timed(graph, "abc", local("abc", rate, latency_s), layer_s, 2 * layer_s)
    before = seconds(found, given)
    assert seconds(found, replace(given, bytes_per_s=rate * factor)) <= before * (1 + 1e-9)
    assert seconds(found, replace(given, latency_s=latency_s / factor)) <= before * (1 + 1e-9)
    faster = timed(graph, "abc", given, layer_s / factor, 2 * layer_s / factor)
    assert seconds(found, faster) <= before * (1 + 1e-9)


# ---- costs from a profile --------------------------------------------------------------------------------

CURVE = (Factor(0.25, 0.4, 0.3), Factor(0.5, 0.6, 0.5))


def costs(*factors: tuple[str, tuple[Factor, ...]], lines: tuple[Line, ...] = ()) -> Costs:
    layer = two_convs().layers[1]
    profile = Profile("a", 1, False, 0, (Timing(kind_of(layer), 1, 10.0, 20.0, factors),), lines)
    return Costs(replace(local("a"), profiles=(profile,)))


@pytest.mark.parametrize(
    "rows,forward_s,backward_s",
    [
        (8, 10.0, 20.0),
        (4, 6.0, 10.0),
        (2, 4.0, 6.0),
        (3, 5.0, 8.0),  # between two that were measured: on the line
        (6, 8.0, 15.0),
        (1, 3.0, 4.0),  # below the smallest: on with its line
        (0, 0.0, 0.0),
    ],
)
def test_time_of_a_tile_is_read_off_the_curve(rows: int, forward_s: float, backward_s: float) -> None:
    layer = two_convs().layers[1]
    tile = Tile.parse(f"0:1,0:3,0:{rows},0:4")
    assert costs(("map", CURVE)).layer("a", layer, tile) == pytest.approx((forward_s, backward_s))


def test_an_axis_that_was_not_measured_counts_in_proportion() -> None:
    layer = two_convs().layers[1]
    assert costs().layer("a", layer, Tile.parse("0:1,0:3,0:2,0:4")) == pytest.approx((2.5, 5.0))
    assert costs(("map", CURVE)).layer("a", layer, Tile.parse("0:1,0:1,0:4,0:4")) == pytest.approx(
        (2.0, 10 / 3)
    )


def test_a_step_is_found_by_its_full_name_and_else_by_its_verb() -> None:
    known = costs(lines=(Line("send", 1.0, 0.5), Line("send value", 2.0, 0.0)))
    assert known.step("a", "send value", 10) == 2.0
    assert known.step("a", "send sums", 10) == 6.0


def test_what_comes_in_is_through_as_by_definition() -> None:
    """For any order of taking: the latest of t plus all that began since t."""
    random = Random(1)
    for _ in range(20):
        port, taken = _Port(), list[tuple[float, float]]()
        for _ in range(random.choice((3, 70, 150))):
            taken.append((random.choice((random.random(), 0.5)), random.random() / 10))
            expected = max(t + sum(s for began, s in taken if began >= t) for t, _ in taken)
            assert port.take(*taken[-1]) == pytest.approx(expected)
