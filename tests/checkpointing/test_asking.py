"""Mistakes in what `fit` is asked for are one line each, before anything is measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import manyhands
from manyhands.profiling.system import Room

IMAGES = torch.randn(2, 3, 16, 16)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def sgd(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), lr=0.1)


MISTAKES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "name of an optimizer": (lambda m: {"optimizer": "adam"}, "not 'adam'"),
    "class of optimizers": (lambda m: {"optimizer": torch.optim.Adam}, "not <class"),
    "schedule": (lambda m: {"optimizer": torch.optim.lr_scheduler.StepLR(sgd(m), 3)}, "one of torch.optim"),
    "optimizer of another": (lambda m: {"optimizer": sgd(model())}, "none of the model's weights"),
    "no example": (lambda m: {"example": None}, "the example must be a tensor"),
    "number for an example": (lambda m: {"example": 5}, "the example must be a tensor"),
    "empty example": (lambda m: {"example": IMAGES[:0]}, "the example is empty"),
    "no number": (lambda m: {"memory": float("nan")}, "not nan"),
    "without end": (lambda m: {"memory": float("inf")}, "not inf"),
    "nothing": (lambda m: {"memory": 0}, "not 0"),
    "less than nothing": (lambda m: {"memory": -5}, "not -5"),
    "a truth": (lambda m: {"memory": True}, "not True"),
    "a number for a disk": (lambda m: {"disk": 5}, "disk is a directory"),
    "two inputs too many": (lambda m: {"example": [IMAGES] * 3}, "too many positional arguments"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str) -> None:
    net = model()
    wrong, said = MISTAKES[mistake]
    asked = {"example": IMAGES, "memory": "2GB"} | wrong(net)
    with pytest.raises(manyhands.RequestError, match=said) as error:
        manyhands.fit(net, **asked)
    assert "\n" not in str(error.value)


def test_a_fitted_model_is_not_fitted_again_and_says_how_an_input_differs() -> None:
    fitted = manyhands.fit(model(), IMAGES, memory="2GB")
    with pytest.raises(manyhands.RequestError, match="Give the one it was made from"):
        manyhands.fit(fitted, IMAGES, memory="2GB")
    with pytest.raises(manyhands.RequestError, match=r"give images\.contiguous\(\)"):
        fitted(IMAGES.to(memory_format=torch.channels_last))
    with pytest.raises(manyhands.RequestError, match="without a gradient of its own"):
        fitted(IMAGES.clone().requires_grad_())
    with torch.inference_mode(), pytest.raises(manyhands.RequestError, match="inference_mode"):
        manyhands.fit(model(), IMAGES, memory="2GB")


def test_what_is_named_is_enough() -> None:
    """The machine has more memory than is allowed, so it is measured what would do."""
    net = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()))
    )
    images = torch.randn(16, 3, 160, 160)
    with pytest.raises(manyhands.RequestError, match="Allow that much") as error:
        manyhands.fit(net, images, memory="50MB")
    named = re.search(r"needs about (.*?), of", str(error.value))
    assert named is not None
    assert manyhands.fit(net, images, memory=named[1]).fit.foreseen_bytes  # type: ignore[union-attr]


def test_what_cannot_be_measured_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no more memory than is allowed, as on the board itself."""
    monkeypatch.setattr("manyhands.profiling.system.room", lambda root: Room(1000, "cgroup"))
    with pytest.raises(manyhands.RequestError, match=r"needs at least .*\. Allow clearly more"):
        manyhands.fit(model(), IMAGES, memory="50MB")
