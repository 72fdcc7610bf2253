"""Measure all devices of a cluster and the links between them: one process a device, as they will train."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster
from manyhands.ir.codec import decode, encode
from manyhands.ir.survey import DeviceFacts, Survey
from manyhands.loading import devices_here, load_cluster
from manyhands.reporting.devices import survey_view
from manyhands.runtime.ranks import Event, Place, launch, say
from manyhands.writing import require_writable, write_survey

if TYPE_CHECKING:
    from manyhands.runtime.transport import Transport

Tell = Callable[[str], None]


@dataclass(frozen=True)
class SurveyJob:
    """How to measure: so many devices at the same time, of which so many share the memory of one machine."""

    at_once: int
    num_sharing: int


def survey_cluster(cluster: Cluster, name: str | None, threads: int | None, tell: Tell) -> Survey:
    """Start this machine's part and return what all of them found. `tell` hears what is going on."""
    here = devices_here(cluster, name)
    chosen = threads or _threads_each(1 if here else len(cluster.devices))
    local = here is None
    # The cores of one machine are shared on paper (Cluster.cores), so they must not be in the measurement.
    at_once = max((cluster.cores or 1) // chosen, 1) if local else len(cluster.devices)
    job = SurveyJob(min(at_once, len(cluster.devices)), len(cluster.devices) if local else 1)
    speaker = here[0] if here else cluster.names[0]

    def on_event(device: str, event: Event) -> None:
        if device == speaker and event["event"] == "waiting":
            tell(f"waiting for {', '.join(event['missing'])}")
        elif device == speaker and event["event"] == "measuring":
            tell(f"measuring {event['what']}")

    options: dict[str, Any] = {}
    if here is not None:
        digest = hashlib.sha256(json.dumps(cluster.names).encode()).hexdigest()[:12]
        options = {"here": here, "cluster": cluster, "facts": {"devices": digest, "command": "profile"}}
    said = launch("survey", encode(job), cluster.names, on_event, threads=chosen, **options)
    found = decode(Survey, next(e["survey"] for e in said[speaker] if e["event"] == "survey"))
    return found.alike if local else found


def _threads_each(num_processes: int) -> int:
    """As many as `manyhands train` would take."""
    import torch

    return max(torch.get_num_threads() // num_processes, 1)


def profile_and_show(
    path: Path | None, name: str | None, devices: int | None, threads: int | None, *, as_json: bool
) -> None:
    """Measure, print a table or JSON, and on the machine of the first device write the cluster file."""
    from rich.console import Console

    if path is not None and devices is not None:
        raise RequestError("give either --cluster or --devices, not both.")
    if path is None and name is not None:
        raise RequestError(f"--as {name} names a device of a cluster file: give it with --cluster.")
    cluster = load_cluster(path, devices)
    writes = path is not None and (name is None or name == cluster.names[0])
    if path is not None and writes:
        require_writable(path)
    busy = Console(stderr=True, quiet=as_json)
    with busy.status("starting ...") as status:
        told = [""]

        def tell(what: str) -> None:
            status.update(f"{what} ...")
            if not busy.is_terminal and what != told[-1]:  # where nothing can be overwritten, a line, once
                busy.print(f"{what} ...", highlight=False, markup=False)
            told.append(what)

        survey = survey_cluster(cluster, name, threads, tell)
    console = Console(quiet=as_json)
    console = console if console.is_terminal else Console(quiet=as_json, width=150)
    console.print(survey_view(survey))  # before writing: what was measured is not lost if that fails
    if path is not None and writes:
        write_survey(path, survey)
    if as_json:
        print(json.dumps(encode(survey) | {"written": str(path) if writes else None}))
    elif path is not None:
        first = cluster.names[0]
        there = f"Written into {path}." if writes else f"Written on {first}: copy its {path.name} from there."
        console.print(there, highlight=False, markup=False)


# ---- the other side: inside a rank --------------------------------------------------------------------


def take_part(job: SurveyJob, place: Place, transport: Transport) -> None:
    """Measure this device when it is its turn, then the links with all others; everybody says the result."""
    from manyhands.profiling.device import measure_device
    from manyhands.profiling.links import EVERY_PAIR_UP_TO, Circle, measure_links

    _make_ready()
    circle, names = Circle(place.device, place.devices, transport), place.devices
    facts: DeviceFacts | None = None
    for start in range(0, len(names), job.at_once):
        group = names[start : start + job.at_once]
        circle.meet()
        say("measuring", what=", ".join(group))
        if place.device in group:
            facts = measure_device(place.device, num_sharing=job.num_sharing)
    devices = circle.share(circle.gather(encode(facts)))
    links, together = measure_links(circle, lambda pair: say("measuring", what=f"the link {pair}"))
    every = len(names) <= EVERY_PAIR_UP_TO
    found = Survey(tuple(decode(DeviceFacts, device) for device in devices), links, together, every)
    say("survey", survey=encode(found))


def _make_ready() -> None:
    """Do what training does before it holds weights: tracing a model loads a part of torch for good."""
    import torch

    from manyhands.tracing.graphs import trace

    with torch.device("meta"):
        layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    trace(layers, (torch.empty(1, 3, 8, 8, device="meta"),))
