"""What is computed a second time finds what it found the first time, and leaves no other traces."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor, nn

from manyhands.api import plan, trace, verify
from manyhands.models import build

STRATEGIES = [("single", 1), ("batch", 2), ("rows", 2), ("channels", 2), ("batch:2,rows:2", 4)]


class Overwriting(nn.Module):
    """Somebody overwrites in place what another layer, which needs it no more, has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.left = nn.Conv2d(4, 4, 3, padding=1)
        self.leaky = nn.LeakyReLU(0.3, inplace=True)
        self.right = nn.Conv2d(4, 4, 3, padding=1)
        self.end = nn.LeakyReLU(0.3, inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        first = self.first(images)
        left = self.left(first * 2.0)
        right = self.right(self.leaky(first))
        return self.end(left + right)


@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
def test_what_will_be_read_again_is_not_overwritten(strategy: str, num_devices: int) -> None:
    """Whichever of the segments are redone, with and without what they read."""
    torch.manual_seed(0)
    model, images = Overwriting(), torch.randn(4, 3, 8, 8)
    graph = trace(model, images).graph
    fuse = ("first", "left", "leaky", "right")
    chosen = plan(graph, num_devices, strategy, fuse=fuse)
    choices, rng = ((0, False), (1, False), (2, True)), Random(0)
    every = list(itertools.product(choices, repeat=len(chosen.segments)))
    for settings in rng.sample(every, 40):
        pairs = zip(chosen.segments, settings, strict=True)
        segments = tuple(replace(s, redo=redo, refill=refill) for s, (redo, refill) in pairs)
        difference = verify(model, (images,), replace(chosen, segments=segments), steps=1)
        assert difference.exact, (settings, difference)


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
@pytest.mark.parametrize("name", ["resnet18-cifar", "mobilenetv2", "unet-small"])
def test_models_of_the_zoo(name: str, strategy: str, num_devices: int, refill: bool) -> None:
    """Norms, skips, dropout: everything redone, in runs of samples of unequal length."""
    torch.manual_seed(0)
    model, images = build(name), torch.randn(5, 3, 32, 32)
    chosen = plan(trace(model, images).graph, num_devices, strategy)
    segments = tuple(replace(segment, redo=2, refill=refill) for segment in chosen.segments)
    difference = verify(model, (images,), replace(chosen, segments=segments), steps=2)
    assert difference.exact, difference
