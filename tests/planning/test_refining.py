"""Plans changed a little: what must hold of any of them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from manyhands.ir.cluster import Trial
from manyhands.ir.geometry import Axis, Cut, Layout
from manyhands.ir.plan import LEAST_IN_FLIGHT, Segment
from manyhands.planning.choosing import Chooser
from manyhands.planning.deciding import Option, decide
from manyhands.planning.lowering import lower
from manyhands.planning.refining import Segments, refined
from tests.planning.random_graphs import random_graph
from tests.planning.test_search import unequal

PLENTY = 10**6
ALONE = tuple(Layout((device,), (), (1,)) for device in ("a", "b"))
HALVES = Layout(("a", "b"), (Cut(Axis.ROWS, 2),), (1, 1))


def work(segments: Segments, speed: dict[str, float]) -> float:
    """Seconds if a layer is a unit of work, nothing travels, and a segment waits for its slowest device."""
    total = 0.0
    for segment in segments:
        layout = segment.layout
        parts = (share / sum(layout.shares) for share in layout.shares)
        total += max(len(segment.layers) * p / speed[d] for d, p in zip(layout.devices, parts, strict=True))
    return total


def any_fits(segments: Segments) -> bool:
    return True


def itself(segments: Segments) -> Segments:
    """Nothing is like anything else."""
    return segments


@pytest.mark.parametrize("fast", (1.0, 2.0, 3.0, 7.0))
def test_shares_come_to_what_devices_can_do(fast: float) -> None:
    found = refined(
        [(Segment(("x", "y"), HALVES),)],
        (HALVES,),
        lambda segments: work(segments, {"a": fast, "b": 1}),
        any_fits,
        itself,
        PLENTY,
    )
    assert work(found, {"a": fast, "b": 1}) == pytest.approx(2 / (fast + 1), rel=0.02)


def test_segments_are_split_joined_and_given_other_layouts() -> None:
    """Here x and y are done by one device each and z by both, which takes all three kinds of change."""
    wanted = {"x": ALONE[0], "y": ALONE[1], "z": HALVES}

    def wrong(segments: Segments) -> float:
        misplaced = sum(segment.layout != wanted[name] for segment in segments for name in segment.layers)
        return misplaced + len(segments) / 100

    for start in ((("x", "y", "z"),), (("x", "y"), ("z",)), (("x",), ("y",), ("z",))):
        halves = tuple(Segment(names, HALVES) for names in start)
        found = refined([halves], (*ALONE, HALVES), wrong, any_fits, itself, PLENTY)
        assert [(s.layers, s.layout) for s in found] == [((name,), wanted[name]) for name in "xyz"]
    apart = tuple(Segment((name,), HALVES) for name in "xyz")
    joined = refined([apart], (*ALONE, HALVES), len, any_fits, itself, PLENTY)
    assert [segment.layers for segment in joined] == [("x", "y", "z")]


def test_what_does_not_fit_is_not_taken() -> None:
    """The fast device has room for half of each layer."""
    found = refined(
        [(Segment(("x", "y"), HALVES),)],
        (*ALONE, HALVES),
        lambda segments: work(segments, {"a": 4, "b": 1}),
        lambda segments: all(2 * s.layout.shares[0] <= sum(s.layout.shares) for s in segments),
        itself,
        PLENTY,
    )
    assert all(2 * s.layout.shares[0] <= sum(s.layout.shares) for s in found)


def test_it_ends_after_so_many_tries() -> None:
    seen: list[Segments] = []

    def seconds(segments: Segments) -> float:
        seen.append(segments)
        return -len(seen)  # whatever comes next is better

    refined([(Segment(("x", "y"), HALVES),)], (*ALONE, HALVES), seconds, any_fits, itself, 25)
    assert len(seen) == len(set(seen)) == 25


def test_of_what_is_alike_one_is_tried() -> None:
    """Shares of four rows: most changes of them change nothing."""
    tried: list[Hashable] = []

    def rows(segments: Segments) -> Hashable:
        return tuple((s.layers, tuple(s.layout.tiles((1, 1, 4, 1)).items())) for s in segments)

    def seconds(segments: Segments) -> float:
        tried.append(rows(segments))
        return work(segments, {"a": 1, "b": 1})

    refined([(Segment(("x", "y"), HALVES),)], (HALVES,), seconds, any_fits, rows, PLENTY)
    assert len(tried) == len(set(tried)) == 3  # of four rows the first device has one, two or three


def test_the_best_that_comes_of_any_start_is_taken() -> None:
    """Alone no change helps the first; the second leads to what is best."""
    stuck, led = (Segment(("x",), ALONE[0]),), (Segment(("x",), HALVES),)

    def seconds(segments: Segments) -> float:
        first = segments[0].layout.shares[0] / sum(segments[0].layout.shares)
        return 1.0 if segments == stuck else 2.0 - 1.5 * first

    for starts in ([stuck, led], [led, stuck]):
        (best,) = refined(starts, (), seconds, any_fits, itself, PLENTY)
        assert best.layout.devices == ("a", "b") and best.layout.shares[0] > 9 * best.layout.shares[1]
    assert refined([stuck], (), seconds, any_fits, itself, PLENTY) == stuck


def test_a_layout_that_is_better_only_with_other_shares_is_found() -> None:
    """Who has y should have most of x: to change either alone is worse, and their roles cannot be changed."""
    start = (Segment(("x",), replace(HALVES, shares=(240, 720))), Segment(("y",), ALONE[1]))
    swapped = (Segment(("x",), replace(HALVES, shares=(720, 240))), Segment(("y",), ALONE[0]))

    def seconds(segments: Segments) -> float:
        if len(segments) != 2 or not segments[0].layout.cuts or segments[1].layout.cuts:
            return 9.0
        first = segments[0].layout.shares[0] / sum(segments[0].layout.shares)
        return 1.0 + abs(first - 0.625) if segments[1].layout == ALONE[0] else 1.2 + abs(first - 0.25)

    x, y = refined([start], ALONE, seconds, lambda segments: segments != swapped, itself, PLENTY)
    assert y.layout == ALONE[0] and x.layout.shares == (600, 360)


def test_devices_change_their_roles() -> None:
    """Only together: who has most of x has y; anything else is far worse."""
    start = (Segment(("x",), replace(HALVES, shares=(640, 320))), Segment(("y",), ALONE[0]))
    swapped = (Segment(("x",), replace(HALVES, shares=(320, 640))), Segment(("y",), ALONE[1]))

    def seconds(segments: Segments) -> float:
        return 1.0 if segments == swapped else 2.0 if segments == start else 9.0

    assert refined([start], (), seconds, any_fits, itself, PLENTY) == swapped


def test_who_takes_part_in_some_segments_only_may_change_roles_too() -> None:
    outside = replace(HALVES, devices=("c", "b"))
    start = (Segment(("x",), HALVES), Segment(("y",), Layout(("c",), (), (1,))))
    swapped = (Segment(("x",), outside), Segment(("y",), ALONE[0]))

    def seconds(segments: Segments) -> float:
        return 1.0 if segments == swapped else 2.0 if segments == start else 9.0

    assert refined([start], (), seconds, any_fits, itself, PLENTY) == swapped


def test_every_start_has_its_part_of_the_tries() -> None:
    """Of the first one change after another is better; the second is best, and is not forgotten."""
    endless, good = (Segment(("x", "y"), HALVES),), (Segment(("x", "y"), ALONE[1]),)
    count = itertools.count()

    def seconds(segments: Segments) -> float:
        return -1.0 if segments == good else 1.0 - 1e-6 * next(count)

    assert refined([endless, good], (), seconds, any_fits, itself, 10) == good


def test_an_end_is_moved() -> None:
    """To where x alone is whole; neither joining nor splitting leads there."""
    start = (Segment(("x", "y"), ALONE[0]), Segment(("z",), HALVES))

    def seconds(segments: Segments) -> float:
        wanted = [(("x",), ALONE[0]), (("y", "z"), HALVES)]
        return (
            1.0 if [(s.layers, s.layout) for s in segments] == wanted else 2.0 if segments == start else 9.0
        )

    assert [s.layers for s in refined([start], (), seconds, any_fits, itself, PLENTY)] == [("x",), ("y", "z")]


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_has_every_layer_once_and_its_devices(seed: int) -> None:
    random = Random(seed)
    graph, cluster = random_graph(random, 2), unequal(random, 3)
    assert Chooser(graph, cluster).thorough
    best = decide(graph, cluster).best
    assert best is not None
    layers = [name for segment in best.plan.segments for name in segment.layers]
    assert layers == [layer.name for layer in graph.layers if layer.name != "x"]
    assert {device for s in best.plan.segments for device in s.layout.devices} == set(best.plan.devices)


@pytest.mark.parametrize("seed", (1, 3, 6))
def test_a_required_device_has_something_to_compute_however_slow_it_is(seed: int) -> None:
    """Where rows are cut of what has none, as behind a flatten, the first device has it all."""
    random = Random(seed)
    graph, cluster = random_graph(random, 2), unequal(random, 2)
    slow = replace(cluster.devices[1], flops_per_s=2e6)
    cluster = replace(cluster, devices=(cluster.devices[0], slow))
    best = decide(graph, cluster, required=cluster.names).best
    assert best is not None
    computed = lower(graph, best.plan).regions.computed
    assert all(any(tiles[name].numel for tiles in computed.values()) for name in cluster.names)


def test_without_room_nothing_more_is_on_its_way() -> None:
    random = Random(3)
    graph, cluster = random_graph(random, 2), unequal(random, 3)
    for room in (False, True):
        decision = decide(graph, replace(cluster, bytes_per_s=1e7), room=room)
        assert decision.best is not None and len(decision.best.plan.devices) > 1
        least = [
            each.plan.in_flight_bytes == LEAST_IN_FLIGHT
            for each in (decision.best, *decision.others)
            if isinstance(each, Option)
        ]
        assert all(least) != room


@pytest.mark.parametrize("seed", range(3))
def test_what_is_alike_is_foreseen_to_take_as_long(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was changed, without leaving anything out for being like something else."""
    random = Random(40 + seed)
    graph, cluster = random_graph(random, 1), unequal(random, 2)
    found: dict[Hashable, set[float]] = {}
    plans: set[Segments] = set()

    def noting(starts: Any, layouts: Any, seconds: Any, is_possible: Any, likeness: Any, tries: int) -> Any:
        def noted(segments: Segments) -> float:
            plans.add(segments)
            taken: float = seconds(segments)
            found.setdefault(likeness(segments), set()).add(taken)
            return taken

        return refined(starts, layouts, noted, is_possible, itself, 150)

    monkeypatch.setattr("manyhands.planning.deciding.refined", noting)
    decide(graph, cluster)
    assert len(found) < len(plans), "some have to be alike"
    assert all(len(seconds) == 1 for seconds in found.values())


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_trial_is_chosen_also_if_it_had_been_changed(seed: int) -> None:
    random = Random(seed)
    graph, cluster = random_graph(random, 2), unequal(random, 2)
    decision = decide(graph, cluster)
    assert decision.best is not None
    others = [each for each in decision.others if isinstance(each, Option)]
    trials = [Trial("auto", decision.best.plan, 0.9 * decision.best.cost.seconds)]
    trials += [Trial(each.name, each.plan, each.cost.seconds) for each in others]
    again = decide(graph, replace(cluster, trials=tuple(trials))).best
    assert again is not None and again.plan == decision.best.plan
