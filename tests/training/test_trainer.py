"""A trainer on several devices does what plain PyTorch does on one: steps, predictions, state."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands import api
from manyhands.errors import RequestError
from manyhands.hands import Training
from manyhands.ir.geometry import Span
from manyhands.ir.plan import LEAST_IN_FLIGHT
from manyhands.ir.program import sent_bytes
from manyhands.planning.feeding import Feed
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.process import require_bfloat16
from manyhands.runtime.state import State
from manyhands.runtime.transport import Transport
from manyhands.tracing.fx import ONE_AT_A_TIME
from manyhands.training.losses import make_loss
from manyhands.training.trainer import Settings, Trainer

BATCH, STEPS = 6, 3


def network() -> nn.Module:
    """The same weights each time, also in threads, which share torch's random numbers."""
    return copy.deepcopy(NETWORK)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).double()


NETWORK = _network()


def batches(count: int, batch: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, 3, 12, 12, generator=draw, dtype=torch.float64),
            torch.randint(5, (batch,), generator=draw),
        )
        for _ in range(count)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=1e-3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def plain(make: Callable[[Any], torch.optim.Optimizer], accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    model, losses = network(), []
    optimiser = make(model.parameters())
    data = batches(STEPS * accumulate)
    for step in range(STEPS):
        optimiser.zero_grad()
        total = 0.0
        for images, labels in data[step * accumulate : (step + 1) * accumulate]:
            loss = F.cross_entropy(model(images), labels) / accumulate
            loss.backward()
            total += float(loss.detach())
        optimiser.step()
        losses.append(total)
    return model, losses


def together(here: Trainer) -> Trainer:
    """Wait until all devices are made: torch.fx, which makes them, must not trace while others compute."""
    here._evaluating()
    mailroom, count = here.transport.mailroom, len(here.plan.devices)  # type: ignore[attr-defined]
    with mailroom.changed:
        barrier = vars(mailroom).setdefault("barrier", threading.Barrier(count))
    barrier.wait(60)
    return here


def trainer(
    strategy: str,
    device: str,
    devices: int,
    transport: Transport,
    feed: Feed = Feed.REPLICATED,
    in_flight_bytes: int = LEAST_IN_FLIGHT,
) -> Trainer:
    model, example = network(), torch.empty(BATCH, 3, 12, 12, dtype=torch.float64)
    plan = api.plan(api.trace(model, example).graph, devices, strategy)
    plan = replace(plan, in_flight_bytes=in_flight_bytes)
    return together(Trainer(model, (example,), plan, transport, device, Settings(F.cross_entropy, feed=feed)))


def devices_of(count: int) -> tuple[str, ...]:
    return tuple(f"device-{index}" for index in range(count))


def part(tensor: Tensor, span: Span) -> Tensor:
    return tensor[span.start : span.stop]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-10)


