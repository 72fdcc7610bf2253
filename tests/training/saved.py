"""Small checkpoints for the tests of them."""

import os
from pathlib import Path

import torch

from manyhands.training.checkpoints import (
    Facts,
    OptimiserFacts,
    write,
)

FILES = ("manifest.json", "model.safetensors", "optimiser.safetensors")
MODEL = {"conv1.weight": torch.arange(24.0).reshape(2, 3, 2, 2), "bn1.running_mean": torch.ones(2)}
OPTIMISER = {"momentum_buffer/conv1.weight": torch.full((2, 3, 2, 2), 0.1)}


def facts(step: int, **others: object) -> Facts:
    given = {"model": "demo", "input": "1x28x28", "plan": {"segments": [1, 2]}, "epoch": 1, "position": 32}
    optimiser = OptimiserFacts(name="sgd", groups=({"lr": 0.1, "momentum": 0.9},))
    return Facts.model_validate(given | {"step": step, "seed": 0, "optimiser": optimiser} | others)


def write_small(folder: Path, step: int, keep: int = 3) -> Path:
    return write(folder, facts(step), MODEL, OPTIMISER, keep)


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden or not."""
    return sorted(os.listdir(folder))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
