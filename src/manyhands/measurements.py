"""What the processes of a measurement do: rehearse plans, send each other messages, step plans in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from manyhands.api import lower
from manyhands.errors import RequestError
from manyhands.ir.codec import decode, encode
from manyhands.ir.geometry import Tile
from manyhands.ir.plan import Plan
from manyhands.ir.profile import CARRY, POST, StepSample
from manyhands.loading import load_model
from manyhands.runtime.allocator import keep_freed_memory, return_freed_memory
from manyhands.runtime.computing import Batch
from manyhands.runtime.formats import faster_format
from manyhands.runtime.process import current_memory
from manyhands.runtime.ranks import Place, say
from manyhands.runtime.rehearsing import Rehearsal, Round, Silence
from manyhands.runtime.transport import Gloo
from manyhands.runtime.weights import split_weights
from manyhands.runtime.worker import Worker
from manyhands.tasks import connect, examples, mean_square, mean_square_part
from manyhands.tracing.graphs import Traced, trace

SMALL_BYTES, LARGE_BYTES, NUM_SMALL, NUM_LARGE = 1 << 10, 1 << 20, 100, 20
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
Told = TypeVar("Told")
Kind = TypeVar("Kind", bound=Worker)


@dataclass(frozen=True)
class PlansJob:
    """Plans to be rehearsed or compared on random data; thrifty: freed memory goes back at once."""

    model: str
    inputs: tuple[tuple[int, ...], ...]  # without the batch
    plans: tuple[Plan, ...]
    rounds: int
    seed: int
    thrifty: bool = False
    stepped: tuple[Plan, ...] = ()  # in the turns of a rehearsal, stepped as in training
    turns: int = 3  # of every plan in a rehearsal: a machine is not equally fast all the time


class Part:
    """This process's part of a plan, and what was measured of it in the turns so far.

    In which order numbers lie is decided once, as in training, and not anew in every turn.
    """

    def __init__(self, traced: Traced, plan: Plan, device: str, given: PlansJob) -> None:
        self.traced, self.device, self.given = traced, device, given
        self.lowered = lower(traced.graph, plan)
        self.territory = self.lowered.territory(device)
        self.memory_format = faster_format(traced.graph, self.territory, torch.float32)
        self.rounds: list[Round] = []
        self.seconds: list[float] = []

    def worker(self, kind: type[Kind], transport: Gloo | Silence) -> Kind:
        """A new one, with new weights."""
        graph, program = self.traced.graph, self.lowered.program(self.device)
        weights = split_weights(load_model(self.given.model, seed=self.given.seed), graph, self.territory)
        functions, inplace = self.traced.functions, self.traced.inplace
        worker = kind(graph, program, self.territory, weights, functions, inplace, transport)
        worker.use_format(self.memory_format)
        worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 1e-3, 0.9))
        return worker

    def batch(self) -> Batch:
        tiles: tuple[Tile, ...] = self.territory.inputs
        generator = torch.Generator().manual_seed(self.given.seed)
        images = tuple(torch.randn(tile.shape, generator=generator) for tile in tiles)
        return Batch(images, mean_square, 0, tiles, mean_square_part)

    def run(self, worker: Worker, step: Callable[[Batch], Told]) -> list[Told]:
        """What some steps return; how long each is by the clock on the wall is noted. The first warms up."""
        batch, told = self.batch(), []
        for number in range(self.given.rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            told.append(step(batch))
            self.seconds += [time.perf_counter() - start] if number else []
        worker.mail.settle()
        dist.barrier()  # whoever is ready first does nothing else until all are
        return told[1:]


def _look_on(given: PlansJob) -> None:
    """Do nothing while others run their part."""
    for _ in range(given.rounds + 2):
        dist.barrier()


def rehearse(job: dict[str, Any], place: Place) -> None:
    """Say the samples of every plan, from this process's device of it, and those of messages.

    The plans are rehearsed in turns, so that a machine that becomes slower meanwhile is so for all of them.
    With one thread, the clock is that of the thread: it stands still while others are waited for, and is not
    disturbed by what else the machine does. So a plan for just these devices is run among them, for real.
    """
    given, gloo, traced = _begin(job, place)
    say("bare", num_bytes=current_memory())
    alone = torch.get_num_threads() > 1
    rehearsed = {
        number: Part(traced, plan, plan.devices[place.rank % len(plan.devices)], given)
        for number, plan in enumerate(given.plans)
        if plan.devices[1:] or not place.rank  # who computes alone is not disturbed by the others
    }
    stepped = _own_parts(given.stepped, traced, place, given)
    for turn in range(given.turns):
        for number, plan in enumerate(given.plans):
            if number not in rehearsed:
                _look_on(given)
                continue
            part, together = rehearsed[number], plan.devices == place.devices and not alone
            worker = part.worker(Rehearsal, gloo if together else Silence())
            worker.clock = time.perf_counter if alone else time.thread_time
            part.rounds += part.run(worker, worker.rehearse)
            if turn == given.turns - 1:
                layers, steps = worker.samples(part.rounds)
                samples = {"layers": encode(layers), "steps": encode(steps)}
                say("rehearsed", plan=number, together=together, seconds=part.seconds, **samples)
        for number in range(len(given.stepped)):
            if number in stepped:
                stepper = stepped[number].worker(Worker, gloo)
                stepped[number].run(stepper, stepper.step)
            else:
                _look_on(given)
    for number, part in stepped.items():
        say("stepped", plan=number, seconds=part.seconds)
    if len(place.devices) > 1:
        _exchange(gloo, place)


def _begin(job: dict[str, Any], place: Place) -> tuple[PlansJob, Gloo, Traced]:
    given, gloo = decode(PlansJob, job), connect(place)
    if given.thrifty and not return_freed_memory():
        raise RequestError("this system's allocator cannot be told to give freed memory back.")
    if not given.thrifty:
        keep_freed_memory()
    example = examples(given.inputs, given.plans[0].batch, torch.float32)
    return given, gloo, trace(load_model(given.model, seed=given.seed), example)


def _own_parts(plans: tuple[Plan, ...], traced: Traced, place: Place, given: PlansJob) -> dict[int, Part]:
    """By number, of those plans that this process takes part in."""
    return {
        number: Part(traced, plan, place.device, given)
        for number, plan in enumerate(plans)
        if place.device in plan.devices
    }


def compare(job: dict[str, Any], place: Place) -> None:
    """Say the seconds of the steps of every plan, and how many of them were spent computing.

    Each round has two steps of every plan, which all devices begin at once. The second counts: the first
    finds the caches and the heap as another plan left them, which no training does.
    """
    given, gloo, traced = _begin(job, place)
    parts = _own_parts(given.plans, traced, place, given)
    ready = {number: (part.worker(Worker, gloo), part.batch()) for number, part in parts.items()}
    busy_s: dict[int, list[float]] = {number: [] for number in parts}
    for turn in range(given.rounds + 1):  # the first warms up
        for number in range(len(given.plans)):
            for again in range(2):
                dist.barrier()
                if number in ready:
                    worker, batch = ready[number]
                    start, started = time.perf_counter(), time.thread_time()
                    worker.step(batch)
                    if turn and again:
                        parts[number].seconds.append(time.perf_counter() - start)
                        busy_s[number].append(time.thread_time() - started)
            if number in ready:
                ready[number][0].mail.settle()
    for number, part in parts.items():
        say("stepped", plan=number, seconds=part.seconds, busy_s=busy_s[number])


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
