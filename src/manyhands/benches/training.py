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
LOSS_LIMIT = 1e-4  # of the first steps, in float32
DOUBLE_STEPS = 5
DOUBLE_LIMIT = 1e-9  # of the first few at the full rate, in float64
METRIC_LIMIT = 0.01  # one point of accuracy


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training against plain PyTorch: losses of the first steps, and how good it got in the end.

    Plain PyTorch with its channels last is not judged: it shows how far apart rounding alone takes two runs.
    """

    way: str
    double_difference: float
    difference: float
    last_loss: float
    metric: str
    value: float
    plain_value: float
    judged: bool

    @property
    def within(self) -> bool:
        near = abs(self.value - self.plain_value) <= METRIC_LIMIT
        exact = self.difference <= LOSS_LIMIT and self.double_difference <= DOUBLE_LIMIT
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
    """The job by plain PyTorch, by each strategy, and for comparison by plain PyTorch with channels last.

    What has ended is kept in the folder `keep`, and not done again.
    """
    _refuse_other(job)
    parts = {"float64": _in_double(job), "whole": job}
    kept = _Kept(keep, job)
    rows: list[Row] = []
    first: dict[str, Outcome] = {}

    def add(way: str, work: Callable[[Job], Outcome], judged: bool) -> None:
        found = {}
        for part, each in parts.items():
            tell(f"{way}, {part}")
            found[part] = kept.ended(f"{way}-{part}", each, work)
        first.update({} if first else found)
        double, single = (_largest(first[part].losses, found[part].losses) for part in parts)
        end, value = found["whole"], first["whole"].value
        rows.append(Row(way, double, single, end.losses[-1], end.metric, end.value, value, judged))

    def show(way: str) -> Callable[[int, int], None]:
        return lambda step, of: tell(f"{way}, step {step} of {of}")

    way = "plain PyTorch"
    add(way, lambda each: plain(each, show(way)), judged=False)
    for strategy in strategies:
        add(strategy, lambda each: _by_plan(each, strategy, tell), judged=True)  # noqa: B023
    other = f"{way}, channels last"
    add(other, lambda each: plain(each, show(other), torch.channels_last), judged=False)
    return tuple(rows)


class _Kept:
    """Outcomes in a folder, so that a long bench can go on where it was stopped."""

    def __init__(self, folder: Path | None, job: Job) -> None:
        self.folder = folder
        file = Path(job.model.rpartition(":")[0])
        model = file.read_bytes() if file.is_file() else b""
        self.digest = hashlib.sha256(job.model_dump_json().encode() + model).hexdigest()[:12]

    def ended(self, name: str, job: Job, work: Callable[[Job], Outcome]) -> Outcome:
        if self.folder is None:
            return work(job)
        path = self.folder / f"{self.digest}-{name.replace(' ', '-')}.json"
        if path.is_file():
            return Outcome(**json.loads(path.read_text()))
        outcome = work(job)
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(outcome)))
        return outcome


def _refuse_other(job: Job) -> None:
    """The plain loop here does what most jobs do, and no more."""
    if job.evaluate is None or job.init or job.accumulate > 1 or job.precision != "float32":
        raise RequestError("this bench takes jobs in float32 that evaluate, without init and accumulate.")


def _in_double(job: Job) -> Job:
    """The first few steps of the job in float64, at its full rate from the start, with little evaluation."""
    assert job.evaluate is not None
    evaluate = job.evaluate.model_copy(update={"images": job.batch, "every": None})
    changes = {"steps": DOUBLE_STEPS, "epochs": None, "precision": "float64", "schedule": Schedule()}
    return job.model_copy(update=changes | {"evaluate": evaluate})


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


def _by_plan(job: Job, strategy: str, tell: Callable[[str], None]) -> Outcome:
    """Losses of all steps and the metric in the end, by `manyhands train`."""
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        changes = {"strategy": strategy, "folder": folder, "save": f"{folder}/model.safetensors"}
        job = job.model_copy(update=changes)
        start = make_ready(job, None, resume=False)
        recorder = _Telling(Path(folder), strategy, tell)
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


def to_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [asdict(row) | {"within": row.within} for row in rows]


def table(rows: tuple[Row, ...], job: Job) -> Table:
    data = job.data.partition(":")[0]
    table = Table(title=f"{job.model} on {data}: the same job by plans and by plain PyTorch")
    headings = (f"first {DOUBLE_STEPS} losses, float64", f"first {COMPARED_STEPS} losses, float32")
    for heading in ("differs from plain by:", *headings, "last loss", rows[0].metric, "within"):
        table.add_column(heading)
    for row in rows:
        verdict = "" if not row.judged else "yes" if row.within else "NO"
        differences = [f"{difference:.1e}" for difference in (row.double_difference, row.difference)]
        table.add_row(row.way, *differences, f"{row.last_loss:.4f}", f"{row.value:.4f}", verdict)
    table.caption = (
        f"limits: {DOUBLE_LIMIT:g} in float64, {LOSS_LIMIT:g} in float32, {METRIC_LIMIT:g} of "
        f"{rows[0].metric}; channels last shows what rounding alone does"
    )
    return table
