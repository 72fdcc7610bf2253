"""The search against every plan there is, and what must hold of any choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest

from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster
from manyhands.ir.geometry import Axis, Cut, Layout
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.planning.choosing import Chooser
from manyhands.planning.deciding import Option, decide
from manyhands.planning.lowering import lower
from manyhands.planning.pieces import Piece
from manyhands.planning.search import MAX_LABELS, Found, Search, step_seconds
from manyhands.planning.simulation import simulate
from manyhands.planning.strategies import NAMES, plan_by_name
from tests.planning.random_graphs import random_cluster, random_graph


def small_case(seed: int, most: int) -> Chooser:
    """A network of at most six units on two or three devices, with no more plans than can be tried."""
    random = Random(seed)
    while True:
        graph = random_graph(random, random.choice((1, 2, 3)))
        chooser = Chooser(
            graph, random.choice((random_cluster, unequal, unequal, unequal))(random, random.choice((2, 3)))
        )
        num = len(chooser.units.runs)
        if num <= 6 and sum(_num_plans(num, len(layouts)) for layouts in chooser.searches()) <= most:
            return chooser


def limited_case(seed: int) -> tuple[Chooser, np.ndarray]:
    """One in which every device has less memory than the best plan would take."""
    chooser = small_case(100 + seed, 50_000)
    free = best_found(chooser)
    assert free is not None
    share = Random(seed).choice((0.4, 0.6, 0.8, 0.95))
    return chooser, np.full_like(free.peak_bytes, share * free.peak_bytes.max())


def _num_plans(units: int, layouts: int) -> int:
    return layouts * (layouts + 1) ** (units - 1)


def brute_force(chooser: Chooser, limit: np.ndarray | None = None, *, roomy: bool = False) -> float:
    """Seconds of the best of all plans: every subset of the devices, every layout, every end of a segment."""
    subsets = [chooser.layouts(devices) for devices in chooser.subsets()]
    searches = (
        Search(chooser.units, layouts, chooser.pieces, chooser.rounds, roomy=roomy) for layouts in subsets
    )
    return min(_least_seconds(search, limit) for search in searches)


def _least_seconds(search: Search, limit: np.ndarray | None) -> float:
    """By recursion over segments; a beginning that takes longer than a whole plan is not gone on with."""
    end, alive, unit_of = len(search.units.runs), search.units.alive, search.units.unit_of
    least = inf

    @cache
    def segments(
        start: int, stop: int
    ) -> list[tuple[int, Piece, float, float, list[tuple[str, list[float]]]]]:
        found = []
        for index, layout in enumerate(search.layouts):
            if piece := search.piece(start, stop, layout):
                traffic_s = 2 * search.rounds.spread(piece.shared_bytes)
                fetch = [(reading.name, search.fetch(reading).tolist()) for reading in piece.readings]
                found.append((index, piece, search.computing(piece), traffic_s, fetch))
        return found

    def go(start: int, where: dict[str, int], blocking: float, traffic: float, held: Any, most: Any) -> None:
        nonlocal least
        if start == end:
            closing = search._closing(np.array([where[name] for name in alive[end]]))
            seconds = step_seconds(np.array(blocking + closing), np.array(traffic), roomy=search.roomy)
            least = min(least, float(seconds))
            return
        for stop in range(start + 1, end + 1):
            for index, piece, computing_s, traffic_s, fetch in segments(start, stop):
                more = blocking + computing_s + sum(by_layout[where[name]] for name, by_layout in fetch)
                keep = held + piece.kept_bytes + search.weight_copies * piece.weight_bytes
                worst = np.maximum(most, piece.passing_bytes)
                if more >= least or (limit is not None and np.any(keep + worst > limit)):
                    continue
                made = {name: index for name in alive[stop] if unit_of[name] >= start}
                go(stop, where | made, more, traffic + traffic_s, keep, worst)

    nothing = np.zeros(len(search.pieces.devices))
    go(0, {}, 0.0, 0.0, nothing, nothing)
    return least


def best_found(chooser: Chooser, limit: np.ndarray | None = None, *, roomy: bool = False) -> Found | None:
    found = [chooser.search(layouts, limit, roomy=roomy) for layouts in chooser.searches()]
    return min((each for each in found if each), key=lambda each: each.seconds, default=None)


@pytest.fixture(params=(2, MAX_LABELS), ids=lambda number: f"{number}-labels")
def hurry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two labels the first pass finds next to nothing, so that it is up to the second."""
    monkeypatch.setattr("manyhands.planning.search.MAX_LABELS", request.param)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_trying_everything_finds(seed: int, hurry: None) -> None:
    chooser = small_case(seed, 2_000_000)
    found = best_found(chooser)
    assert found is not None
    assert found.seconds == pytest.approx(brute_force(chooser), rel=1e-9)
    layouts = tuple(dict.fromkeys(segment.layout for segment in found.plan.segments))
    again = Search(chooser.units, layouts, chooser.pieces, chooser.rounds).estimate(found.plan)
    assert again is not None and again.seconds == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_does_so_by_its_other_count(seed: int, hurry: None) -> None:
    """With room for weights on their way, they cost next to nothing beside what blocks."""
    chooser = small_case(seed, 500_000)
    found = best_found(chooser, roomy=True)
    assert found is not None
    assert found.seconds == pytest.approx(brute_force(chooser, roomy=True), rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_it_does_so_within_memory_too(seed: int, hurry: None) -> None:
    chooser, limit = limited_case(seed)
    expected, found = brute_force(chooser, limit), best_found(chooser, limit)
    assert (expected == inf) == (found is None)
    if found is not None:
        assert found.seconds == pytest.approx(expected, rel=1e-9)
        assert np.all(found.peak_bytes <= limit)


def test_these_cases_are_not_all_of_one_device() -> None:
    """The cases above would prove little if one device alone, or nothing, were always best."""
    plans = [found.plan for seed in range(20) if (found := best_found(small_case(seed, 2_000_000)))]
    layouts = [{segment.layout for segment in plan.segments} for plan in plans]
    assert sum(len(plan.devices) > 1 for plan in plans) >= 8
    assert sum(len(each) > 1 for each in layouts) >= 4
    assert sum(any(len(set(layout.shares)) > 1 for layout in each) for each in layouts) >= 5
    tight = [limited_case(seed) for seed in range(10)]
    assert sum(best_found(chooser, limit) is not None for chooser, limit in tight) >= 3


@pytest.mark.parametrize("seed", range(5))
def test_no_named_plan_with_any_shares_is_faster_than_the_choice(seed: int) -> None:
    """Shares in eighths of every named strategy on every subset, foreseen by their programs."""
    random = Random(500 + seed)
    graph, num = random_graph(random, random.choice((1, 2, 3))), random.choice((2, 3))
    cluster = unequal(random, num)
    best = decide(graph, cluster).best
    assert best is not None
    for devices in (subset for size in range(2, num + 1) for subset in combinations(cluster.names, size)):
        for name, shares in product(NAMES, all_shares(8, len(devices))):
            try:
                plan = plan_by_name(graph, devices, name, shares=shares)
            except RequestError:
                continue
            seconds = simulate(lower(graph, plan), cluster, memory=False).cost.seconds
            assert best.cost.seconds <= seconds * (1 + 1e-9), (name, devices, shares)


def all_shares(total: int, num: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, total), num - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *inner, total)))


