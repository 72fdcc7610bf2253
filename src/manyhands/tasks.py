"""What the processes of a run do, each its part: the stages joined, inside a rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from manyhands.api import lower, make_worker
from manyhands.data.idx import fashion_mnist_small
from manyhands.errors import RequestError
from manyhands.ir.codec import decode
from manyhands.ir.geometry import Tile
from manyhands.ir.plan import Plan
from manyhands.loading import load_model
from manyhands.planning.lowering import Lowered
from manyhands.runtime.allocator import return_freed_memory
from manyhands.runtime.computing import Batch
from manyhands.runtime.formats import faster_format
from manyhands.runtime.process import current_memory, peak_memory
from manyhands.runtime.ranks import Place, say
from manyhands.runtime.transport import Gloo
from manyhands.runtime.worker import Worker
from manyhands.tracing.graphs import trace
from manyhands.verifying import Held, Outcome, make_trial
from manyhands.verifying import train as train_trial


@dataclass(frozen=True)
class VerifyJob:
    """Three steps of a model by a plan; the outcome goes into `folder`, one file a device."""

    model: str
    inputs: tuple[tuple[int, ...], ...]  # without the batch
    plan: Plan
    steps: int
    seed: int
    learning_rate: float
    folder: str


@dataclass(frozen=True)
class TrainJob:
    """The demonstration: a small network on the images that come with the package."""

    model: str
    plan: Plan
    steps: int
    batch: int
    learning_rate: float
    seed: int
    folder: str


@dataclass(frozen=True)
class MeasureJob:
    """Steps on random data, for time and memory; thrifty: freed memory goes back at once, at some cost."""

    model: str
    inputs: tuple[tuple[int, ...], ...]
    plan: Plan
    steps: int
    seed: int
    thrifty: bool = False


def examples(inputs: tuple[tuple[int, ...], ...], batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(batch, *shape, dtype=dtype, device="meta") for shape in inputs)


def join_plan(
    model: nn.Module, example: tuple[Tensor, ...], plan: Plan, transport: Gloo
) -> tuple[Worker, Lowered]:
    """This rank's worker, connected to the others."""
    traced = trace(model, example)
    lowered = lower(traced.graph, plan)
    worker = make_worker(traced, lowered, model, transport.device, transport)
    worker.use_format(faster_format(traced.graph, worker.territory, example[0].dtype))
    return worker, lowered


def connect(place: Place) -> Gloo:
    return Gloo(place.device, place.devices, place.timeout_s)


def verify(job: list[Any], place: Place) -> None:
    """Several trials one after another, so that one start of the processes serves many."""
    transport = connect(place)
    for index, item in enumerate(job):
        trial = decode(VerifyJob, item)
        if place.device not in trial.plan.devices:
            continue
        transport.sent_bytes = 0
        model = load_model(trial.model, seed=trial.seed).double()
        example = examples(trial.inputs, trial.plan.batch, torch.float64)
        worker, lowered = join_plan(model, example, trial.plan, transport)
        data = make_trial(lowered.graph, example, steps=trial.steps, seed=trial.seed)
        outcome = train_trial(worker, replace(data, learning_rate=trial.learning_rate))
        outcome = outcome.without_copies(worker.weights)
        save_outcome(outcome, Path(trial.folder) / f"{index}-{place.device}.safetensors")
        say("verified", index=index)


def save_outcome(outcome: Outcome, path: Path) -> None:
    """Every piece under a number; what it is, and the losses, as metadata."""
    kinds = {kind: getattr(outcome, kind) for kind in ("gradients", "parameters", "buffers")}
    pieces = [(kind, held) for kind, all_held in kinds.items() for held in all_held]
    tensors = {str(i): held.tensor.detach().contiguous() for i, (_, held) in enumerate(pieces)}
    facts = {"losses": outcome.losses, "sent_bytes": outcome.sent_bytes, "copies": outcome.copies}
    index = {"pieces": [(kind, held.name, str(held.tile)) for kind, held in pieces]}
    save_file(tensors, path, {"facts": json.dumps(facts | index)})


def demo(job: dict[str, Any], place: Place) -> None:
    """Train on the small Fashion-MNIST; say the loss of every step, and leave the weights in the folder."""
    given = decode(TrainJob, job)
    model = load_model(given.model, seed=given.seed)
    images, labels, *_ = fashion_mnist_small()
    example = (torch.empty(given.batch, 1, *images.shape[1:], device="meta"),)
    worker, _ = join_plan(model, example, given.plan, connect(place))
    worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, given.learning_rate, 0.9))
    worker.seed = given.seed
    for step in range(given.steps):
        for group in worker.optimiser.param_groups if worker.optimiser else ():
            group["lr"] = given.learning_rate * (1 - step / given.steps)
        pixels, targets = pick_batch(images, labels, given.batch, given.seed, step)
        loss = worker.step(Batch((pixels,), lambda outputs, y=targets: cross_entropy(outputs, y), step))  # type: ignore[misc]
        say("step", step=step, loss=loss, sent_bytes=worker.transport.sent_bytes)
    worker.mail.settle()
    outcome = Outcome([])
    for name, tensor in worker.weights.tensors.items():
        outcome.parameters.append(Held(name, worker.weights.tiles[name], tensor.detach()))
    save_outcome(outcome, Path(given.folder) / f"{place.device}.safetensors")
    say("memory", peak_bytes=peak_memory())


