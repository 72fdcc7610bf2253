"""Races on emulated devices: every contestant runs, slower devices take longer, verdicts can fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import api, racing
from manyhands.benches import emulated, peers
from manyhands.benches.emulated import Setting, among, auto, by_name, cluster, laps
from manyhands.emulation import devices
from manyhands.errors import RequestError, RunError
from manyhands.ir.cluster import Cluster
from manyhands.ir.codec import encode
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.loading import load_model
from manyhands.measuring import graph_of
from manyhands.pacing import lateness_s
from manyhands.peers import CHANNELS_LAST, DISTCONV, PEERS, _even_cuts
from manyhands.reporting.plots import plot_bars
from manyhands.runtime.allocator import KEEPING

needs_root = pytest.mark.skipif(bool(devices.why_not()), reason=str(devices.why_not()))
ALONE = [peers.ONE, CHANNELS_LAST]
CORE = 50e9  # said, not measured: only relations count


@needs_root
def test_all_contestants_take_their_steps_on_emulated_devices() -> None:
    """How fast, a test beside others cannot say. What is foreseen is of the right size."""
    told: list[str] = []
    setting = Setting("demo", (1, 28, 28), 8, cluster({"a": 0.4 * CORE, "b": 0.4 * CORE}, 200))

    def either(graph: Graph, devices: Cluster) -> list[Plan]:
        return [plan for name in ("rows", "batch") for plan in by_name(name)(graph, devices)]

    plans = {"auto": auto, "rows": by_name("rows"), "either": either, "nonsense": by_name("rows:3")}
    torchs = tuple(name for name in PEERS if name != DISTCONV)
    found, chosen, conditions = laps(setting, CORE, 1.0, plans, torchs, 2, told.append)
    assert (conditions.dilation, conditions.core_flops_per_s) == (1.0, CORE)
    assert [lap.name for lap in found] == ["auto", "rows", "either", *torchs]
    assert list(chosen) == ["auto", "rows", "either"]
    assert any("a trial of the 2 most promising plans" in text for text in told)
    assert [name for name, _ in conditions.refused] == ["nonsense"]
    for lap in found:
        assert lap.seconds > 0 and (lap.foreseen_s is None) == (lap.name in PEERS)
        assert len(lap.each_s) == 2 and min(lap.each_s) <= lap.seconds <= max(lap.each_s)
    rows = found[1]
    assert rows.foreseen_s is not None and 0.2 < rows.foreseen_s / rows.seconds < 5
    assert "rows:2" in rows.layouts


@needs_root
def test_seconds_are_those_of_devices_as_fast_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured twice as fast, took twice as long."""
    seen: list[dict[str, racing.Raced]] = []

    def noted(*words: Any) -> dict[str, racing.Raced]:
        seen.append(racing.race(*words))
        return seen[-1]

    monkeypatch.setattr(emulated, "race", noted)
    foreseen = SimpleNamespace(cost=SimpleNamespace(seconds=1.5))
    monkeypatch.setattr(api, "simulate", lambda *_: foreseen)
    setting = Setting("demo", (1, 28, 28), 8, cluster({"a": 0.2 * CORE, "b": 0.2 * CORE}, 200))
    (lap,), _, conditions = laps(setting, CORE, 2.0, {"rows": by_name("rows")}, (), 2, lambda _: None)
    (raced,) = seen
    assert conditions.dilation == 2.0 and lap.foreseen_s == 3.0
    assert lap.each_s == tuple(2 * seconds for seconds in raced["rows"].seconds)
    assert dict(lap.spent_s) == {kind: 2 * seconds for kind, seconds in raced["rows"].spent_s.items()}


class Clock:
    """Moves only when a step is taken."""

    def __init__(self) -> None:
        self.now, self.taken = 0.0, list[str]()

    def perf_counter(self) -> float:
        return self.now

    def step(self, name: str, seconds: list[float]) -> None:
        self.taken.append(name)
        self.now += seconds.pop(0)


