"""`manyhands bench training`: plans and plain PyTorch learn the same, and a difference is seen."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from manyhands.benches import training
from manyhands.training.jobs import load_job

CALM = Path(__file__).parent.parent.parent / "examples" / "calm_resnet.py"
OWN = Path(__file__).with_name("own_data.py")
NETWORK = """
from torch import nn
def build():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
"""
JOB = """
model = "{network}:build"
data = "{own}:train"
input = "3x12x12"
batch = 6
steps = 8
devices = 2
optimizer = {{ name = "sgd", lr = 0.01, momentum = 0.9 }}
schedule = {{ name = "cosine", warmup = 2 }}
evaluate = {{ data = "train", images = 40 }}
"""


def test_a_difference_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, keep, network = tmp_path / "job.toml", tmp_path / "kept", tmp_path / "network.py"
    file.write_text(JOB.format(network=network, own=OWN))
    network.write_text(NETWORK)
    job, told = load_job(file), list[str]()
    rows = training.run(job, ("rows",), told.append, keep)
    assert [row.way for row in rows] == ["plain PyTorch", "rows", "plain PyTorch, channels last"]
    assert [row.judged for row in rows] == [False, True, False]
    assert all(row.within for row in rows) and rows[1].double_difference < 1e-12
    assert any("step 8 of 8" in what for what in told)
    (path,) = keep.glob("*-rows-whole.json")
    outcome = json.loads(path.read_text())
    outcome["losses"][3] += 2e-4
    path.write_text(json.dumps(outcome))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("what was kept is done again")

    for name in ("plain", "_by_plan"):
        monkeypatch.setattr(training, name, refuse)
    again = training.run(job, ("rows",), told.append, keep)
    assert not again[1].within and again[1].difference == pytest.approx(2e-4, rel=0.1)


def test_every_block_of_the_calm_network_begins_as_its_shortcut() -> None:
    torch.manual_seed(0)
    model = runpy.run_path(str(CALM))["resnet18"]().eval()
    block, images = model.layer1[0], torch.randn(1, 64, 4, 4).relu()
    torch.testing.assert_close(block(images), images)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
