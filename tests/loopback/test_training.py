"""What belongs to training beside the plan: optimisers, clipping, repeatability, precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from manyhands.api import lower, make_worker, plan, trace
from manyhands.errors import RequestError
from manyhands.planning.lowering import Lowered
from manyhands.runtime.computing import Batch
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Loopback
from manyhands.verifying import Outcome, compare, make_trial, reference, train

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, nesterov, decay": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "AMSGrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "RAdam": partial(torch.optim.RAdam, lr=1e-3),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=1e-3),
}
STRATEGIES = (
    ("rows", 3),
    ("channels", 2),
    ("batch", 3),
    ("rows:2,channels:2", 4),
    ("rows; fc = channels", 3),
)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[tuple[str, nn.Module]] = [
        (
            "one",
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
        ),  # before a norm a bias has no gradient but rounding
        ("bn", nn.BatchNorm2d(8)),
        ("relu", nn.ReLU()),
        ("two", nn.Conv2d(8, 6, 3, stride=2)),
        ("flat", nn.Flatten()),
        ("fc", nn.Linear(6 * 4 * 4, 5)),
    ]
    model = nn.Sequential()
    for name, layer in layers:
        model.add_module(name, layer)
    return model.double()


def run(strategy: str, num_devices: int, **changes: object) -> tuple[list[Outcome], Outcome, object]:
    model, example = small_net(), torch.empty(3, 3, 9, 9, dtype=torch.float64)
    traced = trace(model, example)
    chosen = plan(traced.graph, num_devices, strategy)
    trial = replace(make_trial(traced.graph, (example,)), **changes)  # type: ignore[arg-type]
    lowered = lower(traced.graph, chosen, clip=trial.clip_norm is not None)

    def work(device: str, transport: Loopback) -> Outcome:
        return train(make_worker(traced, lowered, copy.deepcopy(model), device, transport), trial)

    outcomes = list(run_in_process(chosen.devices, work).values())
    return outcomes, reference(model, traced.graph, trial), traced.graph


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
def test_any_optimiser_steps_as_on_one_device(name: str, strategy: str, num_devices: int) -> None:
    outcomes, plain, graph = run(strategy, num_devices, optimiser=OPTIMISERS[name])
    assert compare(graph, plain, outcomes).exact  # type: ignore[arg-type]


@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
def test_clipping_uses_the_norm_of_all_weights_wherever_they_are(strategy: str, num_devices: int) -> None:
    """The limit is far below the norm of the gradients, so that clipping changes every step."""
    clipped, plain, graph = run(strategy, num_devices, clip_norm=0.05)
    assert compare(graph, plain, clipped).exact  # type: ignore[arg-type]
    free, _, _ = run(strategy, num_devices)
    assert not compare(graph, plain, free).exact  # type: ignore[arg-type]


def test_an_optimiser_that_needs_whole_weights_is_refused_where_they_are_divided() -> None:
    with pytest.raises(RequestError, match="Adafactor needs whole weights at once, and .* is divided"):
        run("channels", 2, optimiser=torch.optim.Adafactor)


@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
def test_a_run_repeats_bit_for_bit(strategy: str, num_devices: int) -> None:
    first, _, _ = run(strategy, num_devices)
    second, _, _ = run(strategy, num_devices)
    for one, two in zip(first, second, strict=True):
        assert one.losses == two.losses
        for a, b in zip(one.parameters + one.gradients, two.parameters + two.gradients, strict=True):
            assert torch.equal(a.tensor, b.tensor)


@pytest.mark.parametrize(("strategy", "num_devices"), STRATEGIES)
def test_single_precision_trains_alike_to_its_rounding(strategy: str, num_devices: int) -> None:
    model, images = small_net().float(), torch.randn(3, 3, 9, 9)
    traced = trace(model, images)
    lowered = lower(traced.graph, plan(traced.graph, num_devices, strategy))

    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0].square().mean()

    def work(device: str, transport: Loopback) -> float | None:
        worker = make_worker(traced, lowered, copy.deepcopy(model), device, transport)
        worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 0.01))
        worker.step(Batch((images,), loss, 0))
        return worker.step(Batch((images,), loss, 1))

    plain = copy.deepcopy(model)
    optimiser = torch.optim.SGD(plain.parameters(), 0.01)
    loss((plain(images),)).backward()
    optimiser.step()
    expected = float(loss((plain(images),)).detach())
    found = [value for value in run_in_process(lowered.plan.devices, work).values() if value is not None]
    assert found and all(abs(value - expected) < 1e-5 for value in found)


def test_optimiser_state_is_divided_among_the_devices_that_share_a_weight() -> None:
    model, images = small_net(), torch.randn(3, 3, 9, 9, dtype=torch.float64)
    traced = trace(model, images)
    lowered = lower(traced.graph, plan(traced.graph, 3, "rows"))
    owned = [sum(p.tile.numel for p in lowered.territory(d).owned) for d in lowered.plan.devices]
    whole = sum(p.numel() for p in model.parameters())
    assert sum(owned) == whole
    assert max(owned) < 0.45 * whole


class DeadEnd(nn.Module):
    """A branch that leads nowhere: its batch norm learns statistics, its weights get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.dead, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(self.dead(x))
        return self.out(x)  # type: ignore[no-any-return]


def test_weights_without_a_gradient_are_left_alone_also_by_weight_decay() -> None:
    model, example = DeadEnd().double(), torch.empty(2, 3, 8, 8, dtype=torch.float64)
    traced = trace(model, example)
    decay = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    trial = replace(make_trial(traced.graph, (example,)), optimiser=decay)
    for strategy in ("single", "rows", "channels"):
        lowered = lower(traced.graph, plan(traced.graph, 2, strategy))

        def work(device: str, transport: Loopback, lowered: Lowered = lowered) -> Outcome:
            return train(make_worker(traced, lowered, copy.deepcopy(model), device, transport), trial)

        outcomes = list(run_in_process(lowered.plan.devices, work).values())
        assert compare(traced.graph, reference(model, traced.graph, trial), outcomes).exact


def test_an_output_that_the_loss_ignores_is_refused() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 2, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model, images = TwoHeads(), torch.randn(2, 3, 8, 8)
    traced = trace(model, images)
    lowered = lower(traced.graph, plan(traced.graph, 1, "single"))

    def work(device: str, transport: Loopback) -> float | None:
        worker = make_worker(traced, lowered, model, device, transport)
        return worker.step(Batch((images,), lambda outputs: outputs[0].sum()))

    with pytest.raises(RequestError, match="the loss does not read the output b"):
        run_in_process(lowered.plan.devices, work)
