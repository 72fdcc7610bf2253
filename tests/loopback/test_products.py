"""1x1 convolutions by either library, and those with a stride, which step over the last rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from manyhands.api import lower, make_worker, plan
from manyhands.ir.geometry import Span, Tile
from manyhands.ir.graph import Convolve, Mode
from manyhands.ir.regions import with_ends
from manyhands.runtime import parts, worker
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.products import APART
from manyhands.runtime.transport import Transport
from manyhands.tracing.graphs import trace
from manyhands.verifying import Outcome, compare, make_trial, reference, train

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
        mine.use_format(torch.channels_last)
        return train(mine, trial)

    outcomes = run_in_process(lowered.plan.devices, work)
    plain = reference(model, traced.graph, trial)
    return compare(traced.graph, plain, tuple(outcomes.values())).worst


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block()


@pytest.mark.parametrize(("strategy", "num_devices"), [("single", 1), ("rows", 2), ("rows", 3)])
@pytest.mark.parametrize("chosen", [("line.0", "last"), ()], ids=["convolutions", "products"])
def test_both_ways_train_as_torch_does(
    model: Block, chosen: tuple[str, ...], strategy: str, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "faster_as_convolutions", lambda graph, territory: frozenset(chosen))
    assert difference(model, strategy, num_devices) < 1e-4


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
    assert not any("slow_conv" in name for name in called[APART])
    if torch.backends.mkldnn.is_available() and any("slow_conv" in name for name in called[1]):
        assert any("mkldnn" in name for name in called[APART])


def test_each_way_is_measured_and_channels_first_stay_products(model: Block) -> None:
    traced = trace(model, (IMAGES,))
    lowered = lower(traced.graph, plan(traced.graph, 1, "single"))

    def work(device: str, transport: Transport) -> list[frozenset[str]]:
        found = []
        for order in (torch.contiguous_format, torch.channels_last):
            mine = make_worker(traced, lowered, copy.deepcopy(model), device, transport)
            mine.use_format(order)
            found.append(mine.as_convolutions)
        return found

    ((first, last),) = run_in_process(lowered.plan.devices, work).values()
    assert first == frozenset() and last <= {"line.0", "last"}


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