@pytest.mark.parametrize(
    ("rivals", "ours", "theirs"), [((), [3.0, 5.0], []), (("peer",), [7.0, 9.0], [70.0, 90.0])]
)
def test_of_two_steps_and_three_at_first_the_last_counts_and_with_peers_not_in_the_first_rounds(
    monkeypatch: pytest.MonkeyPatch, rivals: tuple[str, ...], ours: list[float], theirs: list[float]
) -> None:
    """What comes between steps is in no step's time."""
    clock, said = Clock(), list[dict[str, Any]]()
    plan, peer = [float(n) for n in range(1, 10)], [10.0 * n for n in range(1, 10)]
    taking = [
        ("plan", lambda: clock.step("plan", plan), lambda: clock.step("settle", [1000.0])),
        ("idle", None, lambda: None),  # a device that is not part of it
        ("peer", lambda: clock.step("peer", peer), lambda: None),
    ]
    monkeypatch.setattr(racing, "_plans", lambda *_: taking[:2])
    monkeypatch.setattr(racing, "_peers", lambda given, place: taking[2:] if given.peers else [])
    monkeypatch.setattr(racing, "time", clock)
    monkeypatch.setattr(racing.dist, "barrier", lambda: clock.step("barrier", [100.0]))
    monkeypatch.setattr(racing, "say", lambda event, **facts: said.append({"event": event} | facts))
    job = racing.RaceJob("demo", ((1, 28, 28),), 8, (), rivals, 2)
    racing.take_part(encode(job), SimpleNamespace(rank=0))  # type: ignore[arg-type]
    assert {each["name"]: each["seconds"] for each in said} == {
        name: seconds for name, seconds in (("plan", ours), ("peer", theirs)) if seconds
    }
    met = ["barrier", "barrier"]  # all have ended what was before; all begin
    assert clock.taken[:10] == [*met, "plan", *met, "plan", *met, "plan", "settle"]


def test_who_has_nothing_to_do_computes_until_the_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextmanager
    def busy(num_cores: int) -> Iterator[None]:
        seen.append(f"busy {num_cores}")
        yield
        seen.append("idle")

    taking = [("alone elsewhere", None, lambda: None), ("all", lambda: seen.append("step"), lambda: None)]
    monkeypatch.setattr(racing, "_plans", lambda *_: taking)
    monkeypatch.setattr(racing, "_peers", lambda *_: [])
    monkeypatch.setattr(racing, "busy", busy)
    monkeypatch.setattr(racing.dist, "barrier", lambda: seen.append("barrier"))
    monkeypatch.setattr(racing, "say", lambda *_, **__: None)
    job = racing.RaceJob("demo", ((1, 28, 28),), 8, (), (), 1)
    racing.take_part(encode(job), SimpleNamespace(rank=1))  # type: ignore[arg-type]
    until_they_have = ["busy 1", "barrier", "idle", "barrier"]
    assert seen == [
        "barrier",
        "barrier",
        *3 * until_they_have,
        "step",
        *2 * ["barrier", "barrier", "step"],
    ]


def test_of_every_round_the_slowest_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*seconds: float) -> list[dict[str, Any]]:
        spent = {"event": "spent", "name": "x", "seconds": {"computing": seconds[0]}}
        return [{"event": "raced", "name": "x", "seconds": seconds}, spent]

    def launch(*_: object, within: dict[str, tuple[str, ...]], **__: object) -> dict[str, Any]:
        assert within == {"a": ("nsenter", *KEEPING), "b": KEEPING}  # nobody's pages are made anew
        return {"a": told(1.0, 5.0), "b": told(2.0, 3.0)}

    monkeypatch.setattr(racing, "launch", launch)
    job = racing.RaceJob("demo", ((1, 28, 28),), 8, (), (), 2)
    emulation = SimpleNamespace(
        cluster=cluster({"a": 1e9, "b": 1e9}, 100), within={"a": ("nsenter",), "b": ()}
    )
    assert racing.race(emulation, job) == {"x": racing.Raced((2.0, 5.0), {"computing": 1.5})}  # type: ignore[arg-type]


@needs_root
def test_races_are_foreseen_with_busy_cores_and_with_the_lateness_of_those_that_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    def busy_cores(number: int) -> AbstractContextManager[None]:
        seen.append(number)
        return nullcontext()

    def lateness(_: object, sharing: tuple[str, ...]) -> float:
        seen.append(sharing)
        return 0.004

    monkeypatch.setattr(racing, "cores_here", lambda: 3)
    monkeypatch.setattr(racing, "busy", busy_cores)
    monkeypatch.setattr(racing, "lateness_s", lateness)
    with devices.emulated(cluster({"a": 0.4 * CORE, "b": 0.2 * CORE}, 200), CORE, 1.0) as emulation:
        found = racing.foreseeable("demo", ((1, 28, 28),), 8, emulation, ("a",))
    assert seen == [1, ("a",)] and found.latency_s == 0.004  # two devices keep two cores busy, one rehearses
    fast, slow = found.profiles
    assert fast.slower(2.0) == replace(slow, device="a")


