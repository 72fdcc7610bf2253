"""The search against every plan there is, and what must hold of any choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Axis, Cut, Layout
from manyhands.ir.plan import Plan, Segment
from manyhands.planning.choosing import Chooser
from manyhands.planning.deciding import Option, decide
from manyhands.planning.search import Found, Search
from manyhands.planning.units import Units
from tests.planning.random_graphs import random_cluster, random_graph


def every_plan(units: Units, layouts: tuple[Layout, ...], devices: tuple[str, ...]) -> Iterator[Plan]:
    """All ways to make segments of the units, in all layouts."""
    num = len(units.runs)
    digest, batch = graph_digest(units.graph), units.graph.layers[0].shape[0]
    for ends in product((False, True), repeat=num - 1):
        edges = [0, *(i + 1 for i, end in enumerate(ends) if end), num]
        runs = [units.layers(a, b) for a, b in zip(edges, edges[1:], strict=False)]
        for chosen in product(layouts, repeat=len(runs)):
            pairs = zip(runs, chosen, strict=True)
            segments = tuple(Segment(tuple(layer.name for layer in run), layout) for run, layout in pairs)
            yield Plan(digest, batch, devices, segments)


def small_case(seed: int) -> tuple[Chooser, Search]:
    """A network of at most six units on two or three devices, and a few of their layouts."""
    random = Random(seed)
    num_devices = random.choice((2, 3))
    chooser = Chooser(random_graph(random, 2), random_cluster(random, num_devices))
    while len(chooser.units.runs) > 6:
        chooser = Chooser(random_graph(random, 2), random_cluster(random, num_devices))
    layouts = chooser.layouts(chooser.cluster.names)
    few = 3 if len(chooser.units.runs) > 4 else 5
    chosen = tuple(random.sample(layouts, min(few, len(layouts))))
    if not any(len(layout.devices) == 1 for layout in chosen):
        chosen = (layouts[0], *chosen[1:])
    return chooser, Search(chooser.units, chosen, chooser.pieces, chooser.rounds)


def brute_force(search: Search, limit: np.ndarray | None) -> Found | None:
    found = [
        search.estimate(plan) for plan in every_plan(search.units, search.layouts, search.pieces.devices)
    ]
    fitting = [each for each in found if each and (limit is None or np.all(each.peak_bytes <= limit))]
    return min(fitting, key=lambda each: each.seconds, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_trying_everything_finds(seed: int) -> None:
    _, search = small_case(seed)
    expected, found = brute_force(search, None), search.best()
    assert expected is not None and found is not None
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    again = search.estimate(found.plan)
    assert again is not None and again.seconds == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_it_does_so_within_memory_too(seed: int) -> None:
    chooser, search = small_case(100 + seed)
    free = search.best()
    assert free is not None
    limit = free.peak_bytes * Random(seed).choice((0.4, 0.6, 0.8, 0.95)) + 1.0
    expected, found = brute_force(search, limit), search.best(limit)
    assert (expected is None) == (found is None)
    if expected and found:
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
        assert np.all(found.peak_bytes <= limit)


@pytest.mark.parametrize("seed", range(8))
def test_more_of_anything_is_never_worse(seed: int) -> None:
    """Within the search, whose plans are counted one like another: bandwidth, speed and memory."""
    chooser, search = small_case(200 + seed)
    before = search.best()
    assert before is not None
    cluster = chooser.cluster
    fastest = replace(cluster.devices[0], flops_per_s=2 * cluster.devices[0].flops_per_s)
    changes = (
        replace(cluster, bytes_per_s=2 * cluster.bytes_per_s),
        replace(cluster, devices=(fastest, *cluster.devices[1:])),
    )
    for changed in changes:
        other = Chooser(chooser.graph, changed)
        better = Search(other.units, search.layouts, other.pieces, other.rounds).best()
        assert better is not None and better.seconds <= before.seconds * (1 + 1e-9)
    tight, loose = search.best(before.peak_bytes * 0.7), search.best(before.peak_bytes * 0.9)
    assert tight is None or (loose is not None and loose.seconds <= tight.seconds * (1 + 1e-9))


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_is_never_worse_than_a_named_strategy(seed: int) -> None:
    random = Random(300 + seed)
    decision = decide(random_graph(random, 3), random_cluster(random, random.choice((2, 3))))
    assert decision.best is not None
    named = [other for other in decision.others if isinstance(other, Option)]
    assert named
    assert all(decision.best.cost.seconds <= other.cost.seconds for other in named)


def test_a_device_three_times_slower_gets_about_a_third() -> None:
    random = Random(5)
    graph = random_graph(random, 3)
    cluster = random_cluster(random, 2)
    one = replace(cluster.devices[0], flops_per_s=3e8, memory_bytes_per_s=3e9, launch_s=0.0)
    two = replace(one, name="d1", flops_per_s=1e8, memory_bytes_per_s=1e9)
    chooser = Chooser(graph, replace(cluster, devices=(one, two), bytes_per_s=1e12))
    first = Layout(("d0", "d1"), (Cut(Axis.ROWS, 2),), (1, 1))
    shares = chooser.shared(first).shares
    assert 0.6 <= shares[0] / sum(shares) <= 0.8


def test_a_device_that_would_only_slow_the_step_is_left_out() -> None:
    random = Random(6)
    graph, cluster = random_graph(random, 3), random_cluster(random, 2)
    fast = replace(cluster.devices[0], flops_per_s=1e11, memory_bytes_per_s=1e11)
    slow = replace(cluster.devices[1], flops_per_s=1e7, memory_bytes_per_s=1e8)
    decision = decide(graph, replace(cluster, devices=(fast, slow), bytes_per_s=1e4))
    assert decision.best is not None and decision.best.plan.devices == ("d0",)
