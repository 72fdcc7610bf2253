"""manyhands.fit: a drop-in that trains as the model does, says what it cannot do, and keeps its budget."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import timeit
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import manyhands
from manyhands.benches.budgets import Case, run
from manyhands.checkpointing.fitted import Fit
from manyhands.checkpointing.surveying import survey
from manyhands.emulation.cgroups import why_not
from manyhands.models import build
from manyhands.runtime.process import current_memory
from manyhands.runtime.shelf import measure

PLENTY = "64GB"


@pytest.fixture(scope="module")
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 1, 28, 28)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return build("demo").train()


def _train(module: nn.Module, images: Tensor, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        module(images).square().mean().backward()
        optimizer.step()
    return [tensor.clone() for tensor in module.state_dict().values()]


def test_it_trains_as_the_model_does_to_the_bit(model: nn.Module, images: Tensor) -> None:
    expected = _train(copy.deepcopy(model), images)
    fitted = manyhands.fit(model, images, PLENTY)
    found = _train(fitted, images)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_fitting_leaves_the_model_and_the_random_stream_as_they_were(
    model: nn.Module, images: Tensor
) -> None:
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fitted = manyhands.fit(model, images, PLENTY)
    assert torch.equal(random, torch.get_rng_state())
    assert all(
        torch.equal(one, two) for one, two in zip(state.values(), model.state_dict().values(), strict=True)
    )
    assert all(weight.grad is None for weight in model.parameters())
    assert list(fitted.state_dict()) == list(state) and isinstance(fitted, type(model))
    assert [id(w) for w in fitted.parameters()] == [id(w) for w in model.parameters()]


def test_a_disk_is_measured_and_left_alone_where_there_is_memory(model: nn.Module, images: Tensor) -> None:
    expected, random = _train(copy.deepcopy(model), images), torch.get_rng_state()
    here = Path.cwd()  # tests may have their own directories in memory
    fitted = manyhands.fit(model, images, PLENTY, disk=here)
    assert torch.equal(random, torch.get_rng_state())
    assert fitted.fit.disk_bytes == 0  # type: ignore[union-attr]
    found = _train(fitted, images)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    with pytest.raises(manyhands.RequestError, match="elsewhere cannot be used for states: .*No such file"):
        manyhands.fit(model, images, PLENTY, disk=here / "elsewhere")
    with pytest.raises(manyhands.RequestError, match="is in memory itself"):
        manyhands.fit(model, images, PLENTY, disk="/dev/shm")


def test_a_disk_takes_states_where_that_is_quicker() -> None:
    """Wide convolutions: a state is written in a part of the time in which it is computed again."""
    here = Path.cwd()
    images, layer = torch.randn(16, 192, 24, 24), nn.Conv2d(192, 192, 3, padding=1)
    times = sorted(timeit.repeat(lambda: layer(images), number=1, repeat=5))
    written_s, computed_s = images.nbytes / min(astuple(measure(here))), times[2]
    if written_s > computed_s / 2:
        pytest.skip(f"a state is written in {written_s:.3f} s and computed in {computed_s:.3f} s")
    spawn = multiprocessing.get_context("spawn")  # a process of its own: others have held gigabytes
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        pool.submit(_train_with_disk, here).result()


def _train_with_disk(here: Path) -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(*(nn.Conv2d(192, 192, 3, padding=1) for _ in range(8)))
    images = torch.randn(16, 192, 24, 24)
    expected = _train(copy.deepcopy(wide), images, steps=1)
    free: Fit = manyhands.fit(wide, images, PLENTY).fit  # type: ignore[assignment]
    budget = free.least_bytes + (free.plain_bytes - free.least_bytes) // 10  # much is computed again there
    fitted = manyhands.fit(wide, images, budget, disk=here)
    facts: Fit = fitted.fit  # type: ignore[assignment]
    assert facts.disk_bytes >= images.nbytes and facts.schedule.on_disk
    found = _train(fitted, images, steps=1)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_a_tiny_model_with_plenty_is_not_refused() -> None:
    """Its tensors are so small that rounding up to slots takes more than all of them."""
    torch.manual_seed(0)
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    for _ in range(4):
        manyhands.fit(tiny, torch.randn(2, 3, 8, 8), PLENTY)


def test_fewer_samples_and_evaluation_are_fine(model: nn.Module, images: Tensor) -> None:
    fitted = manyhands.fit(model, images, PLENTY)
    twin = copy.deepcopy(model)
    for module in (fitted, twin):
        module(images[:3]).square().mean().backward()
    pairs = zip(fitted.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(fitted.eval()(images), model(images))


def test_a_copy_has_weights_of_its_own_and_is_plain(model: nn.Module, images: Tensor) -> None:
    fitted = manyhands.fit(model, images, PLENTY)
    twin = copy.deepcopy(fitted)
    assert type(twin) is type(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert any(bool(weight.any()) for weight in fitted.parameters())
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(fitted)


def test_what_has_changed_is_noticed(model: nn.Module, images: Tensor) -> None:
    fitted = manyhands.fit(model, images, PLENTY)
    with pytest.raises(manyhands.RequestError, match="or fewer samples"):
        fitted(torch.cat([images, images]))
    with pytest.raises(manyhands.RequestError, match="or fewer samples"):
        fitted(images.double())
    with pytest.raises(manyhands.RequestError, match="by position"):
        fitted(images=images)
    first = next(fitted.parameters())
    first.requires_grad = False
    with pytest.raises(manyhands.RequestError, match="has changed"):
        fitted(images)
    first.requires_grad = True
    fitted.stem[1].eval()  # type: ignore[index]
    with pytest.raises(manyhands.RequestError, match="has changed"):
        fitted(images)
    with pytest.raises(manyhands.RequestError, match="no_grad"):
        fitted.eval()(images)
    fitted.train()
    with torch.autocast("cpu"), pytest.raises(manyhands.RequestError, match="autocast"):
        fitted(images)
    handle = fitted.head.register_forward_pre_hook(lambda *_: None)  # type: ignore[union-attr]
    with pytest.raises(manyhands.RequestError, match="has changed"):
        fitted(images)
    handle.remove()
    handle = fitted.head.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    with pytest.raises(manyhands.RequestError, match="has changed"):
        fitted(images)
    handle.remove()
    loss = fitted(images).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(manyhands.RunError, match="second time"):
        loss.backward()


def test_too_little_memory_is_answered_with_what_would_do(model: nn.Module, images: Tensor) -> None:
    with pytest.raises(manyhands.RequestError, match=r"the smallest schedule needs .*[MG]B, of which"):
        manyhands.fit(model, images, current_memory() - 1)
    with pytest.raises(manyhands.RequestError, match="is not an amount of memory"):
        manyhands.fit(model, images, "plenty")


class Branching(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images if images.sum() > 0 else -images


def test_a_model_that_cannot_be_traced_is_refused(images: Tensor) -> None:
    with pytest.raises(manyhands.RequestError, match="cannot be traced"):
        manyhands.fit(Branching(), images, PLENTY)


@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
@pytest.mark.parametrize("part", [0.1, 0.6])
def test_a_process_with_no_more_than_the_budget_is_not_killed(part: float) -> None:
    (row,) = run([Case("resnet18", 96, 4, part)], 1, lambda what: None)
    assert row.verdict == "held" and row.within, row


def test_a_survey_finds_the_same_a_second_time() -> None:
    """Nothing of the model before is held any more."""
    first, second = (survey("resnet18-cifar", ((3, 32, 32),), 1) for _ in range(2))
    assert abs(second.plain_bytes - first.plain_bytes) < 10_000_000
    assert abs(second.least_bytes - first.least_bytes) < 10_000_000