ROOM = 64 << 20  # bytes on their way: a step leaves weights to the next
PLANS = [("batch", 3), ("rows", 3), ("channels", 2), ("batch:2,rows:2", 4), ("single", 1)]


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(("strategy", "count"), PLANS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("in_flight_bytes", [LEAST_IN_FLIGHT, ROOM])
def test_steps_predictions_and_the_collected_state_are_those_of_one_device(
    strategy: str,
    count: int,
    make: Callable[[Any], torch.optim.Optimizer],
    accumulate: int,
    in_flight_bytes: int,
) -> None:
    model, losses = plain(make, accumulate)
    images, labels = batches(1)[0]

    def work(device: str, transport: Transport) -> tuple[list[Any], Tensor, State | None]:
        here = trainer(strategy, device, count, transport, in_flight_bytes=in_flight_bytes)
        here.worker.use_optimiser(make)
        data = batches(STEPS * accumulate)
        found = [
            here.step(*(((x,), y) for x, y in data[s * accumulate : (s + 1) * accumulate]))
            for s in range(STEPS)
        ]
        left = in_flight_bytes == ROOM and strategy in ("batch", "rows", "batch:2,rows:2")
        assert bool(here.worker.mail.arriving) == left, "a step with room leaves weights on their way"
        if make is adam:  # the state first: whoever asks for it, it is that after the step
            state = here.collect()
            return found, here.predict((images,), labels)[0], state
        outputs, _ = here.predict((images,), labels)
        return found, outputs, here.collect()

    results = run_in_process(devices_of(count), work)
    state = results["device-0"][2]
    assert state is not None
    expected = model.state_dict()
    assert set(state.model) == set(expected)
    for name, tensor in expected.items():
        assert close(state.model[name].double(), tensor.double()), name
    model.eval()
    for found, outputs, _ in results.values():
        assert found == pytest.approx(losses, abs=1e-10)
        assert close(outputs, model(images))


@pytest.mark.parametrize("feed", list(Feed))
@pytest.mark.parametrize("in_flight_bytes", [LEAST_IN_FLIGHT, ROOM])
@pytest.mark.parametrize(
    ("strategy", "count"), [("rows", 3), ("batch", 3), ("batch:2,rows:2", 4), ("grid", 4)]
)
def test_wherever_the_images_are_training_is_the_same(
    strategy: str, count: int, feed: Feed, in_flight_bytes: int
) -> None:
    _, losses = plain(sgd)

    def work(device: str, transport: Transport) -> tuple[list[Any], int, int]:
        here = trainer(strategy, device, count, transport, feed, in_flight_bytes)
        here.worker.use_optimiser(sgd)
        span = here.feeding.samples[device]
        found = [here.step(((part(x, span),), part(y, span))) for x, y in batches(STEPS)]
        extra = STEPS * (sent_bytes(here.worker.program) + here.feeding.sent_bytes(device))
        return found, transport.sent_bytes, extra

    for found, sent, said in run_in_process(devices_of(count), work).values():
        assert found == pytest.approx(losses, abs=1e-10)
        assert said <= sent <= said + STEPS * count * 400  # targets and their announcements come on top
        if feed is Feed.REPLICATED:
            assert sent == said


def test_local_images_never_leave_whole() -> None:
    def work(device: str, transport: Transport) -> str:
        with pytest.raises(RequestError, match="whole images of device-1 to device-0"):
            trainer("channels", device, 2, transport, Feed.LOCAL)
        return "refused"

    assert set(run_in_process(devices_of(2), work).values()) == {"refused"}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("before", [("batch", 3), ("channels", 2)])
@pytest.mark.parametrize("after", [("rows", 2), ("channels", 3), ("single", 1)])
def test_a_state_goes_on_by_another_plan(
    before: tuple[str, int], after: tuple[str, int], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model, losses = plain(make)

    def first(device: str, transport: Transport) -> State | None:
        here = trainer(before[0], device, before[1], transport)
        here.worker.use_optimiser(make)
        here.step(*(((x,), y) for x, y in batches(1)))
        return here.collect()

    state = run_in_process(devices_of(before[1]), first)["device-0"]
    assert state is not None

    class Whole(dict[str, Tensor]):
        def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
            return self[name][index]

    def second(device: str, transport: Transport) -> tuple[list[Any], State | None]:
        here = trainer(after[0], device, after[1], transport, in_flight_bytes=ROOM)
        here.worker.use_optimiser(make)
        here.step(*(((x,), y) for x, y in batches(1)))  # leaves weights on their way that count no more
        here.restore(Whole(copy.deepcopy(state.model)), state.optimiser)
        return [here.step(((x,), y)) for x, y in batches(STEPS)[1:]], here.collect()

    results = run_in_process(devices_of(after[1]), second)
    assert results["device-0"][0] == pytest.approx(losses[1:], abs=1e-10)
    found = results["device-0"][1]
    assert found is not None
    for name, tensor in model.state_dict().items():
        assert close(found.model[name].double(), tensor.double()), name


class MixedConv(nn.Conv2d):
    """A convolution that computes in bfloat16 and gives float32, as mixed precision does."""

    def forward(self, images: Tensor) -> Tensor:
        weight, bias = self.weight.bfloat16(), None if self.bias is None else self.bias.bfloat16()
        narrow = F.conv2d(images.bfloat16(), weight, bias, self.stride, self.padding)
        return narrow.to(images.dtype)


def test_mixed_precision_computes_convolutions_in_bfloat16() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(MixedConv(3, 8, 3, padding=1), nn.ReLU(), MixedConv(8, 4, 3, padding=1))
    plain_model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    plain_model.load_state_dict(base.state_dict())
    images, targets = torch.randn(2, 3, 9, 9), torch.randn(2, 4, 9, 9)
    mixed, exact = (F.mse_loss(model(images), targets).item() for model in (base, plain_model))

    def work(device: str, transport: Transport) -> float | None:
        model = copy.deepcopy(plain_model)
        plan = api.plan(api.trace(model, images).graph, 3, "rows")
        settings = Settings(F.mse_loss, mixed=torch.bfloat16)
        here = together(Trainer(model, (images,), plan, transport, device, settings))
        here.worker.use_optimiser(sgd)
        return here.step(((images,), targets))

    for found in run_in_process(devices_of(3), work).values():
        assert found == pytest.approx(mixed, rel=1e-3)
    assert abs(mixed - exact) > 1e-6  # or this test could not tell them apart


def test_a_processor_without_bfloat16_is_refused() -> None:
    require_bfloat16("pi-0", "flags : fpu avx2 avx512_bf16 amx_tile")
    with pytest.raises(RequestError, match="pi-0 has no bfloat16"):
        require_bfloat16("pi-0", "flags : fpu avx2 avx512f")


def test_images_of_another_type_are_converted_and_of_another_size_refused() -> None:
    _, losses = plain(sgd)

    def work(device: str, transport: Transport) -> float | None:
        here = trainer("rows", device, 2, transport, Feed.SOURCE)
        here.worker.use_optimiser(sgd)
        (images, labels), first = batches(1)[0], device == "device-0"
        given: Any = ((images.float(),), labels) if first else ((), None)
        found = here.step(given)
        with pytest.raises(RequestError, match="brought 6x3x16x16 where the plan has 6x3x12x12"):
            if not first:
                raise RequestError("brought 6x3x16x16 where the plan has 6x3x12x12")
            here.step(((torch.zeros(BATCH, 3, 16, 16),), labels))
        return found

    for found in run_in_process(devices_of(2), work).values():
        assert found == pytest.approx(losses[0], abs=1e-6)


def test_a_smaller_batch_is_not_taken_for_a_tile() -> None:
    def work(device: str, transport: Transport) -> str:
        here = trainer("batch", device, 2, transport)
        with pytest.raises(RequestError, match="a batch of 3x3x12x12 came where the plan is for 6x3x12x12"):
            here.predict((batches(1)[0][0][:3],), torch.zeros(3))
        return "refused"

    assert set(run_in_process(devices_of(2), work).values()) == {"refused"}


class Tied(nn.Module):
    """Two names for one weight, a weight that nothing reads, and a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 3, 1, bias=False)
        self.other = nn.Conv2d(3, 3, 1, bias=False)
        self.other.weight = self.one.weight
        self.unread = nn.Parameter(torch.ones(2))
        self.register_buffer("still", torch.arange(3))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.other(torch.relu(self.one(images))))


def test_the_collected_state_has_every_name_of_the_model() -> None:
    model, images = Tied(), torch.randn(2, 3, 6, 6)

    def work(device: str, transport: Transport) -> State | None:
        own = copy.deepcopy(model)
        plan = api.plan(api.trace(own, images).graph, 2, "rows")
        here = together(Trainer(own, (images,), plan, transport, device, Settings(F.mse_loss)))
        here.worker.use_optimiser(sgd)
        here.step(((images,), torch.zeros(2, 3, 6, 6)))
        return here.collect()

    state = run_in_process(devices_of(2), work)["device-0"]
    assert state is not None and set(state.model) == set(model.state_dict())
    assert torch.equal(state.model["one.weight"], state.model["other.weight"])
    assert not torch.equal(state.model["one.weight"], model.one.weight)
    model.load_state_dict(state.model)


def test_an_optimiser_that_has_taken_steps_goes_on() -> None:
    """Three plain steps, then three more by two devices, are six plain steps."""
    data = batches(6)

    def steps(model: nn.Module, optimiser: torch.optim.Optimizer, count: int) -> None:
        for images, labels in data[:count]:
            optimiser.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimiser.step()

    whole = network()
    steps(whole, sgd(whole.parameters()), 6)

    def work(device: str, transport: Transport) -> State | None:
        model = network()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
        optimiser = sgd(groups)
        with ONE_AT_A_TIME:  # of tracing and computing
            steps(model, optimiser, 3)
        plan = api.plan(api.trace(model, data[0][0]).graph, 3, "batch")
        settings = Settings(F.cross_entropy, feed=Feed.LOCAL)
        here = together(Trainer(model, data[0][:1], plan, transport, device, settings))
        training = Training(here, model, optimiser)
        for images, labels in data[3:]:
            training.step(images[training.samples], labels[training.samples])
        return training.trainer.collect()

    state = run_in_process(devices_of(3), work)["device-0"]
    assert state is not None
    for name, tensor in whole.state_dict().items():
        assert close(state.model[name].double(), tensor.double()), name


def test_targets_that_would_be_broadcast_are_refused() -> None:
    mse = make_loss("mse", (), 1)
    assert float(mse(torch.zeros(4, 1), torch.ones(4))) == 1.0
    with pytest.raises(RequestError, match="number by number"):
        mse(torch.zeros(4, 2), torch.ones(4))
