"""Rectified tiles that travel without their zeros: the same training, fewer bytes."""

from __future__ import annotations

import copy
from dataclasses import replace

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given
from torch import nn

from manyhands import api
from manyhands.ir.cluster import Cluster, Device, Trial
from manyhands.ir.parsing import parse_program
from manyhands.ir.plan import LEAST_IN_FLIGHT, Plan
from manyhands.ir.program import Content, sent_bytes
from manyhands.loading import load_model
from manyhands.planning.deciding import Decision, Option
from manyhands.runtime import packing
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.packing import Gaps, bits_bytes, pack, unpack
from manyhands.runtime.transport import Transport
from manyhands.verifying import Outcome, make_trial, train
from tests.loopback.trials import rectified, sent


@given(
    some.integers(1, 300),
    some.floats(0, 1),
    some.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_what_is_packed_comes_back(numel: int, part: float, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(packing, "BLOCK", 64)
        _comes_back(numel, part, dtype)


def _comes_back(numel: int, part: float, dtype: torch.dtype) -> None:
    own = torch.Generator().manual_seed(numel)
    tensor = torch.randn(numel, generator=own, dtype=dtype)
    tensor[torch.rand(numel, generator=own) < part] = 0
    packed, gaps = pack(tensor)
    buffer = torch.full((bits_bytes(numel) + numel * dtype.itemsize,), 7, dtype=torch.uint8)
    buffer[: len(packed)] = packed
    found, known = unpack(buffer, numel, dtype)
    assert torch.equal(found, tensor) and torch.equal(known.bits, gaps.bits)
    assert len(packed) == bits_bytes(numel) + dtype.itemsize * int((tensor != 0).sum())


def test_it_comes_back_to_the_bit() -> None:
    tensor = torch.tensor([0.0, float("nan"), float("inf"), -1.0, -0.0, 1e-45])
    packed, gaps = pack(tensor)
    found, _ = unpack(packed, 6, torch.float32)
    assert gaps.count == 5
    assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


def test_a_gradient_goes_back_without_what_is_stopped_anyway() -> None:
    result = torch.tensor([0.0, 2.0, 0.0, 3.0])
    gradient = torch.tensor([5.0, 6.0, 7.0, 8.0])
    gaps = Gaps.of(result)
    assert gaps.without(gradient).tolist() == [6, 8]
    assert gaps.filled(gaps.without(gradient)).tolist() == [0, 6, 0, 8]


class Net(nn.Module):
    """A rectified result that is read twice, one that is added to, and one that is bounded above, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.relu, self.six = nn.ReLU(inplace=True), nn.ReLU6()
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.relu(self.norm(self.first(x)))
        b = torch.relu(self.second(a) + a)
        return self.last(self.six(self.third(b)))


@pytest.mark.parametrize(
    "strategy", ["rows", "columns", "channels", "batch:2,rows:2", "batch; six = channels"]
)
def test_a_packed_plan_is_exact(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.planning.packing.LEAST_BYTES", 0)
    torch.manual_seed(0)
    model, images = Net(), torch.randn(4, 3, 16, 16)
    graph = api.trace(model, images).graph
    ends = rectified(graph)
    assert len(ends) == 3
    fuse = None if ";" in strategy else ends
    chosen = replace(api.plan(graph, 4, strategy, fuse=fuse), packed=True)
    messages = [m for program in api.lower(graph, chosen).programs for m in sent(program)]
    packed = [message for message in messages if message.packed]
    assert {message.layer for message in packed} <= set(ends)
    assert {message.content for message in packed} == {Content.VALUE, Content.GRADIENT}
    assert api.verify(model, (images,), chosen).worst < 1e-9


def relu(x: torch.Tensor) -> torch.Tensor:
    """Called as torch's, and lets some of the gradient pass where it is zero."""
    return x.clamp(min=0) + 0.1 * (x - x.detach())


torch.fx.wrap("relu")


class Own(nn.Module):
    """Looks like a rectifier, and is none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.act = kind, nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()
        self.last = nn.Conv2d(8, 4, 3, padding=1)
        if kind == "subclass":
            self.act = type("Leaky", (nn.ReLU,), {"forward": lambda self, x: relu(x)})()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(relu(x) if self.kind == "name" else self.act(x))


@pytest.mark.parametrize("kind", ["name", "subclass"])
def test_only_torchs_own_rectifiers_are_taken_for_such(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.planning.packing.LEAST_BYTES", 0)
    torch.manual_seed(0)
    model, images = Own(kind), torch.randn(4, 3, 16, 16)
    graph = api.trace(model, images).graph
    assert not rectified(graph)
    names = [layer.name for layer in graph.layers if layer.inputs]
    chosen = replace(api.plan(graph, 2, "rows", fuse=names), packed=True)
    assert api.verify(model, (images,), chosen).worst < 1e-9


def _packed(model: nn.Module, images: torch.Tensor, num_devices: int, strategy: str) -> Plan:
    graph = api.trace(model, images).graph
    return replace(api.plan(graph, num_devices, strategy), packed=True)


def test_fewer_bytes_travel() -> None:
    torch.manual_seed(0)
    model, images = Net(), torch.randn(4, 3, 64, 64)
    packed = _packed(model, images, 2, "channels")
    dense_bytes = _sent_bytes(model, images, replace(packed, packed=False))
    graph = api.trace(model, images).graph
    assert dense_bytes == sum(sent_bytes(p) for p in api.lower(graph, replace(packed, packed=False)).programs)
    expected_bytes = sum(sent_bytes(program) for program in api.lower(graph, packed).programs)
    assert _sent_bytes(model, images, packed) == pytest.approx(expected_bytes, rel=0.1)
    assert expected_bytes < 0.8 * dense_bytes


def _sent_bytes(model: nn.Module, images: torch.Tensor, chosen: Plan) -> int:
    traced = api.trace(model, images)
    lowered, trial = api.lower(traced.graph, chosen), make_trial(traced.graph, (images,), steps=1)

    def work(device: str, transport: Transport) -> Outcome:
        return train(api.make_worker(traced, lowered, copy.deepcopy(model), device, transport), trial)

    return sum(outcome.sent_bytes for outcome in run_in_process(chosen.devices, work).values())


def test_programs_with_packed_messages_read_back() -> None:
    model, images = Net(), torch.randn(4, 3, 64, 64)
    lowered = api.lower(api.trace(model, images).graph, _packed(model, images, 2, "channels"))
    for program in lowered.programs:
        assert any(message.packed for message in sent(program))
        assert parse_program(str(program)) == program


def _decide(bytes_per_s: float, *trials: Trial, room: bool = True) -> Decision:
    model, images = load_model("resnet18-cifar"), torch.empty(8, 3, 32, 32, device="meta")
    devices = tuple(Device(name, flops_per_s=1e10) for name in ("a", "b"))
    cluster = Cluster(devices, bytes_per_s, 0.0, trials=trials)
    return api.choose(api.trace(model, images).graph, cluster, required=("a", "b"), room=room)


def _choose(bytes_per_s: float, *trials: Trial, room: bool = True) -> Option:
    found = _decide(bytes_per_s, *trials, room=room).best
    assert found is not None
    return found


@pytest.mark.parametrize(("bytes_per_s", "packed"), [(1e6, True), (1e10, False)])
def test_zeros_are_left_out_where_the_network_is_slow(bytes_per_s: float, packed: bool) -> None:
    assert _choose(bytes_per_s).plan.packed == packed


@pytest.mark.parametrize(("factor", "taken"), [(0.5, True), (2.0, False)])
def test_a_packed_plan_that_was_tried_is_as_fast_as_it_was(factor: float, taken: bool) -> None:
    foreseen = _choose(1e6)
    tried = Trial("auto", foreseen.plan, factor * foreseen.cost.seconds)
    assert (_choose(1e6, tried).plan == foreseen.plan) == taken


def test_what_was_tried_with_room_is_no_plan_without() -> None:
    foreseen = _choose(1e7)
    roomy = replace(foreseen.plan, packed=True, in_flight_bytes=64 << 20)
    tried = Trial("auto", roomy, 0.5 * foreseen.cost.seconds)
    assert _choose(1e7, tried).plan == roomy
    assert _choose(1e7, tried, room=False).plan.in_flight_bytes == LEAST_IN_FLIGHT


@pytest.mark.parametrize("bytes_per_s", [1e6, 1e7])
def test_a_trial_can_compare_with_the_same_plan_as_it_is(bytes_per_s: float) -> None:
    decision = _decide(bytes_per_s)
    assert decision.best is not None and decision.best.plan.packed
    plans = [option.plan for option in decision.others if isinstance(option, Option)]
    assert replace(decision.best.plan, packed=False) in plans


def test_what_pays_without_zeros_may_be_another_plan() -> None:
    """VGG on a thin wire: several of the best plans are foreseen without them, not only the very best."""
    with torch.device("meta"):
        model, images = load_model("vgg16-bn"), torch.empty(8, 3, 224, 224)
    graph = api.trace(model, images).graph
    cluster = Cluster(tuple(Device(name, flops_per_s=25e9) for name in "abcd"), 25e6 / 8, 0.0)
    decision = api.choose(graph, cluster)
    options = [option for option in decision.others if isinstance(option, Option) and option.fits]
    with_zeros = min((o for o in options if not o.plan.packed), key=lambda o: o.cost.seconds)
    best, ways = decision.best, [{"packed": True}, {"packed": True, "ahead": True}]
    assert best is not None and best.plan.packed
    assert best.plan.segments != with_zeros.plan.segments
    for way in ways:
        packed = api.simulate(api.lower(graph, replace(with_zeros.plan, **way)), cluster).cost
        assert best.cost.seconds < 0.97 * packed.seconds


def test_where_nothing_is_rectified_there_is_no_plan_without_zeros() -> None:
    """It would be the same programs once more, and take a place in a trial."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(16, 8, 3, padding=1))
    cluster = Cluster(tuple(Device(name, flops_per_s=1e9) for name in "abcd"), 1e6, 0.0)
    decision = api.choose(api.trace(model, torch.empty(4, 3, 64, 64)).graph, cluster)
    options = [option for option in decision.others if isinstance(option, Option)]
    assert options and not any(option.plan.packed for option in options)