def unequal(random: Random, num: int) -> Cluster:
    """Devices up to three times as fast as others, on links that make it worth to work together."""
    cluster = random_cluster(random, num)
    speeds = (1e8, 1.5e8, 2e8, 3e8)
    devices = tuple(
        replace(device, flops_per_s=random.choice(speeds), memory_bytes_per_s=4e9)
        for device in cluster.devices
    )
    return replace(cluster, devices=devices, bytes_per_s=random.choice((1e8, 1e9, 1e10)), latency_s=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_more_of_anything_is_never_worse(seed: int) -> None:
    """The same layouts, counted by the search: bandwidth, latency, speed and memory."""
    chooser = small_case(200 + seed, 50_000)
    cluster = chooser.cluster
    before = best_found(chooser)
    assert before is not None
    for changed in better_clusters(cluster):
        other = Chooser(chooser.graph, changed)
        searches = (Search(other.units, each, other.pieces, other.rounds) for each in chooser.searches())
        better = min(found.seconds for search in searches if (found := search.best()))
        assert better <= before.seconds * (1 + 1e-9)
    limits = [
        np.full_like(before.peak_bytes, part * before.peak_bytes.max()) for part in (0.4, 0.7, 0.9, 1.0)
    ]
    seconds = [found.seconds if (found := best_found(chooser, limit)) else inf for limit in limits]
    assert seconds == sorted(seconds, reverse=True)


def better_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Twice the bandwidth, half the latency, and each device faster by a little or a lot."""
    yield replace(cluster, bytes_per_s=2 * cluster.bytes_per_s)
    yield replace(cluster, latency_s=cluster.latency_s / 2)
    for index, factor in product(range(len(cluster.devices)), (1.1, 2)):
        devices = list(cluster.devices)
        devices[index] = replace(devices[index], flops_per_s=factor * devices[index].flops_per_s)
        yield replace(cluster, devices=tuple(devices))


@pytest.mark.parametrize("make", (unequal, random_cluster))
@pytest.mark.parametrize("seed", range(8))
def test_the_forecast_is_not_worse_for_a_better_cluster(seed: int, make: Callable[..., Cluster]) -> None:
    """Each planned apart from the others: neither knows what was found for the other."""
    random = Random(600 + seed)
    graph, cluster = random_graph(random, random.choice((1, 2))), make(random, random.choice((2, 3)))
    before = decide(graph, cluster).best
    assert before is not None
    for changed in better_clusters(cluster):
        better = decide(graph, changed).best
        assert better is not None and better.cost.seconds <= before.cost.seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("make", (unequal, random_cluster))
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_nor_is_it_in_many_more_cases(seed: int, make: Callable[..., Cluster]) -> None:
    test_the_forecast_is_not_worse_for_a_better_cluster(seed, make)


@pytest.mark.parametrize("seed", (2, 3, 6, 9))  # where memory matters and there is a way round it
def test_the_forecast_is_not_worse_with_more_memory(seed: int) -> None:
    """Planned apart, from what hardly anything fits into to what the fastest plan needs."""
    random = Random(900 + seed)
    graph, cluster = with_many_images(random), unequal(random, 2)
    cluster = replace(cluster, devices=tuple(replace(d, bare_bytes=10**5) for d in cluster.devices))
    free = decide(graph, cluster).best
    assert free is not None
    peak = max(size for _, size in simulate(lower(graph, free.plan), cluster).cost.peak_bytes)
    found = []
    for part in (0.35, 0.5, 0.65, 0.8, 1.05):
        devices = tuple(replace(d, memory_bytes=int(part * peak)) for d in cluster.devices)
        found.append(decide(graph, replace(cluster, devices=devices)).best)
    seconds = [each.cost.seconds if each else inf for each in (*found, free)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(seconds))
    assert any(free.cost.seconds < each < inf for each in seconds), "memory has to matter"
    assert any(s.redo for each in found if each for s in each.plan.segments), "something is computed again"


def with_many_images(random: Random) -> Graph:
    """So that images take more memory than all else; no classifier, whose shapes depend on their number."""
    while "fc" in (graph := random_graph(random, 2)).by_name():
        pass
    layers = tuple(replace(layer, shape=(64, *layer.shape[1:])) for layer in graph.layers)
    return replace(graph, layers=layers)


@pytest.mark.parametrize("seed", range(3))
def test_with_the_plan_so_far_the_forecast_is_never_worse_for_a_better_cluster(seed: int) -> None:
    """So what `manyhands plan` says of twice the bandwidth or one more device is never that it would harm."""
    random = Random(700 + seed)
    graph, cluster = random_graph(random, random.choice((1, 2))), unequal(random, random.choice((2, 3)))
    before = decide(graph, cluster).best
    assert before is not None
    for changed in better_clusters(cluster):
        better = decide(graph, changed, known=(before.plan,)).best
        assert better is not None and better.cost.seconds <= before.cost.seconds * (1 + 1e-9)
    peaks = simulate(lower(graph, before.plan), cluster).cost.peak_bytes
    seconds, known = [], tuple[Plan, ...]()
    for part in (0.95, 1.0, 1.04, 1.2):
        size = int(part * max(peak for _, peak in peaks))
        limited = replace(cluster, devices=tuple(replace(d, memory_bytes=size) for d in cluster.devices))
        best = decide(graph, limited, known=known).best
        seconds.append(best.cost.seconds if best else inf)
        known = (best.plan,) if best else ()
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < inf


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_is_never_foreseen_to_be_slower_on_a_better_cluster(seed: int) -> None:
    random = Random(800 + seed)
    graph, num = random_graph(random, random.choice((1, 2, 3))), random.choice((2, 3))
    cluster, name = unequal(random, num), random.choice(NAMES)
    try:
        plan = plan_by_name(graph, cluster.names, name)
    except RequestError:
        plan = plan_by_name(graph, cluster.names[:1], "single")
    lowered = lower(graph, plan)
    before = simulate(lowered, cluster, memory=False).cost.seconds
    for changed in better_clusters(cluster):
        assert simulate(lowered, changed, memory=False).cost.seconds <= before * (1 + 1e-9)


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


@pytest.mark.parametrize("order", ((343, 200, 200), (200, 343, 200), (200, 200, 343)))
def test_it_does_not_matter_in_which_order_devices_of_different_room_stand(order: tuple[int, ...]) -> None:
    """The same devices and memory, but more of it is taken by the process itself on one of them."""
    random = Random(7)
    graph, cluster = random_graph(random, 3), unequal(random, 3)
    first = cluster.devices[0]
    devices = [replace(first, name=d.name, memory_bytes=360 * 10**6) for d in cluster.devices]
    devices = [replace(d, bare_bytes=bare * 10**6) for d, bare in zip(devices, order, strict=True)]
    found = decide(graph, replace(cluster, devices=tuple(devices), bytes_per_s=1e10)).best
    assert found is not None and len(found.plan.devices) == 2
    assert all(order[cluster.names.index(name)] == 200 for name in found.plan.devices)


def test_a_device_without_room_for_its_own_process_is_left_out() -> None:
    random = Random(8)
    graph, cluster = random_graph(random, 3), unequal(random, 3)
    sizes = (342, 2000, 2000)
    devices = (replace(d, memory_bytes=mb * 10**6) for d, mb in zip(cluster.devices, sizes, strict=True))
    found = decide(graph, replace(cluster, devices=tuple(devices))).best
    assert found is not None and "d0" not in found.plan.devices