def cross_entropy(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs[0], targets)


def pick_batch(images: Any, labels: Any, batch: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step, from (seed, step) alone, so that every device picks the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    chosen = torch.randperm(len(labels), generator=generator)[:batch].numpy()
    pixels = torch.from_numpy(images[chosen]).float().div_(255).sub_(0.2860).div_(0.3530)
    return pixels[:, None], torch.from_numpy(labels[chosen]).long()


def measure(job: dict[str, Any], place: Place) -> None:
    """Seconds of each step on random data, and what memory it took."""
    given = decode(MeasureJob, job)
    example = examples(given.inputs, given.plan.batch, torch.float32)
    bare = current_memory()
    if given.thrifty and not return_freed_memory():
        raise RequestError("this system's allocator cannot be told to give freed memory back.")
    worker, _ = join_plan(load_model(given.model, seed=given.seed), example, given.plan, connect(place))
    worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 1e-3, 0.9))
    ready, tiles = current_memory(), worker.territory.inputs
    inputs = tuple(
        torch.randn(tile.shape, generator=torch.Generator().manual_seed(given.seed)) for tile in tiles
    )
    for step in range(given.steps):
        start = time.perf_counter()
        worker.step(Batch(inputs, mean_square, step, tiles, mean_square_part))
        say("step", seconds=time.perf_counter() - start)
    worker.mail.settle()
    parameters = [p for p in worker.weights.tensors.values() if isinstance(p, nn.Parameter)]
    state = worker.optimiser.state if worker.optimiser else {}
    states = [t for s in state.values() for t in s.values() if isinstance(t, Tensor)]
    gradients = [p.grad for p in worker.weights.parameters() if p.grad is not None]
    held = sum(t.numel() * t.element_size() for t in (*parameters, *gradients, *states))
    weights = sum(p.numel() * p.element_size() for p in worker.weights.tensors.values())
    sizes = {"ready_bytes": ready, "weight_bytes": weights, "peak_bytes": peak_memory(), "held_bytes": held}
    say("memory", bare_bytes=bare, sent_bytes=worker.transport.sent_bytes, **sizes)


def measure_plain(job: dict[str, Any], place: Place) -> None:
    """The same by the loop anybody would write, without the engine."""
    given = decode(MeasureJob, job)
    bare = current_memory()
    model = load_model(given.model, seed=given.seed)
    optimiser = torch.optim.SGD(model.parameters(), 1e-3, 0.9)
    ready = current_memory()
    inputs = random_inputs(examples(given.inputs, given.plan.batch, torch.float32), given.seed)
    for _ in range(given.steps):
        start = time.perf_counter()
        optimiser.zero_grad()
        mean_square((model(*inputs),)).backward()
        optimiser.step()
        say("step", seconds=time.perf_counter() - start)
    say("memory", bare_bytes=bare, ready_bytes=ready, peak_bytes=peak_memory())


def random_inputs(example: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in example)


def mean_square(outputs: tuple[Tensor, ...]) -> Tensor:
    """A loss for measurements: it needs no targets."""
    return torch.stack([output.square().mean() for output in outputs]).sum()


def mean_square_part(output: Tensor, tile: Tile, whole: Tile) -> Tensor:
    """The part of it that one tile of an output makes."""
    return output.square().sum() / whole.numel


def train(job: dict[str, Any], place: Place) -> None:
    """One device's part of a job file."""
    from manyhands.training.running import train as run  # more than the other tasks need

    run(job, place)


def survey(job: dict[str, Any], place: Place) -> None:
    """One device's part of measuring all devices and the links between them."""
    from manyhands.surveying import SurveyJob, take_part

    take_part(decode(SurveyJob, job), place, connect(place))


def rehearse(job: dict[str, Any], place: Place) -> None:
    """One device's part of several plans, alone and timed."""
    from manyhands.measurements import rehearse as run

    run(job, place)


def compare(job: dict[str, Any], place: Place) -> None:
    """Steps of several plans in turn, timed."""
    from manyhands.measurements import compare as run

    run(job, place)


def race(job: dict[str, Any], place: Place) -> None:
    """Steps of plans and of other ways to train, in turn, timed."""
    from manyhands.racing import take_part

    take_part(job, place)


def pace(job: dict[str, float], place: Place) -> None:
    """Rounds of work and messages, for how late devices are for each other."""
    from manyhands.pacing import keep_pace

    keep_pace(connect(place), job)


TASKS: dict[str, Callable[[Any, Place], None]] = {"verify": verify, "demo": demo, "measure": measure}
TASKS |= {"plain": measure_plain, "train": train, "survey": survey}
TASKS |= {"rehearse": rehearse, "compare": compare, "race": race, "pace": pace}
