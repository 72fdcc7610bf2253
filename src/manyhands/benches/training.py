"""Does `manyhands train` learn what a plain PyTorch loop learns? One job, both ways, on the same batches."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from manyhands.data.batches import Loader
from manyhands.training import preparing
from manyhands.training.jobs import EvaluateTable, Job
from manyhands.training.losses import choose_optimiser, make_loss, make_metric
from manyhands.training.recording import Recorder
from manyhands.training.schedules import Schedule
from manyhands.training.starting import make_ready, train

COMPARED_STEPS = 20
GENTLE_RATE = 1e-5
LOSS_LIMIT = 1e-4  # of the first steps at the gentle rate, in float32
METRIC_LIMIT = 0.01  # one point of accuracy


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training against plain PyTorch: losses of the first steps, and how good it got in the end.

    In float32 a rounding that flips one ReLU changes gradients in their third digit, and training at a usual
    rate makes that grow: plain PyTorch with its channels last differs from itself as much. So losses are
    compared at a gentle rate, where what is compared is the arithmetic; at the job's own rate they are shown.
    """

    way: str
    gentle_difference: float
    difference: float
    last_loss: float
    metric: str
    value: float
    plain_value: float
    judged: bool  # or shown for comparison

    @property
    def within(self) -> bool:
        near = abs(self.value - self.plain_value) <= METRIC_LIMIT
        return not self.judged or (near and self.gentle_difference <= LOSS_LIMIT)


def run(job: Job, strategies: tuple[str, ...], tell: Callable[[str], None]) -> tuple[Row, ...]:
    """The job by plain PyTorch, by plain PyTorch in another order of memory, then by each strategy."""
    gentle = _gentle(job)

    def watch(name: str) -> Callable[[int, int], None]:
        return lambda step, of: tell(f"{name}, step {step} of {of}")

    slow, _, _ = plain(gentle, watch("plain, gentle"))
    losses, name, value = plain(job, watch("plain"))
    rows = [Row("plain PyTorch", 0.0, 0.0, losses[-1], name, value, value, False)]

    def add(way: str, calm: list[float], found: list[float], measured: float, judged: bool) -> None:
        differences = (_largest(slow, calm), _largest(losses, found))
        rows.append(Row(way, *differences, found[-1], name, measured, value, judged))

    last = torch.channels_last
    calm, *_ = plain(gentle, watch("plain, channels last, gentle"), last)
    again, _, measured = plain(job, watch("plain, channels last"), last)
    add("plain PyTorch, channels last", calm, again, measured, False)
    for strategy in strategies:
        calm, _ = _by_plan(gentle.model_copy(update={"strategy": strategy}), tell)
        found, measured = _by_plan(job.model_copy(update={"strategy": strategy}), tell)
        add(strategy, calm, found, measured, True)
    return tuple(rows)


def _gentle(job: Job) -> Job:
    """The first steps of the job at a rate at which rounding does not grow."""
    optimizer = job.optimizer.model_copy(update={"lr": GENTLE_RATE})
    evaluate = EvaluateTable(images=job.batch)
    changes = {"optimizer": optimizer, "schedule": Schedule(), "evaluate": evaluate}
    return job.model_copy(update=changes | {"steps": COMPARED_STEPS, "epochs": None})


def _largest(one: list[float], other: list[float]) -> float:
    pairs = zip(one[:COMPARED_STEPS], other[:COMPARED_STEPS], strict=True)
    return max(abs(a - b) for a, b in pairs)


def plain(
    job: Job,
    tell: Callable[[int, int], None],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[list[float], str, float]:
    """The loop anybody would write; only the batches come from the same loader."""
    train_set, test_set = preparing.datasets(job, "")
    facts = preparing.find_facts(job, train_set, test_set)
    model = preparing.build_model(job, facts).to(memory_format=memory_format)  # type: ignore[call-overload]
    loss_of = make_loss(job.loss, facts.anchors, facts.num_classes or 1)
    choice = choose_optimiser(job.optimizer.name, job.optimizer.model_dump(exclude={"name"}))
    optimiser = choice.make(list(model.parameters()))
    dtype, losses, num_steps = preparing.precision(job)[0], [], facts.num_steps(job)
    with Loader(train_set, preparing.recipe(job, training=True), job.batch, job.seed, job.shuffle) as loader:
        for step in range(num_steps):
            for group in optimiser.param_groups:
                group["lr"] = job.optimizer.lr * job.schedule.at_step(step, num_steps)
            images, targets = loader.take(step)
            optimiser.zero_grad()
            loss = loss_of(model(images.to(dtype)), targets)
            loss.backward()
            if job.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimiser.step()
            losses.append(float(loss.detach()))
            tell(step + 1, num_steps)
    threshold = job.evaluate.threshold if job.evaluate else 0.5
    metric = make_metric(job.loss, loss_of, facts.anchors, facts.num_classes or 1, threshold)
    assert test_set is not None
    model.eval()
    evaluated = preparing.recipe(job, training=False)
    with Loader(test_set, evaluated, job.batch, 0, False, training=False) as loader, torch.no_grad():
        for number in range(loader.steps_per_epoch):
            images, targets = loader.take(number)
            valid = loader.valid(number)
            metric.add(model(images.to(dtype))[:valid], targets[:valid])
    return losses, metric.name, metric.value()


def _by_plan(job: Job, tell: Callable[[str], None]) -> tuple[list[float], float]:
    """Losses of all steps and the metric in the end, by `manyhands train`."""
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        job = job.model_copy(update={"folder": folder, "save": f"{folder}/model.safetensors"})
        start = make_ready(job, None, resume=False)
        recorder = _Telling(Path(folder), job.strategy, tell)
        summary = train(start, recorder)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["loss"] for event in events if event["event"] == "step"], summary["value"]


class _Telling(Recorder):
    """A recorder that shows nothing itself."""

    def __init__(self, folder: Path, name: str, tell: Callable[[str], None]) -> None:
        super().__init__(folder, {}, quiet=True, console=Console(quiet=True))
        self.name, self.tell, self.num_steps = name, tell, 0

    def event(self, device: str, event: dict[str, Any]) -> None:
        super().event(device, event)
        self.num_steps = event.get("num_steps", self.num_steps)
        if event["event"] == "step":
            self.tell(f"{self.name}, step {event['step']} of {self.num_steps}")


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"within": row.within} for row in rows]


def table(rows: tuple[Row, ...], job: Job) -> Table:
    data = job.data.partition(":")[0]
    table = Table(title=f"{job.model} on {data}: the same job by plans and by plain PyTorch")
    first = f"first {COMPARED_STEPS} losses differ by"
    for heading in ("way", f"{first}, at rate {GENTLE_RATE:g}", f"{first}, at the job's rate", "last loss"):
        table.add_column(heading)
    table.add_column(rows[0].metric)
    table.add_column("within")
    for row in rows:
        verdict = "" if not row.judged else "yes" if row.within else "NO"
        numbers = (f"{row.gentle_difference:.1e}", f"{row.difference:.1e}", f"{row.last_loss:.4f}")
        table.add_row(row.way, *numbers, f"{row.value:.4f}", verdict)
    table.caption = f"limits: {LOSS_LIMIT:g} at the gentle rate, {METRIC_LIMIT:g} of {rows[0].metric}"
    return table
