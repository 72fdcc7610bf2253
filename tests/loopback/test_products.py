"""1x1 convolutions by either library, and those with a stride, which step over the last rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from manyhands.api import lower, make_worker, plan
from manyhands.ir.geometry import Span, Tile
from manyhands.ir.graph import Convolve, Mode
from manyhands.ir.regions import with_ends
from manyhands.runtime import parts, products, worker
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.products import APART, distance
from manyhands.runtime.transport import Transport
from manyhands.tracing.graphs import trace
from manyhands.verifying import Outcome, compare, make_trial, reference, train

LAST, FIRST = torch.channels_last, torch.contiguous_format
IMAGES = torch.randn(4, 3, 18, 15, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Both kinds, in a line and beside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.line = nn.Sequential(nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1))
        self.shortcut = nn.Conv2d(16, 32, 1, 2)
        self.last = nn.Conv2d(32, 8, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        last: Tensor = self.last(self.line(x) + self.shortcut(x))
        return last


def difference(model: nn.Module, strategy: str, num_devices: int) -> float:
    """Between two steps by a plan and two by torch itself, both in single precision."""
    traced = trace(model, (IMAGES,))
    lowered = lower(traced.graph, plan(traced.graph, num_devices, strategy))
    trial = make_trial(traced.graph, (IMAGES,), steps=2)

    def work(device: str, transport: Transport) -> Outcome:
        mine = make_worker(traced, lowered, copy.deepcopy(model), device, transport)
        mine.use_format(LAST)
        return train(mine, trial)

    outcomes = run_in_process(lowered.plan.devices, work)
    plain = reference(model, traced.graph, trial)
    return compare(traced.graph, plain, tuple(outcomes.values())).worst


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block()


@pytest.mark.parametrize(("strategy", "num_devices"), [("single", 1), ("rows", 2), ("rows", 3)])
@pytest.mark.parametrize("convolving", [True, False])
def test_both_ways_train_as_torch_does(
    model: Block, convolving: bool, strategy: str, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    distances: list[tuple[int, int]] = []
    conv2d = nn.functional.conv2d

    def noted(x: Tensor, weight: Tensor, *words: Any) -> Tensor:
        if weight.shape[2:] == (1, 1) and words[1] == (1, 1):
            distances.append(words[3])
        result: Tensor = conv2d(x, weight, *words)
        return result

    monkeypatch.setattr(worker, "convolutions_are_faster", lambda graph, territory: convolving)
    monkeypatch.setattr(nn.functional, "conv2d", noted)
    assert difference(model, strategy, num_devices) < 1e-4
    assert ((APART, APART) in distances) == convolving


def test_taps_far_apart_go_to_the_library_of_convolutions() -> None:
    """With one thread and few samples, torch otherwise takes them for products."""
    x, weight = torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(16, 16, 1, 1, requires_grad=True)
    called, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for apart in (1, APART):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                nn.functional.conv2d(x, weight, dilation=apart).sum().backward()
            called[apart] = {event.key for event in profiled.key_averages()}
    finally:
        torch.set_num_threads(threads)
    if torch.backends.mkldnn.is_available():
        assert not any("slow_conv" in name for name in called[APART])
        assert any("mkldnn" in name for name in called[APART])


def test_a_small_single_sample_is_left_to_products() -> None:
    """Torch takes a slow way for it where taps are apart."""
    small, large = torch.empty(1, 16, 8, 8), torch.empty(1, 128, 16, 16)
    assert distance(small, 1) == 1 and distance(small, 2) == distance(large, 1) == APART
    assert distance(torch.empty(2, 16, 8, 8), 1) == APART


@pytest.mark.parametrize(("seconds", "faster"), [((1.0, 0.5), True), ((1.0, 0.95), False)])
def test_what_is_clearly_faster_is_chosen_and_channels_first_stay_products(
    model: Block, seconds: tuple[float, float], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(products, "_seconds", lambda *size: asked.append(size) or seconds)
    traced = trace(model, (IMAGES,))
    lowered = lower(traced.graph, plan(traced.graph, 1, "single"))

    def work(device: str, transport: Transport) -> list[bool]:
        found = []
        for order, told in ((LAST, None), (FIRST, None), (LAST, True), (LAST, False)):
            mine = make_worker(traced, lowered, copy.deepcopy(model), device, transport)
            mine.use_format(order, told)
            found.append(mine.convolving)
        return found

    (found,) = run_in_process(lowered.plan.devices, work).values()
    assert found == [faster, False, True, False]
    assert [size[:3] for size in asked] == [
        ((32, 16, 1, 1), 1, (4, 18, 15)),
        ((8, 16, 1, 1), 2, (4, 9, 8)),
    ]


def test_both_ways_are_really_measured() -> None:
    seconds = products._seconds((8, 8, 1, 1), 1, (2, 4, 4), torch.get_num_threads())
    assert len(seconds) == 2 and all(0 < each < 1 for each in seconds)


def test_a_stride_over_the_last_rows_copies_no_gradient(
    model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 rows, of which every second is read: the last may lie there unread."""
    cuts: list[tuple[int, ...]] = []
    monkeypatch.setattr(parts._Part, "apply", lambda whole, where: cuts.append(whole.shape))
    assert difference(model, "single", 1) < 1e-4
    assert not cuts


def test_rows_at_the_end_are_kept_only_where_they_change_nothing() -> None:
    layers = trace(Block(), (IMAGES,)).graph.by_name()
    shortcut, strided = layers["shortcut"], layers["line.2"]
    need, held = Tile((Span(0, 4), Span(0, 16), Span(0, 17), Span(0, 15))), Tile.whole((4, 16, 18, 15))
    assert with_ends(shortcut, need, held).spans[2] == Span(0, 18)
    assert with_ends(strided, need, held) == need  # padded above: the window's steps would end elsewhere
    shorter = Tile((Span(0, 4), Span(0, 16), Span(0, 15), Span(0, 15)))
    assert with_ends(shortcut, shorter, held) == shorter  # three rows are room for one window more
    reflected = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, padding_mode="reflect"))
    (layer,) = (x for x in trace(reflected, (IMAGES,)).graph.layers if isinstance(x.operation, Convolve))
    inside = need.with_span(2, Span(3, 17)).with_span(3, Span(3, 15))
    assert layer.operation.mode is Mode.REFLECT and with_ends(layer, inside, held) == inside
    assert with_ends(strided, inside, held).spans[2] == Span(3, 18)
