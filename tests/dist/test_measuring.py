"""Profiles of local devices, measured on real processes: complete, stored, and of the right size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhands import api, measuring
from manyhands.ir.codec import encode
from manyhands.ir.geometry import Span, Tile
from manyhands.ir.graph import Convolve
from manyhands.ir.profile import kind_of
from manyhands.loading import load_model
from manyhands.measurements import PlansJob
from manyhands.planning.costs import Costs
from manyhands.runtime.ranks import launch

MODEL, SHAPE, BATCH = "demo", (1, 28, 28), 16


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for profiles that nobody else has."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder  # type: ignore[misc]


@pytest.fixture(scope="module")
def cluster(store: Path) -> measuring.Cluster:
    return measuring.profile_local(MODEL, (SHAPE,), BATCH, 2)


@pytest.fixture(scope="module")
def graph() -> measuring.Graph:
    return api.trace(load_model(MODEL), torch.empty(BATCH, *SHAPE, device="meta")).graph


def test_every_layer_and_step_of_every_usual_plan_was_measured(
    cluster: measuring.Cluster, graph: measuring.Graph
) -> None:
    profile = cluster.profiles[1]
    kinds, steps = {t.kind for t in profile.timings}, {line.step for line in profile.lines}
    for strategy in ("single", "batch", "rows", "channels"):
        lowered = api.lower(graph, api.plan(graph, cluster, strategy))
        for layer in graph.layers[1:]:
            assert kind_of(layer, layer.name in lowered.regions.exchanged) in kinds
        assert {type(step).__name__.lower() for p in lowered.programs for step in p.steps} <= steps
    assert cluster.cores and 1e6 < cluster.bytes_per_s < 1e12 and 0 < cluster.latency_s < 1


def test_promising_plans_are_tried_and_the_fastest_is_taken(
    cluster: measuring.Cluster, graph: measuring.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "PROMISING", 1e9)
    job = PlansJob(MODEL, (SHAPE,), (), 0, 0)
    trials = measuring.with_trials(job, graph, cluster).trials
    times = [trial.seconds for trial in trials]
    assert {"single", "batch", "rows"} <= {trial.name for trial in trials}
    assert times == sorted(times) and times[0] > 0
    chosen = api.choose(graph, replace(cluster, trials=trials)).best
    assert chosen is not None and chosen.plan == trials[0].plan


def test_convolutions_take_time_both_ways_whole_and_cut(
    cluster: measuring.Cluster, graph: measuring.Graph
) -> None:
    """How much, a test beside others cannot say: half of a small layer may well take as long as all of it."""
    known = Costs(cluster)
    convolutions = [layer for layer in graph.layers if isinstance(layer.operation, Convolve)]
    assert convolutions
    for layer in convolutions:
        whole = Tile.whole(layer.shape)
        for tile in (whole, whole.with_span(0, Span(0, BATCH // 2)), whole.with_span(1, Span(0, 4))):
            forward_s, backward_s = known.layer("device-0", layer, tile)
            assert 0 < forward_s < 1 and 0 < backward_s < 1


def test_what_was_measured_is_not_measured_again(
    cluster: measuring.Cluster, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "launch", refuse)
    assert measuring.profile_local(MODEL, (SHAPE,), BATCH, 2) == cluster
    with pytest.raises(AssertionError):
        measuring.profile_local(MODEL, (SHAPE,), BATCH, 2, fresh=True)
    (file,) = (store / "manyhands").iterdir()
    file.write_text("{")
    with pytest.raises(AssertionError):
        measuring.profile_local(MODEL, (SHAPE,), BATCH, 2)


def test_plans_are_stepped_in_the_turns_of_a_rehearsal(graph: measuring.Graph) -> None:
    """Also one of a single device, while the others look on; and what was rehearsed is foreseen like it."""
    plans = tuple(api.plan(graph, 2, strategy) for strategy in ("single", "batch"))
    single = api.plan(graph, 1, "single")
    cluster, took = measuring.rehearse(
        PlansJob(MODEL, (SHAPE,), plans, 2, 0, stepped=(single, plans[1])), graph, 2
    )
    assert set(took) == {single, plans[1]}
    assert all(len(seconds) == 2 * PlansJob.turns and min(seconds) > 0 for seconds in took.values())
    assert {axis for axis, _ in cluster.profiles[0].stretches} == {"batch"}


def test_plans_stepped_in_turn_are_computed_as_long_as_foreseen(
    cluster: measuring.Cluster, graph: measuring.Graph
) -> None:
    """Only coarsely, as this runs beside other tests; `manyhands bench forecast` is the measurement."""
    plans = tuple(api.plan(graph, cluster, strategy) for strategy in ("batch", "rows"))
    said = launch("compare", encode(PlansJob(MODEL, (SHAPE,), plans, 4, 0)), cluster.names)
    for number, plan in enumerate(plans):
        events = api.simulate(api.lower(graph, plan), cluster).events
        for name in cluster.names:
            foreseen = sum(e.stop_s - e.start_s for e in events if e.device == name)
            (event,) = (e for e in said[name] if e["event"] == "stepped" and e["plan"] == number)
            measured = min(event["busy_s"])
            assert len(event["seconds"]) == 4
            assert 0.4 < foreseen / measured / stretch(cluster) < 2.5


def stretch(cluster: measuring.Cluster) -> float:
    """How much longer steps last where devices share cores."""
    return max(1.0, len(cluster.devices) / (cluster.cores or 1))
