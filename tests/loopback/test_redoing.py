"""What is computed a second time finds what it found the first time, and leaves no other traces."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor, nn

from manyhands.api import plan, trace, verify
from manyhands.errors import RequestError
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.ir.program import Redo
from manyhands.models import build
from manyhands.planning.lowering import lower

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


def frozen(model: nn.Module) -> nn.Module:
    """Without norms that would have to see the whole batch."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def before_the_end(graph: Graph, plan: Plan) -> Plan:
    """Cut where the last layers begin, which need to see all rows."""
    *others, last = plan.segments
    layers = graph.by_name()
    ends = [i for i, n in enumerate(last.layers) if layers[n].statistic or len(layers[n].shape) != 4]
    if not ends or not ends[0]:
        return plan
    names = last.layers
    parts = replace(last, layers=names[: ends[0]]), replace(last, layers=names[ends[0] :])
    return replace(plan, segments=(*others, *parts))


@pytest.mark.parametrize(("bands", "samples", "refill"), [(2, 2, True), (8, 1, False)])
@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
@pytest.mark.parametrize(("name", "size"), [("resnet18-cifar", 32), ("mobilenetv2", 64), ("unet-small", 32)])
def test_bands_of_rows(
    name: str, size: int, strategy: str, num_devices: int, bands: int, samples: int, refill: bool
) -> None:
    """Whatever of it can be cut into bands; all layers are one group where nothing is exchanged."""
    torch.manual_seed(0)
    model, images = frozen(build(name)), torch.randn(3, 3, size, size)
    graph = trace(model, images).graph
    chosen = before_the_end(graph, plan(graph, num_devices, strategy))
    segments = tuple(replace(s, redo=samples, refill=refill, bands=bands) for s in chosen.segments)
    banded = replace(chosen, segments=segments)
    programs = lower(graph, banded).programs
    assert any(step.bands > 1 for program in programs for step in program.steps if isinstance(step, Redo))
    difference = verify(model, (images,), banded, steps=1)
    assert difference.exact, difference


class Windows(nn.Module):
    """Rows that reach far and unequally, and a tensor that is read both inside and outside of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 4, 5, stride=2, padding=3, dilation=2, padding_mode="reflect")
        self.pool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)
        self.drop, self.end = nn.Dropout(0.3), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        wide = nn.functional.leaky_relu(self.wide(images), 0.2, inplace=True)
        up = self.up(self.drop(self.pool(wide)))[:, :, : wide.shape[2], : wide.shape[3]]
        up = nn.functional.interpolate(up, size=wide.shape[2:], mode="bilinear")
        return self.end(torch.cat([wide, up], 1)), wide


@pytest.mark.parametrize("bands", [2, 3, 7, 50])
@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
def test_windows_across_bands(strategy: str, num_devices: int, bands: int) -> None:
    torch.manual_seed(0)
    model, images = Windows(), torch.randn(4, 3, 37, 29)
    graph = trace(model, images).graph
    chosen = plan(graph, num_devices, strategy)
    segments = tuple(replace(segment, redo=1, bands=bands) for segment in chosen.segments)
    steps = [s for p in lower(graph, replace(chosen, segments=segments)).programs for s in p.steps]
    assert any(step.bands > 1 for step in steps if isinstance(step, Redo))
    difference = verify(model, (images,), replace(chosen, segments=segments), steps=2)
    assert difference.exact, difference


class Stacked(nn.Module):
    """Two images one above the other: no band needs both; and a softmax over the rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.end = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        if self.kind == "softmax":
            return self.end(torch.softmax(self.a(images), 2))
        return self.end(torch.cat([torch.relu(self.a(images)), torch.relu(self.b(images))], 2))


@pytest.mark.parametrize("kind", ["stacked", "softmax"])
@pytest.mark.parametrize("bands", [2, 5])
@pytest.mark.parametrize(("strategy", "num_devices"), [("single", 1), ("rows", 2), ("batch", 2)])
def test_what_no_band_can_do_without_the_others(
    kind: str, bands: int, strategy: str, num_devices: int
) -> None:
    torch.manual_seed(0)
    model, images = Stacked(kind), torch.randn(2, 3, 12, 8)
    chosen = plan(trace(model, images).graph, num_devices, strategy)
    segments = tuple(replace(segment, redo=1, bands=bands) for segment in chosen.segments)
    difference = verify(model, (images,), replace(chosen, segments=segments), steps=1)
    assert difference.exact, difference


class Shared(nn.Module):
    """Two chunks of one segment read the same tensor; one hands it a gradient that another holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.c, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        x, z = self.a(images), self.b(images)
        y = self.bn(self.c(x))
        return torch.cat([(x + z) + y, y], 1)


def test_a_gradient_that_another_holds_is_not_added_to_in_place() -> None:
    torch.manual_seed(0)
    model, images = Shared(), torch.randn(4, 3, 8, 8)
    chosen = plan(trace(model, images).graph, 2, "rows; c = channels", fuse=("b",))
    segments = tuple(replace(segment, redo=1) for segment in chosen.segments)
    difference = verify(model, (images,), replace(chosen, segments=segments), steps=2)
    assert difference.exact, difference


class Mixed(nn.Module):
    """Samples that are not computed each from its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.map, self.learned = nn.Conv2d(4, 4, 1), nn.Parameter(torch.randn(1, 4, 8, 8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        if self.kind == "one for all":
            return self.last(x + self.map(self.learned))
        if self.kind == "every second":
            return self.last(x[::2])
        if self.kind == "frames":
            return self.last(x.reshape(8, 4, 4, 8))
        return self.last(nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)))


@pytest.mark.parametrize("kind", ["one for all", "every second", "frames", "padded batch"])
@pytest.mark.parametrize(("strategy", "num_devices"), [("single", 1), ("rows", 2), ("batch", 2)])
def test_samples_that_depend_on_others_are_computed_together(
    kind: str, strategy: str, num_devices: int
) -> None:
    torch.manual_seed(0)
    model, images = Mixed(kind), torch.randn(4, 3, 8, 8)
    chosen = plan(trace(model, images).graph, num_devices, strategy)
    segments = tuple(replace(segment, redo=1) for segment in chosen.segments)
    difference = verify(model, (images,), replace(chosen, segments=segments), steps=2)
    assert difference.exact, difference


def test_a_plan_by_hand_that_redoes_less_than_nothing_is_refused() -> None:
    model, images = Shared(), torch.randn(4, 3, 8, 8)
    chosen = plan(trace(model, images).graph, 2, "rows")
    segments = tuple(replace(segment, redo=-1) for segment in chosen.segments)
    with pytest.raises(RequestError, match="redoes -1 samples"):
        verify(model, (images,), replace(chosen, segments=segments))


@pytest.mark.parametrize(("redo", "bands"), [(1, 0), (1, -2), (0, 3)])
def test_bands_by_hand_that_cannot_be_are_refused(redo: int, bands: int) -> None:
    model, images = Shared(), torch.randn(4, 3, 8, 8)
    chosen = plan(trace(model, images).graph, 2, "rows")
    segments = tuple(replace(segment, redo=redo, bands=bands) for segment in chosen.segments)
    with pytest.raises(RequestError, match=f"has {bands} bands"):
        verify(model, (images,), replace(chosen, segments=segments))
