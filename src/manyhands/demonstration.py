"""The demo: print a plan, train by it on local processes, and hold the result against plain PyTorch."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from manyhands import api
from manyhands.data.idx import fashion_mnist_small
from manyhands.errors import RunError
from manyhands.ir.cluster import local_cluster
from manyhands.ir.codec import encode
from manyhands.ir.geometry import Tile
from manyhands.ir.plan import Plan
from manyhands.loading import load_model
from manyhands.planning.summary import summarise
from manyhands.proving import load_outcome
from manyhands.reporting.text import amount, plan_view
from manyhands.runtime.ranks import Event, launch
from manyhands.tasks import TrainJob, pick_batch
from manyhands.verifying import Difference

BATCH, LEARNING_RATE, SEED = 64, 0.1, 0


def demonstrate(steps: int, strategy: str, num_devices: int) -> None:
    """Plan, train, compare, report."""
    console = Console()
    cluster = local_cluster(num_devices)
    traced = api.trace(load_model("demo"), torch.empty(BATCH, 1, 28, 28, device="meta"))
    plan = api.plan(traced.graph, cluster, strategy)
    console.print(plan_view(summarise(api.lower(traced.graph, plan), cluster)))
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        job = TrainJob("demo", plan, steps, BATCH, LEARNING_RATE, SEED, folder)
        start = time.perf_counter()
        losses, sent, peaks = _train(console, job)
        seconds = time.perf_counter() - start
        model = _merged(Path(folder), plan.devices)
    console.print(
        f"\nTrained {steps} steps of {BATCH} images on {len(plan.devices)} processes in {seconds:.0f} s, "
        f"start included; {amount(sum(sent.values()) / steps)} on the network a step; "
        f"peak memory of a process {amount(max(peaks.values()))}."
    )
    console.print(f"Accuracy on 500 test images it has not seen: {_accuracy(model):.1%}")
    with console.status("the same plan in float64 against plain PyTorch on one device ..."):
        difference = _verify(plan)
    verdict = "exact" if difference.exact else f"NOT exact, first in {difference.first_layer or 'the loss'}"
    console.print(
        f"Three steps of this plan in float64 against plain PyTorch on one device: {verdict}; "
        f"losses, gradients, weights and statistics differ by at most {difference.worst:.0e}."
    )
    if not difference.exact:
        raise RunError("the plan does not train like one device. Please report this.")


def _verify(plan: Plan) -> Difference:
    model, images = load_model("demo", seed=SEED).double(), torch.empty(BATCH, 1, 28, 28, dtype=torch.float64)
    return api.verify(model, (images,), plan)


def _train(console: Console, job: TrainJob) -> tuple[list[float], dict[str, int], dict[str, int]]:
    """Run the processes with a progress bar: losses, bytes sent and peak memory by device."""
    losses: dict[int, float] = {}
    sent: dict[str, int] = {}
    peaks: dict[str, int] = {}
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=job.steps, loss="...")

        def on_event(device: str, event: Event) -> None:
            if event["event"] == "memory":
                peaks[device] = event["peak_bytes"]
            elif event["event"] == "step":
                sent[device] = event["sent_bytes"]
                if event["loss"] is not None and event["step"] not in losses:
                    losses[event["step"]] = event["loss"]
                    bar.update(task, completed=event["step"] + 1, loss=f"{event['loss']:.3f}")

        launch("demo", encode(job), job.plan.devices, on_event)
    return [losses[step] for step in sorted(losses)], sent, peaks


def _merged(folder: Path, devices: tuple[str, ...]) -> nn.Module:
    """The whole model from every device's pieces."""
    model = load_model("demo", seed=SEED)
    state: dict[str, Tensor] = dict(model.state_dict())
    for device in devices:
        for held in load_outcome(folder / f"{device}.safetensors").parameters:
            full = state[held.name]
            full[held.tile.within(Tile.whole(full.shape))] = held.tensor
    model.load_state_dict(state)
    return model


def _accuracy(model: nn.Module) -> float:
    _, _, images, labels = fashion_mnist_small()
    pixels, targets = pick_batch(images, labels, len(labels), SEED, 0)
    with torch.no_grad():
        return float((model.eval()(pixels).argmax(1) == targets).float().mean())
