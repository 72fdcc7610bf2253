"""Prove a plan on real processes: run it, run plain PyTorch beside it, and show the largest differences."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import nn

from manyhands.ir.codec import encode
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.loading import load_model
from manyhands.requests import Request
from manyhands.runtime.ranks import TIMEOUT_S, Event, launch
from manyhands.tasks import VerifyJob, examples
from manyhands.verifying import (
    TOLERANCE,
    Difference,
    Held,
    Outcome,
    Trial,
    calibrated,
    compare,
    make_trial,
    reference,
    sensitivity,
)

STEPS, SEED = 3, 0
Key = tuple[str, tuple[tuple[int, ...], ...], int]


def load_outcome(path: Path) -> Outcome:
    """What `tasks.save_outcome` wrote."""
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        outcome = Outcome(facts["losses"], copies=facts["copies"], sent_bytes=facts["sent_bytes"])
        for number, (kind, name, tile) in enumerate(facts["pieces"]):
            getattr(outcome, kind).append(Held(name, Tile.parse(tile), file.get_tensor(str(number))))
    return outcome


def prove_all(pairs: list[tuple[Request, Plan]], steps: int = STEPS) -> list[Difference]:
    """Several plans, on as many of the same devices as each has, in one start of the processes."""
    devices = max((plan.devices for _, plan in pairs), key=len)
    rates: dict[Key, float] = {}
    for request, _ in pairs:
        if _key(request) not in rates:
            rates[_key(request)] = _set_up(request, steps)[2].learning_rate
    differences: dict[int, Difference] = {}
    told: Counter[int] = Counter()
    plain: dict[Key, Outcome] = {}  # of the last network: plans of the same one follow each other
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:

        def on_event(device: str, event: Event) -> None:
            """When all have left their pieces: compare, while the processes go on with the next."""
            if event["event"] != "verified":
                return
            request, plan = pairs[event["index"]]
            told[event["index"]] += 1
            if told[event["index"]] < len(plan.devices):
                return
            files = [Path(folder) / f"{event['index']}-{name}.safetensors" for name in plan.devices]
            if _key(request) not in plain:
                plain.clear()
                plain[_key(request)] = reference(*_set_up(request, steps, rates[_key(request)]))
            outcomes = [load_outcome(file) for file in files]
            differences[event["index"]] = compare(request.traced.graph, plain[_key(request)], outcomes)
            for file in files:
                file.unlink()

        jobs = [VerifyJob(r.model, r.inputs, p, steps, SEED, rates[_key(r)], folder) for r, p in pairs]
        patience_s = TIMEOUT_S * len(jobs)  # who has no part in a plan waits while the others prove it
        launch("verify", [encode(job) for job in jobs], devices, on_event, timeout_s=patience_s)
    return [differences[index] for index in range(len(pairs))]


def _key(request: Request) -> Key:
    return request.model, request.inputs, request.batch


def _set_up(
    request: Request, steps: int = STEPS, learning_rate: float | None = None
) -> tuple[nn.Module, Graph, Trial]:
    """Model, graph and data of a proof; without a learning rate, one that suits the model."""
    model, graph = load_model(request.model, seed=SEED).double(), request.traced.graph
    example = examples(request.inputs, request.batch, torch.float64)
    trial = make_trial(graph, example, steps=steps, seed=SEED)
    if learning_rate is None:
        return model, graph, calibrated(trial, model, graph)
    return model, graph, replace(trial, learning_rate=learning_rate)


def prove(request: Request, plan: Plan, *, quiet: bool = False) -> Difference:
    """Run the proof, and unless quiet print it."""
    console = Console(stderr=True, quiet=quiet)
    with console.status(f"training {request.model} on {len(plan.devices)} devices and on one ..."):
        request.lower(plan)  # refuse what cannot be before anything starts
        (difference,) = prove_all([(request, plan)])
        shaken = None if difference.exact else sensitivity(*_set_up(request))
    if not quiet:
        Console().print(proof_table(request, plan, difference))
    if shaken is not None and shaken > TOLERANCE / 100:
        console.print(
            f"Plain PyTorch itself differs by {shaken:.0e} here when its weights move in the last digit: "
            "this input proves nothing. Try a larger --input or --batch."
        )
    return difference


def proof_table(request: Request, plan: Plan, difference: Difference) -> Table:
    names = ", ".join(dict.fromkeys(str(segment.layout) for segment in plan.segments))
    table = Table(
        title=f"{request.model}, batch {request.batch}, {len(plan.devices)} devices ({names}), {STEPS} steps",
        title_justify="left",
    )
    table.add_column("largest relative difference from one device")
    table.add_column("", justify="right")
    for label in ("loss", "gradients", "parameters", "buffers"):
        table.add_row(
            "running statistics" if label == "buffers" else label, f"{getattr(difference, label):.1e}"
        )
    verdict = "exact" if difference.exact else f"NOT exact, first in {difference.first_layer or 'the loss'}"
    table.caption = f"{verdict} (limit {TOLERANCE:g})"
    return table
