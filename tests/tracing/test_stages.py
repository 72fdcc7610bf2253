"""A model in stages: whose memory its results are."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from manyhands.models import build
from manyhands.tracing.graphs import trace
from manyhands.tracing.stages import staged


class _Results(nn.Module):
    """Features, what is made of them, and the images themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(images)
        return features, self.head(features), images


def test_results_are_given_away_and_inputs_are_not() -> None:
    cut = staged(_Results(), [torch.randn(2, 3, 10, 10)])
    features, scores = 2 * 4 * 8 * 8 * 4, 2 * 2 * 6 * 6 * 4
    assert sorted(cut.memory_bytes[memory] for memory in cut.given_away) == [scores, features]
    assert [cut.memory_bytes[memory] for memory in cut.unread] == [scores]


@pytest.mark.parametrize("follow", (staged, trace))
def test_a_model_that_was_followed_is_not_held(follow: Callable[[nn.Module, list[Tensor]], object]) -> None:
    """Autograd's history of what was only followed would hold it for good."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Sigmoid())
    weight = ref(model[0].weight)
    follow(model, [torch.randn(2, 3, 8, 8)])
    del model
    gc.collect()
    assert weight() is None


def test_no_device_that_trains_holds_what_only_measuring_needs() -> None:
    """Tens of megabytes each: of a small board's memory that is a part."""
    script = "import sys, manyhands.training.running; print([m for m in sys.modules if '.' not in m])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "'torch'" in found.stdout
    assert not [name for name in ("scipy", "matplotlib", "onnx") if f"'{name}'" in found.stdout]


def test_a_model_is_cut_where_it_should_be_whatever_memory_is_used_again() -> None:
    """A norm, an addition and the activation behind them are one stage, whatever memory is used again."""
    cut = staged(build("resnet18"), [torch.randn(1, 3, 64, 64)])
    assert len(cut.stages) == 44
