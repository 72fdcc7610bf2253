"""Plans and other ways to train, stepped in turns by the same processes on emulated devices.

Whoever races keeps the memory it frees: what the kernel takes to make pages anew does not follow from how
slow an emulated device is, and would be most for whoever has the largest tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from manyhands import api
from manyhands.emulation.devices import Emulation
from manyhands.emulation.network import PLUG
from manyhands.errors import RunError
from manyhands.ir.cluster import Cluster, cores_here, local_cluster
from manyhands.ir.codec import decode, encode
from manyhands.ir.plan import Plan
from manyhands.ir.profile import CARRY, POST, Line
from manyhands.loading import load_model
from manyhands.measurements import Part, PlansJob
from manyhands.measuring import Inputs, graph_of, profile_of, rehearsed_plans, wire_lines
from manyhands.pacing import lateness_s
from manyhands.peers import PEERS, Arena, Step
from manyhands.planning.explaining import spent_by_kind
from manyhands.profiling.device import busy
from manyhands.runtime.allocator import KEEPING
from manyhands.runtime.formats import arranged
from manyhands.runtime.ranks import Event, Place, launch, say
from manyhands.runtime.worker import Worker
from manyhands.tasks import connect, examples, random_inputs
from manyhands.tracing.graphs import trace

COLD = 2  # steps at first before one counts: memory is still got
WARM_UP = 2  # rounds that do not count where peers take part: memory is still got, and PowerSGD begins
Contestant = tuple[str, Step | None, Callable[[], None]]  # name, step, and what to do after steps in a row
REHEARSED = 3  # steps of every plan from which forecasts are made: one alone may be anything
PATIENCE_S = 3600.0  # of a contestant that has much to send over a thin wire


@dataclass(frozen=True)
class RaceJob:
    """Contestants by name: plans of ours, and peers. All of them train the same model on the same batch."""

    model: str
    inputs: Inputs  # without the batch
    batch: int
    plans: tuple[tuple[str, Plan], ...]
    peers: tuple[str, ...]
    rounds: int
    sources: tuple[str, ...] = ()  # folders with packages of peers


@dataclass(frozen=True)
class Raced:
    """Seconds of a contestant's steps, of every round those of the slowest device.

    Of our plans also what devices did in a step by their own clocks, on average.
    """

    seconds: tuple[float, ...]
    spent_s: dict[str, float]


def take_part(job: dict[str, Any], place: Place) -> None:
    """One device's part of a race: in every round all devices begin a step of each contestant at once.

    Each makes two, of which the second counts: it has to wait for what the first may have left on its way. In
    the first round there are three.
    Who has nothing to do in it computes meanwhile: emulated devices share cores and caches, which real ones
    do not, so one that is raced alone must not have them for itself.
    """
    given = decode(RaceJob, job)
    workers: dict[str, Worker] = {}
    contestants = [*_plans(given, place, workers), *_peers(given, place)]
    taken: dict[str, list[float]] = {name: [] for name, *_ in contestants}
    spent = {name: [0.0] * len(worker.program.steps) for name, worker in workers.items()}
    warm_up, idle = WARM_UP if given.peers else 0, False
    for number in range(warm_up + given.rounds):
        for name, step, settle in contestants:
            for again in (*(False,) * (1 if number else COLD), True):
                before = list(workers[name].spent_s) if name in workers else []
                with busy(1) if idle else nullcontext():
                    dist.barrier()
                dist.barrier()
                idle = step is None
                start = time.perf_counter()
                if step is not None:
                    step()
                    if number >= warm_up and again:
                        taken[name].append(time.perf_counter() - start)
                        if before:
                            spent[name] = _added(spent[name], workers[name].spent_s, before)
            settle()
    for name, seconds in taken.items():
        if seconds:
            say("raced", name=name, seconds=seconds)
    for name, worker in workers.items():
        each = [seconds / given.rounds for seconds in spent[name]]
        say("spent", name=name, seconds=spent_by_kind(worker.program, each))


def _added(total: list[float], now: list[float], before: list[float]) -> list[float]:
    return [t + n - b for t, n, b in zip(total, now, before, strict=True)]


def _plans(given: RaceJob, place: Place, workers: dict[str, Worker]) -> list[Contestant]:
    if not given.plans:
        return []
    gloo, example = connect(place), examples(given.inputs, given.batch, torch.float32)
    traced = trace(load_model(given.model), example)
    job = PlansJob(given.model, given.inputs, (), 0, 0)
    found: list[Contestant] = []
    for name, plan in given.plans:
        if place.device not in plan.devices:
            found.append((name, None, _nothing))
            continue
        part = Part(traced, plan, place.device, job)
        worker = workers[name] = part.worker(Worker, gloo)
        batch = part.batch()  # arranged before, as images of the peer with the channels last are
        batch.inputs = [arranged(tensor, part.memory_format) for tensor in batch.inputs]
        found.append((name, partial(worker.step, batch), worker.mail.settle))
    return found


def _nothing() -> None:
    pass


def _peers(given: RaceJob, place: Place) -> list[Contestant]:
    sys.path[:0] = given.sources
    (images,) = random_inputs(examples(given.inputs, given.batch, torch.float32), 0)
    arena = Arena(partial(load_model, given.model), images, place.rank, len(place.devices))
    return [(name, PEERS[name].make(arena), _nothing) for name in given.peers]


def race(emulation: Emulation, job: RaceJob) -> dict[str, Raced]:
    """Every contestant's steps."""
    try:
        said = launch(
            "race",
            encode(job),
            emulation.cluster.names,
            within={name: (*before, *KEEPING) for name, before in emulation.within.items()},
            interface=PLUG,
            timeout_s=PATIENCE_S,
        )
    except RunError as error:
        raise RunError(emulation.killed() or str(error)) from None
    raced, spent = (_by_name(said, event) for event in ("raced", "spent"))
    return {
        name: Raced(tuple(max(column) for column in zip(*each, strict=True)), _mean(spent.get(name, [])))
        for name, each in raced.items()
    }


