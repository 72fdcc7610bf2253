"""ReLU6 in place keeps its result and no copy of what it overwrote."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.api import lower, make_worker, plan
from manyhands.ir.graph import Pointwise
from manyhands.runtime.inprocess import run_in_process
from manyhands.tracing.clamping import clamping
from manyhands.tracing.graphs import trace
from manyhands.verifying import compare, make_trial, reference, train
from tests.tracing.test_saving import Model

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def ready(model: Model) -> Model:
    model(IMAGES)
    return model


@pytest.mark.parametrize("module", [nn.ReLU6(inplace=True), nn.Hardtanh(-1.0, 0.5, inplace=True)])
def test_the_gradient_is_that_of_torch_to_the_last_bit(module: nn.Module) -> None:
    """At the ends too, and for what is no number."""
    assert isinstance(module, nn.Hardtanh)
    ends = [module.min_val, module.max_val, float("nan"), float("inf"), -float("inf"), 0.25, 3.0, -2.0]
    clamp = clamping(module)
    assert clamp is not None
    found = []
    for function in (lambda x: clamp((x,), {}), module):
        x = torch.tensor(ends, requires_grad=True)
        result = function(x.clone())
        (gradient,) = torch.autograd.grad((result * torch.arange(1.0, 9.0)).sum(), x)
        found.append((result.detach(), gradient))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.nan_to_num(77.0), theirs.nan_to_num(77.0))


def test_other_modules_are_left_alone() -> None:
    class Steeper(nn.ReLU6):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert clamping(nn.ReLU(inplace=True)) is None and clamping(Steeper(inplace=True)) is None


def test_nothing_is_copied() -> None:
    """What is kept of the layer is its result, which the next one keeps anyway."""
    graph = trace(ready(Model(nn.ReLU6(inplace=True), nn.Conv2d(8, 8, 3))), (IMAGES,)).graph
    (clamped,) = (layer for layer in graph.layers if isinstance(layer.operation, Pointwise))
    assert clamped.saved is not None
    assert clamped.saved.result and not clamped.saved.extra_items and not clamped.saved.extra_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_is_copied_and_so_are_numbers_that_torch_compares_in_another_type(
    dtype: torch.dtype,
) -> None:
    """Of 16 bits torch rounds an end in forward, and not in backward."""
    layers = nn.Conv2d(3, 8, 3), nn.Hardtanh(-0.7, 0.7, inplace=True), nn.Conv2d(8, 8, 1)
    output = dtype is torch.float32
    model = nn.Sequential(*layers[: 2 if output else 3]).to(dtype)
    graph = trace(model, (IMAGES.to(dtype),)).graph
    (clamped,) = (layer for layer in graph.layers if isinstance(layer.operation, Pointwise))
    assert clamped.saved is not None and clamped.saved.extra_items == 1.0


@pytest.mark.parametrize(
    "then",
    [
        lambda x: x.add_(1.0),
        lambda x: x.flatten(2).mul_(2.0),
        lambda x: F.relu(x, inplace=True) * x,
    ],
    ids=["added to", "through a view", "rectified"],
)
def test_a_result_that_is_overwritten_is_copied_as_torch_does(then: Callable[[Tensor], Tensor]) -> None:
    model = ready(Model(nn.ReLU6(inplace=True), then=then))
    traced = trace(model, (IMAGES,))
    lowered = lower(traced.graph, plan(traced.graph, 2, "rows"))
    trial = make_trial(traced.graph, (IMAGES,), steps=2)
    outcomes = run_in_process(
        lowered.plan.devices,
        lambda device, transport: train(
            make_worker(traced, lowered, copy.deepcopy(model), device, transport), trial
        ),
    )
    found = compare(traced.graph, reference(model, traced.graph, trial), tuple(outcomes.values()))
    assert found.worst < 1e-4
