"""Start a job: find its data, model and plan, start the processes, and show and record how it goes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster
from manyhands.ir.codec import encode, to_json
from manyhands.ir.plan import Cost
from manyhands.loading import devices_here
from manyhands.measuring import threads_each
from manyhands.planning.explaining import forecast as foresee
from manyhands.planning.lowering import Lowered
from manyhands.planning.summary import summarise
from manyhands.runtime.ranks import Event, launch
from manyhands.training import checkpoints, preparing
from manyhands.training.jobs import Job
from manyhands.training.losses import choose_optimiser
from manyhands.training.preparing import Facts
from manyhands.training.recording import Recorder
from manyhands.training.running import Run


@dataclass(frozen=True)
class Start:
    """A job made ready: nothing has started yet, and nothing that can be known to be wrong is."""

    job: Job
    cluster: Cluster
    here: tuple[str, ...] | None  # devices to start on this machine; None: all
    facts: Facts | None  # None: this machine has not the data, and the first device will tell
    lowered: Lowered | None
    checkpoint: checkpoints.Checkpoint | None

    @property
    def needed(self) -> bool:
        """Has this machine a part in the plan?"""
        return self.here is None or self.here[0] in self.cluster.names


def make_ready(job: Job, name: str | None, *, resume: bool) -> Start:
    """Check everything that can be checked before a process is started."""
    cluster = preparing.job_cluster(job)
    here = devices_here(cluster, name)
    is_first = here is None or cluster.names[0] in here
    if not is_first and job.feed == "source":
        return Start(job, cluster, here, None, None, None)
    if job.feed == "local" and here is None and len(cluster.devices) > 1 and "{device}" not in job.data:
        raise RequestError(
            'feed = "local": every device of this machine would read the same images. '
            "Write {device} in `data` where their places differ."
        )
    train, test = preparing.datasets(job, here[0] if here else cluster.names[0])
    facts = preparing.find_facts(job, train, test)
    facts, cluster, lowered = preparing.make_plan(job, facts, cluster)
    preparing.check(job, train, facts, lowered)
    if job.init is not None and is_first:
        with torch.device("meta"):
            model = preparing.build_model(job, facts)
        checkpoints.require_shapes(checkpoints.load_model_file(Path(job.init)), model.state_dict(), job.model)
    found = _checkpoint(job, facts, resume=resume) if is_first else None
    return Start(job, cluster, here, facts, lowered, found)


def _checkpoint(job: Job, facts: Facts, *, resume: bool) -> checkpoints.Checkpoint | None:
    """The newest checkpoint to go on from; without being asked to, one that is there is not passed over."""
    folder = Path(job.folder or ".") / "checkpoints"
    there = checkpoints.checkpoints(folder)
    if not resume:
        if there:
            raise RequestError(
                f"{there[0]} is there already. Go on from it with --resume, or give the job another folder."
            )
        return None
    found = checkpoints.newest(folder)
    if found is None:
        return None
    with torch.device("meta"):
        model = preparing.build_model(job, facts)
    checkpoints.require_model(found, model.state_dict(), job.model)
    manifest = found.manifest
    optimiser = choose_optimiser(job.optimizer.name, job.optimizer.model_dump(exclude={"name"})).kind.__name__
    here = {"seed": job.seed, "optimizer": optimiser} | preparing.sample_stream(job, facts)
    there_said = {"seed": manifest.seed, "optimizer": manifest.optimiser.name} | manifest.notes
    for key, value in here.items():
        if there_said.get(key, value) != value:
            raise RequestError(
                f"{found.path} was made with {key} = {there_said[key]}, the job has {value}. "
                "Make them equal, or give the job another folder."
            )
    return found


def train(start: Start, recorder: Recorder) -> dict[str, Any]:
    """Run it to its end; what came out. Progress and metrics go to the recorder."""
    job, cluster = start.job, start.cluster
    plan = start.lowered.plan if start.lowered is not None else None
    run = Run(
        job.model_dump(mode="json"),
        plan,
        start.facts,
        str(start.checkpoint.path) if start.checkpoint else None,
        {device.name: device.memory_bytes for device in cluster.devices},
    )
    speaker = start.here[0] if start.here else cluster.names[0]

    def on_event(device: str, event: Event) -> None:
        if device == speaker or event["event"] in ("damaged", "saved"):
            recorder.event(device, event)

    with recorder:
        options: dict[str, Any] = {}
        if start.here is not None:
            options = {"here": start.here, "cluster": cluster, "facts": _common_facts(start)}
        launch("train", encode(run), cluster.names, on_event, threads=threads(start), **options)
    return recorder.summary()


def _common_facts(start: Start) -> dict[str, str]:
    """What must be equal on every machine: the job, and where it could be made here, the plan."""
    job = start.job
    shared = job.model_dump(exclude={"folder", "save", "init", "cluster", "data", "evaluate"})
    shared["evaluate"] = job.evaluate and job.evaluate.model_dump(exclude={"data"})
    shared["init"] = job.init is not None
    facts = {"job": _digest(repr(sorted(shared.items())))}
    if start.lowered is not None and start.job.feed != "source":
        facts |= {"model": start.lowered.plan.graph, "plan": _digest(to_json(start.lowered.plan))}
    return facts


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def threads(start: Start) -> int:
    """Threads of each process: a machine of its own gives all its cores, one that is shared one each."""
    if start.here is not None and len(start.here) == 1:
        return max(torch.get_num_threads(), 1)
    return threads_each(len(start.cluster.devices))


def plan_facts(start: Start) -> Any:
    assert start.lowered is not None
    return summarise(start.lowered, start.cluster)


def forecast(start: Start) -> Cost | None:
    """What a step was expected to cost; None where the first device alone knows the plan."""
    return None if start.lowered is None else foresee(start.lowered, start.cluster)
