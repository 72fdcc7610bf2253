"""`manyhands train` on real processes: killed and resumed, it ends where an undisturbed run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.machines import namespace_machines, no_namespaces

OWN = Path(__file__).with_name("own_data.py")
JOB = """
model = "{own}:build"
data = "{own}:train"
input = "3x12x12"
batch = 6
steps = {steps}
devices = {devices}
strategy = "{strategy}"
precision = "float64"
clip = 5.0
optimizer = {{ name = "adam", lr = 0.01 }}
schedule = {{ name = "cosine", warmup = 3 }}
folder = "{folder}"
evaluate = {{ data = "train", every = 10, images = 40 }}
checkpoint = {{ every = 7, keep = 2 }}
"""


def write_job(path: Path, **changes: Any) -> Path:
    facts = {"own": OWN, "steps": 20, "devices": 2, "strategy": "rows", "folder": path.parent / path.stem}
    path.write_text(JOB.format(**facts | changes))
    return path


def start(job: Path, *flags: str, inside: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*inside, sys.executable, "-m", "manyhands.cli", "train", str(job), "--json", *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def events(job: Path, *flags: str) -> list[dict[str, Any]]:
    """All events of a run that has to succeed."""
    process = start(job, *flags)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def run_until_saved(job: Path, step: int) -> None:
    """Start a run, and kill all its processes the moment it says that it saved this step."""
    process = start(job)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "saved" and event["step"] == step:
            os.killpg(process.pid, signal.SIGKILL)
            break
    assert process.wait(60) == -signal.SIGKILL


def losses(found: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in found if event["event"] == "step"}


def metrics(found: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["value"] for event in found if event["event"] == "evaluated"}


@pytest.mark.timeout(600)
def test_killed_and_resumed_on_other_devices_equals_undisturbed(tmp_path: Path) -> None:
    straight = events(write_job(tmp_path / "straight.toml"))
    job = write_job(tmp_path / "killed.toml")
    run_until_saved(job, 7)
    (checkpoints,) = (tmp_path / "killed" / "checkpoints").glob("step-*")
    assert checkpoints.name == "step-00000007"
    refused = start(job)
    assert "--resume" in refused.communicate(timeout=100)[1] and refused.returncode == 2
    job = write_job(job, devices=3, strategy="batch")
    resumed = events(job, "--resume")
    assert resumed[0]["event"] == "start" and resumed[0]["step"] == 7
    expected, found = losses(straight), losses(resumed)
    assert set(found) == set(range(8, 21))
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], abs=1e-9), step
    whole = load_file(tmp_path / "straight" / "model.safetensors")
    again = load_file(tmp_path / "killed" / "model.safetensors")
    assert set(whole) == set(again)
    for name, tensor in whole.items():
        assert torch.allclose(tensor.double(), again[name].double(), rtol=0, atol=1e-9), name
    assert metrics(resumed) == metrics(straight)
    assert set(metrics(straight)) == {10, 20}


@pytest.mark.timeout(600)
def test_resuming_on_the_same_plan_is_bit_for_bit(tmp_path: Path) -> None:
    job = write_job(tmp_path / "straight.toml", strategy="batch", steps=9)
    straight = events(job)
    folder = tmp_path / "straight"
    whole = load_file(folder / "model.safetensors")
    (folder / "checkpoints" / "step-00000009").rename(tmp_path / "gone")
    resumed = events(job, "--resume")
    assert set(losses(resumed)) == {8, 9}
    assert losses(resumed) == {step: loss for step, loss in losses(straight).items() if step > 7}
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


CLUSTER = """
[[device]]
name = "pi-0"
address = "{0}"
[[device]]
name = "pi-1"
address = "{1}"
"""


@pytest.mark.timeout(600)
def test_a_job_on_two_hosts_learns_what_it_learns_on_one(tmp_path: Path) -> None:
    """The second host has not even the data: the first sends it its tiles."""
    if reason := no_namespaces():
        pytest.skip(reason)
    alone = events(write_job(tmp_path / "alone.toml", steps=6))
    with namespace_machines() as machines:
        (tmp_path / "cluster.toml").write_text(CLUSTER.format(*(machine.address for machine in machines)))
        processes = []
        for name, machine in zip(("pi-0", "pi-1"), machines, strict=True):
            job = write_job(tmp_path / f"{name}.toml", steps=6)
            text = job.read_text().replace("devices = 2", f'cluster = "{tmp_path}/cluster.toml"')
            if name == "pi-1":
                text = text.replace("own_data.py:train", "nothing_here.py:train")
            job.write_text(text + 'feed = "source"\n')
            processes.append(start(job, "--as", name, inside=machine.inside))
        before = machines[0].sent_bytes()
        said = [process.communicate(timeout=250) for process in processes]
        crossed = machines[0].sent_bytes() - before
    assert [process.returncode for process in processes] == [0, 0], [err for _, err in said]
    found = [[json.loads(line) for line in out.splitlines()] for out, _ in said]
    for each in found:
        assert losses(each) == pytest.approx(losses(alone), abs=1e-9)
    sent = found[0][-1]["devices"]["pi-0"]["sent_bytes"]
    assert crossed > sent > 6 * 6 * 3 * 12 * 5 * 8  # more than the images' lower halves
    assert (tmp_path / "pi-0" / "model.safetensors").is_file()
    assert not (tmp_path / "pi-1" / "model.safetensors").exists()


def test_rounded_messages_train_nearly_as_well_and_are_called_not_exact(tmp_path: Path) -> None:
    said = {}
    for name in ("exact", "rounded"):
        job = write_job(tmp_path / f"{name}.toml", steps=10)
        job.write_text(job.read_text() + 'wire = "bfloat16"\n' * (name == "rounded"))
        said[name] = events(job)[-1]
    assert said["exact"]["exact"] is True and said["rounded"]["exact"] is False
    assert said["rounded"]["loss"] != said["exact"]["loss"]
    assert said["rounded"]["loss"] == pytest.approx(said["exact"]["loss"], rel=0.02)
    sent = {name: sum(d["sent_bytes"] for d in facts["devices"].values()) for name, facts in said.items()}
    assert sent["rounded"] < 0.9 * sent["exact"]