@needs_root
def test_a_peer_that_fails_is_left_out_and_one_that_does_not_is_raced_beside_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raced: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def race(_: object, job: racing.RaceJob) -> dict[str, racing.Raced]:
        raced.append((tuple(name for name, _ in job.plans), job.peers))
        if "FSDP2" in job.peers:
            raise RunError("it broke.")
        took = float(len(raced))
        return {name: racing.Raced((took,), {}) for name in (*raced[-1][0], *job.peers)}

    monkeypatch.setattr(emulated, "race", race)
    monkeypatch.setattr(emulated, "foreseeable", lambda model, inputs, batch, emulation, _: emulation.cluster)
    setting = Setting("demo", (1, 28, 28), 8, cluster({"a": 0.4 * CORE, "b": 0.4 * CORE}, 200))
    plans = {"auto": by_name("rows"), "other": by_name("batch")}
    rivals = (*ALONE, "FSDP2", peers.DDP)
    found, _, conditions = laps(setting, CORE, 0.5, plans, rivals, 2, lambda _: None)
    assert raced == [(("auto", "other"), tuple(ALONE)), (("auto",), ("FSDP2",)), (("auto",), (peers.DDP,))]
    assert [(lap.name, lap.seconds, lap.beside_s) for lap in found] == [
        *((name, 0.5, None) for name in ("auto", "other", *ALONE)),
        (peers.DDP, 1.5, 1.5),
    ]
    assert conditions.refused == (("FSDP2", "it broke."),)


@needs_root
def test_devices_with_a_part_of_a_core_are_late_for_each_other() -> None:
    """More than the wire itself takes, less than a few periods; one alone waits for nobody."""
    with devices.emulated(cluster(dict.fromkeys("abcd", 0.4 * CORE), 200), CORE, 1.0) as emulation:
        assert 1e-4 < lateness_s(emulation, emulation.cluster.names) < 2e-2
        assert lateness_s(emulation, ("a",)) == 0.0


@needs_root
def test_messages_between_emulated_devices_take_as_long_as_asked_for() -> None:
    """By the kernel or by ourselves: a round in which all wait for all has it once."""
    far = replace(cluster(dict.fromkeys("ab", 0.4 * CORE), 200), latency_s=0.06)
    with devices.emulated(far, CORE, 2.0) as emulation:
        assert 0.029 < lateness_s(emulation, emulation.cluster.names) < 0.05


def test_peers_that_cut_the_batch_are_not_exact_where_there_are_norms() -> None:
    plain, normed = nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Sequential(nn.BatchNorm2d(1))
    assert [name for name, peer in PEERS.items() if peer.exact(normed)] == ALONE
    assert [name for name, peer in PEERS.items() if not peer.exact(plain)] == ["DDP with PowerSGD"]


@pytest.mark.parametrize(
    ("model", "shape", "able"),
    [
        ("unet", (1, 3, 256, 256), [*ALONE, DISTCONV]),
        ("unet", (4, 3, 256, 256), list(PEERS)),
        ("unet", (1, 3, 64, 64), ALONE),  # one row each at the bottom, which is out of step
        ("resnet18", (1, 3, 224, 224), ALONE),
        ("yolov2-16", (1, 3, 416, 416), ALONE),  # 26 rows
    ],
)
def test_who_can_take_part_on_four_devices(model: str, shape: tuple[int, ...], able: list[str]) -> None:
    with torch.device("meta"):
        built, images = load_model(model), torch.empty(shape)
    assert [name for name, peer in PEERS.items() if peer.possible(built, images, 4)] == able
    assert not any(module._forward_hooks for module in built.modules())


def test_distconv_takes_part_only_with_its_source(tmp_path: Path) -> None:
    def run(*rivals: str) -> object:
        return peers.run(("unet",), (100.0,), rivals, None, 1, None, lambda _: None)

    for rival, said in (
        (DISTCONV, "name the folder of its source"),
        (str(tmp_path), "no folder distconv"),
        (str(tmp_path / "away"), "nor a folder with DistConv's source"),
    ):
        with pytest.raises(RequestError, match=said):
            run(peers.ONE, rival)


DISTCONV_ON_PAPER = """
class ParallelStrategy:
    def __init__(self, shards, device_type):
        self.shards = shards

class DCTensor:
    @staticmethod
    def distribute(tensor, strategy):
        return tensor.tensor_split(strategy.shards, 2)[1]

def DistConvDDP(model, grad_reduction_factor):
    assert grad_reduction_factor == 2
    return model
"""


