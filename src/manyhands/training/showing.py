"""`manyhands train` on the console: the plan first, then progress, then what came out and where it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from manyhands.ir.codec import decode, encode
from manyhands.ir.plan import Cost
from manyhands.reporting.text import amount, comparison, plan_view
from manyhands.training.jobs import Job
from manyhands.training.recording import Recorder
from manyhands.training.sheets import SURE, detection_sheet
from manyhands.training.starting import Start, forecast, make_ready, plan_facts, train


def train_and_show(job: Job, name: str | None, *, resume: bool, quiet: bool, as_json: bool) -> dict[str, Any]:
    """Run a job; the same facts as the console shows."""
    start = make_ready(job, name, resume=resume)
    console = Console(stderr=as_json)
    if not start.needed:
        console.print(f"{name} is not needed: the plan is faster without it.", highlight=False, markup=False)
        return {}
    if not quiet and not as_json:
        _introduce(console, start)
        if resume and start.checkpoint is None and (start.here is None or name == start.cluster.names[0]):
            console.print("There is no checkpoint to go on from: it begins anew.")
    limits = {device.name: device.memory_bytes for device in start.cluster.devices}
    folder = Path(job.folder or ".")
    recorder = Recorder(folder, limits, quiet=quiet, as_json=as_json, console=console)
    summary = train(start, recorder)
    rounded = job.wire is not None and (start.lowered is None or not start.lowered.plan.exact)
    summary["exact"] = job.precision != "bfloat16" and not rounded
    foreseen = forecast(start)
    summary["foreseen"] = None if foreseen is None else encode(foreseen)
    pictures = _pictures(start)
    if pictures is not None:
        summary["picture"] = str(pictures)
    if as_json:
        print(json.dumps({"event": "summary"} | summary), flush=True)
    else:
        _conclude(console, job, summary)
        if foreseen is not None and summary["measured"] is not None and not quiet and _is_first(start):
            assert start.lowered is not None
            names = [f"{s.layers[0]} .. {s.layers[-1]}" for s in start.lowered.plan.segments]
            console.print(comparison(foreseen, decode(Cost, summary["measured"]), names))
    return summary


def _is_first(start: Start) -> bool:
    """Is this machine the first device, or all of them?"""
    return start.here is None or start.cluster.names[0] in start.here


def _introduce(console: Console, start: Start) -> None:
    if start.lowered is None:
        console.print("The first device has the data and makes the plan.")
        return
    if _is_first(start):
        console.print(plan_view(plan_facts(start)))
        if text := _instead(start):
            console.print(text, highlight=False, markup=False)
    else:
        console.print(f"The plan is shown by {start.cluster.names[0]}.", highlight=False, markup=False)
    if start.job.accumulate > 1 and _has_batch_norm(start):
        console.print(
            f"Note: batch norm sees each of the {start.job.accumulate} batches of a step alone, as plain "
            "PyTorch does when it accumulates; that is not the same as one large batch.",
            highlight=False,
            markup=False,
        )
    if start.job.precision == "bfloat16":
        console.print("Note: bfloat16 is not exact to float32's rounding.", highlight=False, markup=False)
    if start.checkpoint is not None:
        before = start.checkpoint.manifest.plan
        if isinstance(before, dict) and before.get("wire"):
            console.print("Note: what is gone on from was trained with rounded messages: NOT exact.")
        for warning in start.checkpoint.warnings:
            console.print(f"Passed over: {warning}", highlight=False, markup=False)
        console.print(
            f"Going on from {start.checkpoint.path}{_what_is_left(start)}.", highlight=False, markup=False
        )


def _instead(start: Start) -> str:
    """Emulated devices count, whatever the job says."""
    job, emulated = start.job, "MANYHANDS_CLUSTER" in os.environ
    asked = f'cluster = "{job.cluster}"' if job.cluster else f"devices = {job.devices}"
    if not emulated or (job.cluster, job.devices) in ((None, None), (None, len(start.cluster.devices))):
        return ""
    return f"Note: the job's {asked} does not count here: {len(start.cluster.devices)} devices are emulated."


def _what_is_left(start: Start) -> str:
    assert start.checkpoint is not None and start.facts is not None
    left = start.facts.num_steps(start.job) - start.checkpoint.manifest.step
    return f", {left} steps to go" if left > 0 else ": all its steps are done; give the job more to go on"


def _has_batch_norm(start: Start) -> bool:
    from manyhands.ir.graph import BatchNorm

    assert start.lowered is not None
    operations = [layer.operation for layer in start.lowered.graph.layers]
    return any(isinstance(operation, BatchNorm) and operation.training for operation in operations)


def _conclude(console: Console, job: Job, summary: dict[str, Any]) -> None:
    done = f"step {summary['step']} reached" if "step" in summary else "no step was left to take"
    parts = [f"{done} in {summary['seconds']:.0f} s"]
    if summary.get("loss") is not None:
        parts.append(f"loss {summary['loss']:.4f}")
    if "metric" in summary:
        parts.append(f"{summary['metric']} {summary['value']:.4f}")
    if not summary["exact"]:
        parts.append("NOT exact (bfloat16)")
    console.print("; ".join(parts) + ".", highlight=False, markup=False)
    for device, facts in summary["devices"].items():
        console.print(
            f"  {device}: {amount(facts['sent_bytes'])} sent, peak memory {amount(facts['peak_bytes'])}",
            highlight=False,
            markup=False,
        )
    if summary["damaged"]:
        names = ", ".join(sorted(summary["damaged"]))
        console.print(f"{len(summary['damaged'])} images could not be read: {names}", markup=False)
    for device in summary["over_memory"]:
        console.print(f"{device} needed more memory than its limit.", style="red", markup=False)
    console.print(
        f"Model: {job.save}   metrics: {Path(job.folder or '.') / 'metrics.jsonl'}",
        highlight=False,
        markup=False,
    )
    if "picture" in summary:
        console.print(f"Detections surer than {SURE:g}: {summary['picture']}", highlight=False, markup=False)


def _pictures(start: Start) -> Path | None:
    """For detection: the first test images with the boxes found."""
    if start.job.loss != "yolov2" or start.facts is None or start.job.evaluate is None:
        return None
    if not _is_first(start):
        return None
    return detection_sheet(start.job, start.facts, start.cluster.names[0])
