"""Plans changed a little: what must hold of any of them."""

from __future__ import annotations

from random import Random

import pytest

from manyhands.ir.geometry import Axis, Cut, Layout
from manyhands.ir.plan import Segment
from manyhands.planning.choosing import Chooser
from manyhands.planning.deciding import decide
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


@pytest.mark.parametrize("fast", (1.0, 2.0, 3.0, 7.0))
def test_shares_come_to_what_devices_can_do(fast: float) -> None:
    found = refined(
        (Segment(("x", "y"), HALVES),),
        (HALVES,),
        lambda segments: work(segments, {"a": fast, "b": 1}),
        any_fits,
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
        found = refined(
            tuple(Segment(names, HALVES) for names in start), (*ALONE, HALVES), wrong, any_fits, PLENTY
        )
        assert [(s.layers, s.layout) for s in found] == [((name,), wanted[name]) for name in "xyz"]
    apart = tuple(Segment((name,), HALVES) for name in "xyz")
    joined = refined(apart, (*ALONE, HALVES), len, any_fits, PLENTY)
    assert [segment.layers for segment in joined] == [("x", "y", "z")]


def test_what_does_not_fit_is_not_taken() -> None:
    """The fast device has room for half of each layer."""
    found = refined(
        (Segment(("x", "y"), HALVES),),
        (*ALONE, HALVES),
        lambda segments: work(segments, {"a": 4, "b": 1}),
        lambda segments: all(2 * s.layout.shares[0] <= sum(s.layout.shares) for s in segments),
        PLENTY,
    )
    assert all(2 * s.layout.shares[0] <= sum(s.layout.shares) for s in found)


def test_it_ends_after_so_many_tries() -> None:
    seen: list[Segments] = []

    def seconds(segments: Segments) -> float:
        seen.append(segments)
        return -len(seen)  # whatever comes next is better

    refined((Segment(("x", "y"), HALVES),), (*ALONE, HALVES), seconds, any_fits, 25)
    assert len(seen) == len(set(seen)) == 25


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_has_every_layer_once_and_the_devices_that_are_required(seed: int) -> None:
    random = Random(seed)
    graph, cluster = random_graph(random, 2), unequal(random, 3)
    assert Chooser(graph, cluster).thorough
    best = decide(graph, cluster, required=cluster.names[:2]).best
    assert best is not None
    layers = [name for segment in best.plan.segments for name in segment.layers]
    assert layers == [layer.name for layer in graph.layers if layer.name in set(layers)]
    assert set(layers) == {layer.name for layer in graph.layers} - {"x"}
    used = {device for segment in best.plan.segments for device in segment.layout.devices}
    assert set(cluster.names[:2]) <= used == set(best.plan.devices)