def test_distconv_is_imported_from_its_folder_and_gets_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own source is not here: a folder with the same names stands for it."""
    (tmp_path / "distconv").mkdir()
    (tmp_path / "distconv" / "__init__.py").write_text(DISTCONV_ON_PAPER)
    monkeypatch.setattr("sys.path", list(sys.path))
    job = racing.RaceJob("unet-small", ((3, 32, 32),), 1, (), (DISTCONV,), 1, (str(tmp_path),))
    seen: list[torch.Size] = []
    monkeypatch.setattr(racing, "load_model", lambda name: Noting(seen))
    (name, step, _) = racing._peers(job, SimpleNamespace(rank=1, devices=("a", "b")))[0]  # type: ignore[arg-type]
    assert name == DISTCONV and step is not None
    step()
    assert seen == [torch.Size((1, 3, 16, 32))]


class Noting(nn.Module):
    """Notes what it is given."""

    def __init__(self, seen: list[torch.Size]) -> None:
        super().__init__()
        self.convolution, self.seen = nn.Conv2d(3, 1, 1), seen

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append(images.shape)
        result: torch.Tensor = self.convolution(images)
        return result


def test_the_plan_that_is_fastest_in_a_trial_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"0": 2.0, "1": 1.0, "2": 3.0}

    def race(_: object, job: racing.RaceJob) -> dict[str, racing.Raced]:
        assert not job.peers
        return {name: racing.Raced((took[name],), {}) for name, _ in job.plans}

    monkeypatch.setattr(emulated, "race", race)
    graph = graph_of("demo", ((1, 28, 28),), 8)
    plans = [api.plan(graph, 2, strategy) for strategy in ("batch", "rows", "channels")]
    job = racing.RaceJob("demo", ((1, 28, 28),), 8, (), tuple(PEERS), 5)
    assert emulated._fastest(plans, job, None, lambda _: None) == (plans[1], 2.0)  # type: ignore[arg-type]
    alone = emulated._fastest(plans[:1], job, None, lambda _: None)  # type: ignore[arg-type]
    assert alone == (plans[0], None)
    took["1"] = 1.95  # hardly faster: the one that was chosen stays
    assert emulated._fastest(plans, job, None, lambda _: None) == (plans[0], None)  # type: ignore[arg-type]


def test_a_plan_that_was_fast_by_chance_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many plans one is: it has to win once more, against the chosen one alone."""
    seen: list[dict[str, int]] = []

    def race(_: object, job: racing.RaceJob) -> dict[str, racing.Raced]:
        seen.append({name: job.rounds for name, _ in job.plans})
        lucky = 1.0 if len(seen) == 1 else 2.0
        return {name: racing.Raced((lucky if name == "2" else 2.0,), {}) for name, _ in job.plans}

    monkeypatch.setattr(emulated, "race", race)
    graph = graph_of("demo", ((1, 28, 28),), 8)
    plans = [api.plan(graph, 2, strategy) for strategy in ("batch", "rows", "channels")]
    job = racing.RaceJob("demo", ((1, 28, 28),), 8, (), (), 5)
    assert emulated._fastest(plans, job, None, lambda _: None) == (plans[0], None)  # type: ignore[arg-type]
    first, again = emulated.TRIAL_ROUNDS, emulated.FINAL_ROUNDS
    assert seen == [dict.fromkeys(("0", "1", "2"), first), dict.fromkeys(("0", "2"), again)]


def test_the_plan_that_is_chosen_takes_part_in_the_trial() -> None:
    graph = graph_of("demo", ((1, 28, 28),), 8)
    devices = cluster({"a": 1e9, "b": 1e9}, 1000)
    tried = auto(graph, devices)
    assert tried[0] == api.plan(graph, devices, loss=emulated.LOSS) == emulated.untried(graph, devices)[0]
    assert 1 <= len(tried) == len(set(tried)) <= emulated.TRIED
    assert any(len(plan.devices) == 1 for plan in tried)  # whatever it promises


def test_a_pipeline_is_cut_where_the_work_is_even() -> None:
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(8)]
    cuts = _even_cuts(nn.Sequential(*layers), torch.zeros(1, 4, 8, 8), 4)
    assert cuts == ["2", "4", "6"]


def test_bars_are_drawn(tmp_path: Path) -> None:
    plot_bars(tmp_path / "bars.png", "A title", {"one": {"a": 1.0, "b": 2.0}, "two": {"b": 3.0}}, "seconds")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_choice_may_be_among_some_of_the_devices() -> None:
    graph = graph_of("demo", ((1, 28, 28),), 8)
    three: Cluster = replace(cluster(dict.fromkeys("abc", 1e9), 1000), latency_s=1e-4)
    assert among(("b", "c"), by_name("batch"))(graph, three)[0].devices == ("b", "c")
