"""Measure what a model takes on devices at hand: a cluster whose plans can be foreseen in seconds."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import RenderableType

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, Trial, cores_here, local_cluster
from manyhands.ir.codec import decode, encode, graph_digest
from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.ir.profile import CARRY, POST, LayerSample, Line, Profile, StepSample
from manyhands.loading import default_input, load_model, parse_inputs
from manyhands.measurements import LARGE_BYTES, SMALL_BYTES, PlansJob
from manyhands.planning.deciding import Decision, Option
from manyhands.planning.lowering import Lowered
from manyhands.planning.simulation import simulate
from manyhands.profiling.fitting import fit_lines, fit_timings
from manyhands.reporting.profiles import profile_view
from manyhands.runtime.ranks import Event, launch
from manyhands.tasks import MeasureJob, examples

CUTS = ("batch", "rows", "channels")
ROUNDS = 2  # of every turn
PROMISING = 1.3  # times the shortest forecast: plans that are tried
MOST_TRIED = 8  # plans in one trial: every process holds the weights of each
TRIAL_ROUNDS = 7
MOST_STRETCHED = 1.5  # beyond that, the machine was doing something else
UNLIKELY = 0.1  # how much a common stretch counts against a fit, beside what it does not explain
LATEST_S = 5e-3  # after a message has come, a device is awake
CORRECTIONS = 3  # not all of a step is stretched, so what is stretched is corrected more than once
FORMAT = 6  # of the stored file; another one is measured anew

_AXES = {Axis.BATCH: "batch", Axis.CHANNELS: "channels", Axis.ROWS: "map", Axis.COLUMNS: "map"}

Inputs = tuple[tuple[int, ...], ...]


def profile_local(
    model: str,
    inputs: Inputs,
    batch: int,
    num_devices: int,
    *,
    threads: int = 1,
    thrifty: bool = False,
    fresh: bool = False,
) -> Cluster:
    """That many local devices with what was measured of them on this model, before or, if `fresh`, now."""
    graph = graph_of(model, inputs, batch)
    path = _stored(graph, num_devices, threads, thrifty)
    if not fresh and (found := _read(path)) is not None:
        return found
    job = PlansJob(model, inputs, rehearsed_plans(graph, num_devices), ROUNDS, 0, thrifty)
    cluster, _ = rehearse(job, graph, num_devices, threads)
    cluster = with_trials(job, graph, cluster, threads)
    _write(path, cluster)
    return cluster


def rehearse(
    job: PlansJob, graph: Graph, num_devices: int, threads: int = 1
) -> tuple[Cluster, dict[Plan, list[float]]]:
    """That many local devices as measured now, and the seconds of each plan that was stepped besides."""
    cluster = local_cluster(num_devices)
    said = launch("rehearse", encode(job), cluster.names, threads=threads)
    cluster, wire = _link(cluster, _of(said, "exchanged"))
    profile = profile_of(said, graph.layers[0].shape[0], threads, job.thrifty, wire)
    cluster = replace(cluster, profiles=tuple(replace(profile, device=name) for name in cluster.names))
    together = {d: [e for e in events if e.get("together")] for d, events in said.items()}
    cluster = _calibrated(cluster, graph, slowest(together, "rehearsed", job.plans))
    return cluster, slowest(said, "stepped", job.stepped)


def with_trials(job: PlansJob, graph: Graph, cluster: Cluster, threads: int = 1) -> Cluster:
    """The cluster and how long the most promising plans really take, stepped in turns.

    Forecasts err by more than such plans differ, so what was tried decides between them.
    """
    found = promising(api.choose(graph, cluster))
    if len(found) < 2:
        return cluster
    tried = replace(job, plans=tuple(found), rounds=TRIAL_ROUNDS)
    said = launch("compare", encode(tried), cluster.names, threads=threads)
    took = slowest(said, "stepped", tried.plans)
    trials = tuple(Trial(name, plan, median(took[plan])) for plan, name in found.items())
    return replace(cluster, trials=tuple(sorted(trials, key=lambda trial: trial.seconds)))


def promising(decision: Decision) -> dict[Plan, str]:
    """The plans worth a trial, the shortest forecast first, and what they are called."""
    fitting = [o for o in (decision.best, *decision.others) if isinstance(o, Option) and o.fits]
    fitting.sort(key=lambda option: option.cost.seconds)
    likely = [o for o in fitting if o.cost.seconds <= PROMISING * fitting[0].cost.seconds]
    names = {o.plan: o.name for o in sorted(likely, key=lambda o: o.name != "auto")}  # its own, if it has one
    return {o.plan: names[o.plan] for o in likely[:MOST_TRIED]}


def slowest(said: dict[str, list[Event]], event: str, plans: Sequence[Plan]) -> dict[Plan, list[float]]:
    """Seconds of every plan of which its devices said this: of each round, those of the slowest device."""
    found = {}
    for number, plan in enumerate(plans):
        events = [
            item
            for device in plan.devices
            for item in said.get(device, [])
            if item["event"] == event and item["plan"] == number
        ]
        if events:
            found[plan] = [max(row) for row in zip(*(item["seconds"] for item in events), strict=True)]
    return found


def graph_of(model: str, inputs: Inputs, batch: int) -> Graph:
    """Of a model by name, without its weights."""
    with torch.device("meta"):
        built = load_model(model)
    return api.trace(built, *examples(inputs, batch, torch.float32)).graph


def memory_of(job: MeasureJob, within: Mapping[str, Sequence[str]] | None = None) -> dict[str, Event]:
    """What the process of each device said of its memory, after its steps."""
    said = launch("measure", encode(job), job.plan.devices, within=within)
    return {device: next(e for e in events if e["event"] == "memory") for device, events in said.items()}


def _calibrated(cluster: Cluster, graph: Graph, rehearsed: dict[Plan, list[float]]) -> Cluster:
    """Latency and stretches such that the plans rehearsed among the devices take as long as they did.

    The clock of a thread misses what the system does for it elsewhere. Each axis that was cut has a stretch
    of its own. Messages do not tell of which they are, and take the mean.
    """
    took: dict[str, tuple[Lowered, float]] = {}
    for plan, seconds in rehearsed.items():
        cuts = plan.segments[0].layout.cuts  # of nearly all; where maps are single pixels, samples are cut
        if len(cuts) == 1:
            took.setdefault(_AXES[cuts[0].axis], (api.lower(graph, plan), median(seconds)))
    if len(took) > 1:  # one alone tells nothing of messages
        cluster = replace(cluster, latency_s=_waking_latency(cluster, list(took.values())))
    stretches = dict.fromkeys(took, 1.0)
    for _ in range(CORRECTIONS):
        for axis, (lowered, usual) in took.items():
            foreseen = simulate(lowered, cluster, memory=False).cost.seconds
            stretch = stretches[axis] * usual / foreseen
            stretches[axis] = min(max(stretch, 1 / MOST_STRETCHED), MOST_STRETCHED)
        profiles = tuple(replace(each, stretches=tuple(stretches.items())) for each in cluster.profiles)
        cluster = replace(cluster, profiles=profiles)
    return cluster


def _waking_latency(cluster: Cluster, took: list[tuple[Lowered, float]]) -> float:
    """The latency of messages for which a device waits asleep, which plans with more of them tell.

    A device that plays ball hardly sleeps, and is awake sooner. What all plans take longer alike is rather a
    stretch, but so much the less likely the larger it is.
    """

    def misfit(latency_s: float) -> float:
        slower = replace(cluster, latency_s=latency_s)
        longer = [log(usual / simulate(each, slower, memory=False).cost.seconds) for each, usual in took]
        alike = sum(longer) / (len(longer) + UNLIKELY)
        return sum((each - alike) ** 2 for each in longer) + UNLIKELY * alike**2

    bounds = (cluster.latency_s, cluster.latency_s + LATEST_S)
    from scipy.optimize import minimize_scalar  # 36 MB that no device needs to train

    return float(minimize_scalar(misfit, bounds=bounds, method="bounded", options={"xatol": 2e-5}).x)


def profile_and_show(
    model: str, input: str | None, batch: int, num_devices: int, threads: int | None
) -> tuple[Any, RenderableType]:
    """Measure a model anew; the facts, and the same as a table."""
    inputs = parse_inputs(input or default_input(model))
    chosen = threads or threads_each(num_devices)
    cluster = profile_local(model, inputs, batch, num_devices, threads=chosen, fresh=True)
    return encode(cluster), profile_view(model, cluster)


def threads_each(num_devices: int) -> int:
    """Threads of each of so many local processes, as `train` has them."""
    return max(torch.get_num_threads() // num_devices, 1)


def known_local(graph: Graph, num_devices: int, *, threads: int, thrifty: bool) -> Cluster:
    """That many local devices, with what was measured of them on this model, working so, if it was."""
    found = _read(_stored(graph, num_devices, threads, thrifty))
    return found if found is not None else local_cluster(num_devices)


def rehearsed_plans(graph: Graph, num_devices: int) -> tuple[Plan, ...]:
    """The whole on one device, and the usual cuts among as many as there are and twice as many."""
    plans = [api.plan(graph, 1, "single")]
    for count in dict.fromkeys((max(num_devices, 2), 2 * num_devices)):
        for strategy in CUTS:
            try:
                plans.append(api.plan(graph, count, strategy, loss=tuple(Axis)))  # of many sizes
            except RequestError:  # the model cannot be cut so
                continue
    return tuple(plans)


def _of(said: dict[str, list[Event]], event: str) -> list[Event]:
    return [item for events in said.values() for item in events if item["event"] == event]


def profile_of(
    said: dict[str, list[Event]], batch: int, threads: int, thrifty: bool, wire: tuple[Line, ...]
) -> Profile:
    """One profile from what all processes said, since the devices are alike."""
    layers, steps = [], []
    for event in _of(said, "rehearsed"):
        layers += [decode(LayerSample, item) for item in event["layers"]]
        found = [decode(StepSample, item) for item in event["steps"]]
        steps += found if event["together"] else [_with_wire(sample, wire) for sample in found]
    bare = int(median(event["num_bytes"] for event in _of(said, "bare")))
    lines = (*fit_lines(steps), *(line for line in wire if line.step in (POST, CARRY)))
    return Profile("", threads, thrifty, bare, fit_timings(layers, batch), lines)


def _with_wire(sample: StepSample, wire: tuple[Line, ...]) -> StepSample:
    """A step rehearsed alone did not touch the network: here with what that takes of a process's time."""
    verb = sample.step.split()[0]
    name = POST if verb == "send" else verb
    extra = sum(line.seconds(sample.num_bytes) for line in wire if line.step == name)
    return replace(sample, seconds=sample.seconds + extra)


