"""What models and training loops do besides: it happens as without fit, or is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import manyhands
from manyhands import RequestError, RunError
from manyhands.checkpointing.likeness import key_of
from manyhands.tracing.stages import staged

PLENTY = "64GB"


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Backbone(nn.Module):
    """Its features are results, and are read on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = _block(3, 16), _block(16, 16), _block(16, 16)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = self.one(images)
        two = self.two(one)
        return one, two, self.three(two)


class Restless(nn.Module):
    """`how`: what it changes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.count, self.rate, self.size = nn.Conv2d(3, 3, 1), how, 0, 0.5, 0
        self.total: Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        made = self.layer(images)
        match self.how:
            case "number":
                self.count += 1
            case "buffer":
                self.total += 1
            case "replaced":
                self.total = self.total * 0.9 + 0.1 * made.detach().mean()
            case "drawn":
                made = made + torch.randn(1)
            case "noted":
                self.size = 7
            case "read":
                made = made - self.total
        return functional.dropout(made, self.rate, self.training)


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tight", (False, True))
def test_results_may_be_read_on(tight: bool) -> None:
    torch.manual_seed(0)
    model, images = Backbone(), torch.randn(2, 3, 64, 64)

    def gradients(module: Any) -> list[Tensor]:
        model.zero_grad()
        sum(result.square().mean() for result in module(images)).backward()
        assert all(weight.grad is not None for weight in model.parameters())
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    expected = gradients(model)
    fitted: Any = manyhands.fit(model, images, PLENTY)
    if tight:
        fitted = manyhands.fit(model, images, int(1.05 * fitted.fit.least_bytes))
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(expected, gradients(fitted), strict=True))


@pytest.mark.parametrize(
    ("how", "what"), (("number", "count"), ("buffer", "total"), ("replaced", "total"), ("drawn", "random"))
)
def test_what_would_happen_only_while_it_is_traced_is_refused(how: str, what: str) -> None:
    model = Restless(how)
    stream = torch.get_rng_state()
    for attempt in (
        lambda: manyhands.fit(model, IMAGES, PLENTY),
        lambda: manyhands.trace(model, IMAGES),
    ):
        with pytest.raises(RequestError, match=what):
            attempt()
        assert torch.equal(stream, torch.get_rng_state())
        assert model.count == 0 and isinstance(model.total, Tensor) and model.total == 0


def test_what_is_noted_once_is_fine() -> None:
    model = Restless("noted")
    manyhands.fit(model, IMAGES, PLENTY)
    assert model.size == 7


def test_a_number_that_forward_reads_may_not_change_unnoticed() -> None:
    fitted: Any = manyhands.fit(Restless(""), IMAGES, PLENTY)
    fitted(IMAGES)
    fitted.rate = 0.1
    with pytest.raises(RequestError, match="or a number in it"):
        fitted(IMAGES)


def test_a_buffer_that_is_computed_with_again_may_not_change_meanwhile() -> None:
    fitted: Any = manyhands.fit(Restless("read"), IMAGES, PLENTY)
    result = fitted(IMAGES).sum()
    fitted.total.add_(1)
    with pytest.raises(RunError, match="changed in place between forward and backward"):
        result.backward()


def test_hooks_of_weights_do_not_run_while_a_model_is_fitted() -> None:
    """An optimiser in a hook would change the weights."""
    model, called = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()), list[int]()

    def descend(weight: Tensor) -> None:
        called.append(1)
        with torch.no_grad():
            weight.sub_(0.1)

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(descend)
    before = [weight.detach().clone() for weight in model.parameters()]
    fitted = manyhands.fit(model, IMAGES, PLENTY)
    assert not called
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    fitted(IMAGES).sum().backward()
    assert len(called) == 2


def test_gradients_that_are_there_do_not_count_twice() -> None:
    """They are gone before the next step, or added to in their place."""
    model, example = nn.Linear(4000, 4000), torch.randn(2, 4000)
    free: Any = manyhands.fit(model, example, PLENTY).fit
    model(example).sum().backward()
    again: Any = manyhands.fit(model, example, PLENTY).fit
    assert abs(again.foreseen_bytes - free.foreseen_bytes) < 0.25 * model.weight.nbytes


def test_stages_with_a_forward_of_their_own_are_like_no_others() -> None:
    layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    own: Any = layers[1]
    own.forward = lambda images: nn.Conv2d.forward(own, images)
    cut = staged(nn.Sequential(*layers), [IMAGES])
    values = {name: IMAGES for code in cut.stages for name in code.reads}
    first, second, third = (key_of(code, values, cut.differentiable) for code in cut.stages)
    assert second not in (first, third)


def test_a_pool_with_a_list_and_one_image_without_a_batch_are_taken() -> None:
    window: Any = [3, 3]
    manyhands.fit(nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(window), nn.Conv2d(3, 3, 1)), IMAGES, PLENTY)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    fitted = manyhands.fit(model, IMAGES[0], PLENTY)
    assert torch.equal(fitted(IMAGES[0]), model(IMAGES[0]))


def test_what_cannot_be_asked_is_said_in_one_line() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 3, 1))
    with pytest.raises(RequestError, match="LBFGS will keep cannot be asked for"):
        manyhands.fit(model, IMAGES, PLENTY, torch.optim.LBFGS(model.parameters()))
    nothing: Any = None
    with pytest.raises(RequestError, match="not None"):
        manyhands.fit(model, IMAGES, nothing)
