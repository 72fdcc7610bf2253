"""The example of one's own script trains as plain PyTorch does, wherever its images are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from manyhands.data.idx import fashion_mnist_small
from manyhands.models.small import demo

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "own_loop.py"
STEPS = 3
OTHER_BATCHES = """
import torch, torch.nn.functional as F, manyhands
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
hands = manyhands.join()
optimiser = torch.optim.SGD(model.parameters(), 0.1)
training = hands.prepare(model, optimiser, F.cross_entropy, torch.empty(4, 3, 2, 2), plan="batch")
torch.manual_seed(hands.rank)
training.step(torch.randn(4, 3, 2, 2), torch.zeros(4, dtype=torch.long))
"""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhands.cli", "run", str(script), "--devices", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


def plain() -> list[float]:
    torch.manual_seed(0)
    model, found = demo(), []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pixels, labels, *_ = fashion_mnist_small()
    images, targets = torch.from_numpy(pixels).float()[:, None] / 255, torch.from_numpy(labels).long()
    for step in range(STEPS):
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:60]
        optimiser.zero_grad()
        loss = F.cross_entropy(model(images[chosen]), targets[chosen])
        loss.backward()
        optimiser.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("feed", ["replicated", "source", "local"])
def test_the_example_learns_what_plain_pytorch_learns(feed: str, tmp_path: Path) -> None:
    saved = tmp_path / "model.safetensors"
    ended = run(EXAMPLE, "--feed", feed, "--plan", "rows", "--steps", str(STEPS), "--save", str(saved))
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ended.stdout)]
    assert losses == pytest.approx(plain(), abs=2e-4)  # four digits are printed
    assert saved.is_file()


def test_devices_that_are_given_other_batches_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(OTHER_BATCHES)
    ended = run(script)
    assert ended.returncode != 0
    assert "device-1 was given other images than device-0 at step 0" in ended.stderr