def _by_name(said: Mapping[str, Sequence[Event]], event: str) -> dict[str, list[Any]]:
    """What each device said of a contestant."""
    found: dict[str, list[Any]] = {}
    for each in (each for events in said.values() for each in events if each["event"] == event):
        found.setdefault(each["name"], []).append(each["seconds"])
    return found


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(row[key] for row in rows) / len(rows) for key in (rows[0] if rows else ())}


def foreseeable(
    model: str, inputs: Inputs, batch: int, emulation: Emulation, sharing: tuple[str, ...]
) -> Cluster:
    """The emulated cluster with what a core of this machine takes for the model's layers, slowed down.

    One process rehearses while others keep their cores as busy as a race does; what it takes to send is
    measured between two, and how late devices are for each other among those that share plans.
    """
    graph = graph_of(model, inputs, batch)
    plans = rehearsed_plans(graph, len(emulation.cluster.devices))
    job = PlansJob(model, inputs, plans, REHEARSED, 0, turns=1)
    with busy(min(cores_here(), len(emulation.cluster.devices)) - 1):
        said = _rehearsed(job, 1)
    between = _rehearsed(_small_job(), 2)
    profile = profile_of(said, batch, 1, False, _one_core(wire_lines(between)))
    profiles = tuple(
        replace(profile, device=name).slower(1 / emulation.cores[name]) for name in emulation.cluster.names
    )
    return replace(emulation.cluster, profiles=profiles, latency_s=lateness_s(emulation, sharing))


def _rehearsed(job: PlansJob, num_processes: int) -> dict[str, list[Event]]:
    names = local_cluster(num_processes).names
    return launch("rehearse", encode(job), names, within=dict.fromkeys(names, KEEPING))


def _small_job() -> PlansJob:
    """What messages cost does not depend on the model, so two processes have a small one."""
    shape = (1, 28, 28)
    single = api.plan(graph_of("demo", (shape,), 8), 1, "single")
    return PlansJob("demo", (shape,), (single,), 1, 0, turns=1)


def _one_core(wire: tuple[Line, ...]) -> tuple[Line, ...]:
    """Who has one core carries messages with it as well as computing."""
    lines = {line.step: line for line in wire}
    if POST in lines and CARRY in lines:
        post, carry = lines[POST], lines.pop(CARRY)
        lines[POST] = Line(POST, post.fixed_s + carry.fixed_s, post.per_byte_s + carry.per_byte_s)
    return tuple(lines.values())
