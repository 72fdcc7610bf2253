"""Does `manyhands train` learn what a plain PyTorch loop learns? One job, both ways, on the same batches."""

from __future__ import annotations

import hashlib
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
from manyhands.errors import RequestError
from manyhands.training import preparing
from manyhands.training.jobs import Job
from manyhands.training.losses import choose_optimiser, make_loss, make_metric
from manyhands.training.recording import Recorder
from manyhands.training.schedules import Schedule
from manyhands.training.starting import make_ready, train

COMPARED_STEPS = 20
GENTLE_RATE = 1e-5
LOSS_LIMIT = 1e-4  # of the first steps at the gentle rate, in float32
DOUBLE_STEPS = 5
DOUBLE_LIMIT = 1e-9  # of the first few at the job's own rate, in float64
METRIC_LIMIT = 0.01  # one point of accuracy


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training against plain PyTorch: losses of the first steps, and how good it got in the end.

    In float32 a rounding that flips one ReLU changes gradients in their third digit, and training at a usual
    rate makes that grow: plain PyTorch with its channels last differs from itself as much. So losses are
    judged at a gentle rate, and at the job's own rate in float64; in float32 at that rate they are shown.
    """

    way: str
    double_difference: float
    gentle_difference: float
    difference: float
    last_loss: float
    metric: str
    value: float | None  # None: it was not run to the end
    plain_value: float
    judged: bool  # or shown for comparison

    @property
    def within(self) -> bool:
        near = self.value is not None and abs(self.value - self.plain_value) <= METRIC_LIMIT
        exact = self.gentle_difference <= LOSS_LIMIT and self.double_difference <= DOUBLE_LIMIT
        return not self.judged or (near and exact)


@dataclass(frozen=True)
class Outcome:
    """One way through the job, or through a part of it: losses of all steps, and the metric in the end."""

    losses: list[float]
    metric: str
    value: float


def run(
    job: Job, strategies: tuple[str, ...], tell: Callable[[str], None], keep: Path | None = None
) -> tuple[Row, ...]:
    """The job by plain PyTorch and by each strategy; its first steps also by plain PyTorch in another order
    of memory, for comparison. What has ended is kept in the folder `keep`, and not done again.
    """
    _refuse_other(job)
    gentle, exact = _gentle(job), _short(job, DOUBLE_STEPS, precision="float64")
    short = _short(job, COMPARED_STEPS)
    kept = _Kept(keep, job)

    def ended(way: str, part: str, work: Callable[[], Outcome]) -> Outcome:
        tell(f"{way}, {part}")
        return kept.ended(f"{way}-{part}", work)

    def watch(name: str) -> Callable[[int, int], None]:
        return lambda step, of: tell(f"{name}, step {step} of {of}")

    parts = {"float64": exact, "gentle": gentle, "whole": job}
    first = {
        part: ended("plain", part, lambda each=each: plain(each, watch("plain")))  # type: ignore[misc]
        for part, each in parts.items()
    }
    whole = first["whole"]
    rows = [
        Row("plain PyTorch", 0.0, 0.0, 0.0, whole.losses[-1], whole.metric, whole.value, whole.value, False)
    ]

    def add(way: str, found: dict[str, Outcome], judged: bool) -> None:
        double, calm, usual = (_largest(first[part].losses, found[part].losses) for part in parts)
        last = found["whole"]
        value = last.value if judged else None
        rows.append(Row(way, double, calm, usual, last.losses[-1], whole.metric, value, whole.value, judged))

    order = torch.channels_last
    again = {
        part: ended("channels last", part, lambda each=each: plain(each, watch("channels last"), order))  # type: ignore[misc]
        for part, each in (parts | {"whole": short}).items()
    }
    add("plain PyTorch, channels last", again, False)
    for strategy in strategies:
        found = {
            part: ended(
                strategy,
                part,
                lambda each=each: _by_plan(each.model_copy(update={"strategy": strategy}), tell),  # type: ignore[misc]  # noqa: B023
            )
            for part, each in parts.items()
        }
        add(strategy, found, True)
    return tuple(rows)


class _Kept:
    """Outcomes in a folder, so that a long bench can go on where it was stopped."""

    def __init__(self, folder: Path | None, job: Job) -> None:
        self.folder = folder
        self.digest = hashlib.sha256(job.model_dump_json().encode()).hexdigest()[:12]

    def ended(self, name: str, work: Callable[[], Outcome]) -> Outcome:
        if self.folder is None:
            return work()
        path = self.folder / f"{self.digest}-{name.replace(' ', '-')}.json"
        if path.is_file():
            return Outcome(**json.loads(path.read_text()))
        outcome = work()
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(outcome)))
        return outcome


def _refuse_other(job: Job) -> None:
    """The plain loop here does what most jobs do, and no more."""
    if job.evaluate is None or job.init or job.accumulate > 1 or job.precision != "float32":
        raise RequestError("this bench takes jobs in float32 that evaluate, without init and accumulate.")


def _gentle(job: Job) -> Job:
    """The first steps of the job at a rate at which rounding does not grow."""
    optimizer = job.optimizer.model_copy(update={"lr": GENTLE_RATE})
    return _short(job, COMPARED_STEPS, optimizer=optimizer, schedule=Schedule())


def _short(job: Job, steps: int, **changes: Any) -> Job:
    """The first steps of the job, with little evaluation. The schedule is that of the whole job."""
    assert job.evaluate is not None
    evaluate = job.evaluate.model_copy(update={"images": job.batch, "every": None})
    return job.model_copy(update={"evaluate": evaluate, "steps": steps, "epochs": None} | changes)


def _largest(one: list[float], other: list[float]) -> float:
    pairs = zip(one[:COMPARED_STEPS], other[:COMPARED_STEPS], strict=True)
    return max(abs(a - b) for a, b in pairs)


def plain(
    job: Job,
    tell: Callable[[int, int], None],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Outcome:
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
    return Outcome(losses, metric.name, metric.value())


def _by_plan(job: Job, tell: Callable[[str], None]) -> Outcome:
    """Losses of all steps and the metric in the end, by `manyhands train`."""
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        job = job.model_copy(update={"folder": folder, "save": f"{folder}/model.safetensors"})
        start = make_ready(job, None, resume=False)
        recorder = _Telling(Path(folder), job.strategy, tell)
        summary = train(start, recorder)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    return Outcome(losses, summary["metric"], summary["value"])


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


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"within": row.within} for row in rows]


def table(rows: tuple[Row, ...], job: Job) -> Table:
    data = job.data.partition(":")[0]
    table = Table(title=f"{job.model} on {data}: the same job by plans and by plain PyTorch")
    first = f"first {COMPARED_STEPS} losses"
    headings = (
        f"first {DOUBLE_STEPS} losses, float64",
        f"{first}, rate {GENTLE_RATE:g}",
        f"{first}, float32",
    )
    for heading in ("differs from plain by:", *headings, "last loss"):
        table.add_column(heading)
    table.add_column(rows[0].metric)
    table.add_column("within")
    for row in rows:
        verdict = "" if not row.judged else "yes" if row.within else "NO"
        found = (row.double_difference, row.gentle_difference, row.difference)
        numbers = [f"{difference:.1e}" for difference in found]
        table.add_row(row.way, *numbers, f"{row.last_loss:.4f}", _shown(row.value), verdict)
    table.caption = (
        f"limits: {DOUBLE_LIMIT:g} in float64, {LOSS_LIMIT:g} at rate {GENTLE_RATE:g}, "
        f"{METRIC_LIMIT:g} of {rows[0].metric}; float32 at the job's own rate is for comparison"
    )
    return table
