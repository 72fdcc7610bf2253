"""What the processes of a measurement do: rehearse plans, send each other messages, step plans in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from manyhands.api import lower, make_worker
from manyhands.errors import RequestError
from manyhands.ir.codec import decode, encode
from manyhands.ir.geometry import Tile
from manyhands.ir.plan import Plan
from manyhands.ir.profile import CARRY, POST, StepSample
from manyhands.loading import load_model
from manyhands.runtime.allocator import return_freed_memory
from manyhands.runtime.formats import faster_format
from manyhands.runtime.process import current_memory
from manyhands.runtime.ranks import Place, say
from manyhands.runtime.rehearsing import Rehearsal, Round, Silence
from manyhands.runtime.transport import Gloo
from manyhands.runtime.weights import split_weights
from manyhands.runtime.worker import Batch, Worker
from manyhands.tasks import connect, examples, mean_square
from manyhands.tracing.graphs import Traced, trace

SMALL_BYTES, LARGE_BYTES, NUM_SMALL, NUM_LARGE = 1 << 10, 1 << 20, 100, 20
TURNS = 3  # of every plan in a rehearsal: a machine is not equally fast all the time
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
Told = TypeVar("Told")


@dataclass(frozen=True)
class PlansJob:
    """Plans to be rehearsed or compared on random data; thrifty: freed memory goes back at once."""

    model: str
    inputs: tuple[tuple[int, ...], ...]  # without the batch
    plans: tuple[Plan, ...]
    rounds: int
    seed: int
    thrifty: bool = False
    stepped: bool = False  # in a rehearsal: plans for just these devices are also stepped as in training


@dataclass
class _Heard:
    """What was heard of a plan in the turns so far; stepped: as in training, with nothing timed inside."""

    rounds: list[Round] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stepped: list[float] = field(default_factory=list)


def rehearse(job: dict[str, Any], place: Place) -> None:
    """Say the samples of every plan, from this process's device of it, and those of messages.

    The plans are rehearsed in turns, so that a machine that becomes slower meanwhile is so for all of them.
    With one thread, the clock is that of the thread: it stands still while others are waited for, and is not
    disturbed by what else the machine does. So a plan for just these devices is run among them, for real.
    """
    given, gloo = decode(PlansJob, job), connect(place)
    _be_thrifty(given.thrifty)
    example = examples(given.inputs, given.plans[0].batch, torch.float32)
    traced = trace(load_model(given.model, seed=given.seed), example)
    say("bare", num_bytes=current_memory())
    heard = [_Heard() for _ in given.plans]
    for turn in range(TURNS):
        for number, plan in enumerate(given.plans):
            if len(plan.devices) == 1 and place.rank:  # who computes alone is not disturbed by the others
                for _ in range(given.rounds + 1):
                    dist.barrier()
                continue
            together = torch.get_num_threads() == 1 and plan.devices == place.devices
            device, here = plan.devices[place.rank % len(plan.devices)], heard[number]
            worker = _rehearsal(traced, plan, device, gloo if together else Silence(), given)
            rounds, seconds = _rounds(worker, worker.rehearse, given)
            here.rounds += rounds
            here.seconds += seconds
            if given.stepped and together:
                model = load_model(given.model, seed=given.seed)
                plain = make_worker(traced, lower(traced.graph, plan), model, device, gloo)
                _make_ready(plain)
                here.stepped += _rounds(plain, plain.step, given)[1]
            if turn == TURNS - 1:
                layers, steps = worker.samples(here.rounds)
                times = {"seconds": here.seconds, "stepped": here.stepped}
                samples = {"layers": encode(layers), "steps": encode(steps)}
                say("rehearsed", plan=number, together=together, **times, **samples)
    if len(place.devices) > 1:
        _exchange(gloo, place)


def _be_thrifty(thrifty: bool) -> None:
    if thrifty and not return_freed_memory():
        raise RequestError("this system's allocator cannot be told to give freed memory back.")


def _rehearsal(
    traced: Traced, plan: Plan, device: str, transport: Gloo | Silence, given: PlansJob
) -> Rehearsal:
    lowered = lower(traced.graph, plan)
    territory, program = lowered.territory(device), lowered.program(device)
    weights = split_weights(load_model(given.model, seed=given.seed), traced.graph, territory)
    worker = Rehearsal(traced.graph, program, territory, weights, traced.functions, traced.inplace, transport)
    worker.clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    _make_ready(worker)
    return worker


def _make_ready(worker: Worker) -> None:
    worker.use_format(faster_format(worker.graph, worker.territory, torch.float32))
    worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 1e-3, 0.9))


def _random_batch(worker: Worker, seed: int) -> Batch:
    tiles: tuple[Tile, ...] = worker.territory.inputs
    generator = torch.Generator().manual_seed(seed)
    return Batch(tuple(torch.randn(tile.shape, generator=generator) for tile in tiles), mean_square, 0, tiles)


def _rounds(worker: Worker, step: Callable[[Batch], Told], given: PlansJob) -> tuple[list[Told], list[float]]:
    """What some steps return, and the seconds of each by the clock on the wall. The first warms up."""
    batch = _random_batch(worker, given.seed)
    told, seconds = [], []
    for _ in range(given.rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        told.append(step(batch))
        seconds.append(time.perf_counter() - start)
    return told[1:], seconds[1:]


def compare(job: dict[str, Any], place: Place) -> None:
    """Say the seconds of every step, and how many of them were spent computing.

    Each round has two steps of every plan, which all devices begin at once. The second counts: the first
    finds the caches and the heap as another plan left them, which no training does.
    """
    given = decode(PlansJob, job)
    _be_thrifty(given.thrifty)
    example = examples(given.inputs, given.plans[0].batch, torch.float32)
    traced, transport = trace(load_model(given.model, seed=given.seed), example), connect(place)
    ready: list[tuple[Worker, Batch] | None] = []
    for plan in given.plans:
        ready.append(None)
        if place.device in plan.devices:
            model = load_model(given.model, seed=given.seed)
            worker = make_worker(traced, lower(traced.graph, plan), model, place.device, transport)
            _make_ready(worker)
            ready[-1] = worker, _random_batch(worker, given.seed)
    for _ in range(given.rounds + 1):  # the first warms up
        for number, own in enumerate(ready):
            for _ in range(2):
                dist.barrier()
                start, started = time.perf_counter(), time.thread_time()
                if own is not None:
                    worker, batch = own
                    worker.step(batch)
                seconds, busy_s = time.perf_counter() - start, time.thread_time() - started
            say("step", plan=number, seconds=seconds, busy_s=busy_s)


def _exchange(gloo: Gloo, place: Place) -> None:
    """The first two devices say the latency and rate of messages between them, and what these cost them."""
    pair = dist.new_group([0, 1])
    if place.rank > 1:
        return
    mail = _Mail(gloo, place.devices[1 - place.rank], pair)
    there_and_back = mail.play(SMALL_BYTES, NUM_SMALL, serve=place.rank == 0)
    both_ways = mail.exchange(LARGE_BYTES, NUM_LARGE)
    costs = tuple(sample for size in MESSAGE_BYTES for sample in mail.costs(size, 10))
    say("exchanged", there_and_back_s=there_and_back, both_ways_s=both_ways, samples=encode(costs))


class _Mail:
    """Two processes that send each other messages, both at the same time."""

    def __init__(self, gloo: Gloo, other: str, pair: Any) -> None:
        self.gloo, self.other, self.pair, self.tag = gloo, other, pair, 0

    def play(self, num_bytes: int, rounds: int, *, serve: bool) -> list[float]:
        """Seconds of a message there and one back; one process serves, the other returns."""
        ball, seconds = torch.zeros(num_bytes // 4), []
        for _ in range(rounds):
            pending = self._expect(torch.empty_like(ball))
            dist.barrier(self.pair)
            start = time.perf_counter()
            if not serve:
                pending.wait()
            self.gloo.send(ball, self.other, self.tag)
            if serve:
                pending.wait()
            seconds.append(time.perf_counter() - start)
            self.gloo.flush()
        return seconds

    def exchange(self, num_bytes: int, rounds: int) -> list[float]:
        """Seconds from handing a message over until one as large has come, all sending at once."""
        sent, came = (torch.zeros(num_bytes // 4) for _ in range(2))
        seconds = []
        for _ in range(rounds):
            pending = self._expect(came)
            dist.barrier(self.pair)
            start = time.perf_counter()
            self.gloo.send(sent, self.other, self.tag)
            pending.wait()
            seconds.append(time.perf_counter() - start)
            self.gloo.flush()
        return seconds

    def costs(self, num_bytes: int, rounds: int) -> list[StepSample]:
        """What expecting, handing over and picking up a message take of this thread, and of the others."""
        samples = []
        sent, came = (torch.zeros(num_bytes // 4) for _ in range(2))
        for _ in range(rounds):
            pending, expecting_s = _timed(lambda: self._expect(came))
            dist.barrier(self.pair)
            process_s, thread_s = time.process_time(), time.thread_time()
            _, posting_s = _timed(lambda: self.gloo.send(sent, self.other, self.tag))
            _, picking_s = _timed(pending.wait)
            self.gloo.flush()
            carrying_s = (time.process_time() - process_s) - (time.thread_time() - thread_s)
            times = {"expect": expecting_s, POST: posting_s, "receive": picking_s, CARRY: carrying_s}
            samples += [StepSample(step, num_bytes, seconds) for step, seconds in times.items()]
        return samples

    def _expect(self, buffer: torch.Tensor) -> Any:
        self.tag += 1
        return self.gloo.expect(buffer, self.other, self.tag)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the seconds that this thread worked for it."""
    start = time.thread_time()
    result = call()
    return result, time.thread_time() - start