def _link(cluster: Cluster, exchanged: list[Event]) -> tuple[Cluster, tuple[Line, ...]]:
    """The cluster with latency and rate as measured, and what messages cost a process's own time."""
    if not exchanged:
        return cluster, ()
    latency = _settled(exchanged[0]["there_and_back_s"]) / 2
    both_ways = zip(*(event["both_ways_s"] for event in exchanged), strict=True)
    rate = (LARGE_BYTES - SMALL_BYTES) / max(_settled([max(pair) for pair in both_ways]) - latency, 1e-9)
    lines = fit_lines(decode(StepSample, item) for event in exchanged for item in event["samples"])
    return replace(cluster, latency_s=latency, bytes_per_s=rate), lines


def wire_lines(said: dict[str, list[Event]]) -> tuple[Line, ...]:
    """What messages cost the time of two processes that exchanged some."""
    return _link(local_cluster(2), _of(said, "exchanged"))[1]


def _settled(seconds: list[float]) -> float:
    """The median of the faster half: what else the machine did at the time is in the slower one."""
    return median(sorted(seconds)[: (len(seconds) + 1) // 2])


# ---- what was measured before -------------------------------------------------------------------------


def _stored(graph: Graph, num_devices: int, threads: int, thrifty: bool) -> Path:
    """Where the profile of this model on this machine is kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manyhands"
    types = sorted({layer.dtype for layer in graph.layers})  # the digest is the same for all of them
    facts: list[Any] = [FORMAT, platform.node(), torch.__version__, cores_here(), graph_digest(graph)]
    facts += [types, num_devices, threads, thrifty]
    return folder / f"profile-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]}.json"


def _read(path: Path) -> Cluster | None:
    try:
        return decode(Cluster, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _write(path: Path, cluster: Cluster) -> None:
    """Keep it for the next time, if there is a place to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(encode(cluster)))
        part.replace(path)
    except OSError:
        return
