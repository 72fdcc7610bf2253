"""Whatever is computed again: gradients, buffers, random numbers and results are torch's own, bit for bit."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.checkpointing.measuring import measure
from manyhands.errors import RequestError, RunError
from manyhands.ir.schedule import Action, Advance, Back, Disk, Restore, Store, Tape
from manyhands.models import ZOO, build
from manyhands.planning.checkpoints import Table, plain
from manyhands.planning.revolve import revolve
from manyhands.runtime import thrift
from manyhands.runtime.recipes import Norm, recipe_for
from manyhands.runtime.replaying import Script, run
from manyhands.runtime.shelf import Parcel
from manyhands.runtime.stages import Recipe
from manyhands.runtime.thrift import gradient_of_convolution
from manyhands.tracing.stages import Staged, assembled, result_names, staged

SMALL = {"unet": 32, "unet-small": 32}


class Trial:
    """A model, cut and measured, to be run by any schedule."""

    def __init__(self, model: nn.Module, *inputs: Tensor) -> None:
        self.model, self.inputs = model, inputs
        self.cut: Staged = staged(model, inputs)
        self.recipes: list[Recipe] = [recipe_for(code) for code in self.cut.stages]
        self.chain, _ = measure(self.cut, self.recipes, inputs, model, 1, resident=False)
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def outcome(self, forward: Callable[..., Any], steps: int = 2) -> list[Tensor]:
        """Results, gradients added up over steps, buffers, and where the random stream is."""
        self.model.load_state_dict(self.state)
        self.model.zero_grad()
        torch.manual_seed(3)
        found = []
        for _ in range(steps):
            results = forward(*self.inputs)
            results = results if isinstance(results, tuple | list) else [results]
            loss = torch.stack([(result * result).mean() for result in results]).sum()
            loss.backward()
            found += [result.detach().clone() for result in results]
        found += [w.grad.clone() for w in self.model.parameters() if w.grad is not None]
        return [*found, *(b.clone() for b in self.model.buffers()), torch.get_rng_state()]

    def by(self, actions: tuple[Action, ...], directory: Path | None = None) -> Callable[..., Any]:
        script = Script(
            self.cut.stages,
            self.recipes,
            self.cut.states,
            self.cut.differentiable,
            actions,
            batch=len(self.inputs[0]),
            directory=directory,
        )

        def forward(*inputs: Tensor) -> Any:
            values = run(
                script, dict(zip(self.cut.inputs, inputs, strict=True)), result_names(self.cut.results)
            )
            return assembled(self.cut.results, values)

        return forward

    def require_same(self, actions: tuple[Action, ...], directory: Path | None = None) -> None:
        expected, found = self.outcome(self.model), self.outcome(self.by(actions, directory))
        assert len(expected) == len(found)
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_model_of_the_zoo_at_three_budgets(name: str) -> None:
    channels, size, _ = ZOO[name].input_shape
    size = min(size, SMALL.get(name, 64))
    torch.manual_seed(0)
    trial = Trial(build(name).train(), torch.randn(2, channels, size, size))
    most = plain(trial.chain).peak_bytes
    table = Table(trial.chain, most)
    least = table.least_bytes
    assert least is not None
    tried = set()
    for part in (0.0, 0.3, 0.9):
        found = table.plan(int(least + part * (most - least)))
        assert found is not None
        tried.add(found.actions)
        trial.require_same(found.actions)
    assert len(tried) == 3


def test_a_stage_with_too_little_room_is_measured_on_a_part_of_the_image() -> None:
    """What is foreseen of its other modes comes near to what is measured, and what is tried is exact."""
    torch.manual_seed(0)
    trial = Trial(build("resnet18").train(), torch.randn(1, 3, 128, 128))
    recipes = [recipe_for(code) for code in trial.cut.stages]
    images, several = [torch.randn(1, 3, 128, 128)], [recipe.modes > 1 for recipe in recipes]
    chain, _ = measure(
        trial.cut, recipes, images, trial.model, 1, resident=False, before=lambda stage: several[stage]
    )
    for tight, roomy in zip(chain.stages, trial.chain.stages, strict=True):
        assert tight.modes[-1].backward_bytes == roomy.modes[-1].backward_bytes
        assert [mode.keeps for mode in tight.modes] == [mode.keeps for mode in roomy.modes]
        for one, two in zip(tight.modes, roomy.modes, strict=True):
            assert one.own_bytes == pytest.approx(two.own_bytes, rel=0.1, abs=1e4)
    table = Table(chain, plain(chain).peak_bytes)
    assert table.least_bytes is not None
    found = table.plan(table.least_bytes)
    assert found is not None
    trial.require_same(found.actions)


@pytest.mark.parametrize("number", range(40))
def test_the_gradient_of_a_convolution_in_parts(number: int) -> None:
    """Sample by sample, or by bands of rows: any kernel, stride, padding and dilation."""
    rng = Random(number)
    settings = [rng.choice(values) for values in ((1, 3, 5), (1, 2, 3), (0, 1, 3), (1, 2), (1, 2))]
    module = nn.Conv2d(4, 6, *settings).double()
    torch.manual_seed(number)
    images = torch.randn(rng.choice((1, 1, 3)), 4, rng.randint(20, 150), 12, dtype=torch.float64)
    gradient = torch.randn_like(module(images))
    whole, parts = (
        gradient_of_convolution(gradient, images, module, [True] * 3, in_parts=in_parts)
        for in_parts in (False, True)
    )
    for one, two in zip(whole, parts, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


class Odd(nn.Module):
    """Dropout, a weight used twice, a tensor read three times, norms of other kinds, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=None)
        self.frozen = nn.BatchNorm2d(8).eval()
        self.unbiased = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.group = nn.GroupNorm(2, 8)
        self.leaky = nn.LeakyReLU(0.1)
        self.dropout = nn.Dropout(0.4)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        first = self.dropout(self.leaky(self.norm(self.first(images))))
        second = torch.relu(self.unbiased(self.twice(first)) + first)
        third = self.frozen(self.twice(second)).clamp(-1, 1)
        gate = torch.sigmoid(self.spectral(first))
        joined = second * gate + first + third
        return self.pool(nn.functional.relu6(self.group(joined))), self.pool(joined)


def _one_by_one(trial: Trial, mode: int, blind: bool) -> tuple[Action, ...]:
    """Every stage is computed again right before its backward."""
    last = len(trial.chain.stages) - 1
    actions: list[Action] = []
    for stage in range(last):
        actions += [Store(stage), Advance(stage, stage + 1)]
    for stage in range(last, -1, -1):
        if stage < last:
            actions.append(Restore(stage, last=True))
        choice = min(mode, len(trial.chain.stages[stage].modes) - 1)
        actions += [Tape(stage, blind and stage < last, choice), Back(stage)]
    return tuple(actions)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("blind", [False, True])
def test_a_model_with_much_that_is_odd(mode: int, blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrift, "BLOCK_BYTES", 1 << 12)  # so that there are several
    torch.manual_seed(0)
    trial = Trial(Odd(), torch.randn(3, 3, 17, 19))
    assert len(trial.chain.stages) > 10
    modes = [(r.modes, len(s.modes)) for r, s in zip(trial.recipes, trial.chain.stages, strict=True)]
    norms = [m for m, recipe in zip(modes, trial.recipes, strict=True) if isinstance(recipe, Norm)]
    assert len(norms) > 1 and all(offered == same for offered, same in norms)
    trial.require_same(_one_by_one(trial, mode, blind))
    trial.require_same(plain(trial.chain).actions)
    trial.require_same(revolve(len(trial.chain.stages), 1))  # from the beginning each time


def test_a_forward_of_a_modules_own_is_run_as_it_is() -> None:
    """It draws random numbers, where its class does not."""

    def noisy(images: Tensor) -> Tensor:
        made = nn.Conv2d.forward(first, images)
        return made + torch.randn_like(made)

    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    first.forward = noisy  # type: ignore[method-assign]
    trial = Trial(nn.Sequential(first, second, nn.Conv2d(8, 4, 3)), torch.randn(2, 3, 9, 9))
    assert len(trial.chain.stages) == 3
    trial.require_same(_one_by_one(trial, 0, blind=False))
    trial.require_same(revolve(len(trial.chain.stages), 1))


def test_stages_alike_but_for_whose_gradient_is_wanted() -> None:
    """Nobody wants that of the images: the first of two equal convolutions needs less backward."""
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
    images = torch.randn(4, 8, 16, 16)
    first, second, third = (stage.modes[0].backward_bytes for stage in Trial(model, images).chain.stages)
    assert second == third >= first + images.nbytes


def test_states_on_disk(tmp_path: Path) -> None:
    """Every state is written, and read back as it was; nothing is left."""
    torch.manual_seed(0)
    trial = Trial(Odd(), torch.randn(3, 3, 17, 19))
    actions = _one_by_one(trial, 1, blind=True)
    shelved = tuple(Store(a.state, disk=True) if isinstance(a, Store) and a.state else a for a in actions)
    trial.require_same(shelved, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_planned_schedule_with_a_disk(tmp_path: Path) -> None:
    """The disk is taken to be quick, so that it is used."""
    torch.manual_seed(0)
    trial = Trial(build("resnet18-cifar").train(), torch.randn(2, 3, 32, 32))
    table = Table(trial.chain, plain(trial.chain).peak_bytes, disk=Disk(1e12, 1e12))
    assert table.least_bytes is not None
    found, without = table.plan(table.least_bytes), table.plan(table.least_bytes, on_disk=False)
    assert found is not None and found.on_disk
    assert without is None or found.seconds < without.seconds
    trial.require_same(found.actions, tmp_path)


class Signs(nn.Module):
    """A state that is the input itself, views of one memory, one seen through a sign, and other types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        above = images > 0.3
        turned = torch.fft.fft2(images).conj().imag
        first = self.first(images)
        both = torch.tanh(first[:, :3]) * turned + torch.tanh(first[:, 3:])
        return self.last(torch.where(above, both, images)) * images


def test_states_of_all_kinds_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    many = torch.randn(64, 3, 16, 16)
    trial = Trial(Signs(), many[:2])
    last = len(trial.chain.stages) - 1
    actions: list[Action] = []
    for stage in range(last):
        actions += [Store(stage, disk=stage > 0), Advance(stage, stage + 1)]
    for stage in range(last, -1, -1):
        if stage < last:
            actions.append(Restore(stage, last=True))
        actions += [Tape(stage, False), Back(stage)]
    actions.insert(2 * last, Restore(last - 1, last=False))  # the last one reads what was on disk
    actions.insert(2 * last + 1, Advance(last - 1, last))
    trial.require_same(tuple(actions), tmp_path)


def test_what_is_held_anyway_is_not_written(tmp_path: Path) -> None:
    many = torch.randn(64, 8)
    parcel = Parcel(
        {"batch": many[:2], "own": torch.ones(3, 4).t(), "n": 7}, tmp_path, {many.untyped_storage()._cdata}
    )
    assert parcel.num_bytes == 48
    values = parcel.take()
    assert values["batch"].data_ptr() == many.data_ptr() and values["n"] == 7
    assert values["own"].stride() == (1, 4) and bool((values["own"] == 1).all())


def test_a_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="could not be written to .*gone: No such file"):
        Parcel({"x": torch.ones(2)}, tmp_path / "gone")


def test_a_disk_that_is_full_is_one_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trial = Trial(Odd(), torch.randn(3, 3, 17, 19))
    actions = _one_by_one(trial, 0, blind=False)
    shelved = tuple(Store(a.state, disk=True) if isinstance(a, Store) and a.state else a for a in actions)
    forward = trial.by(shelved, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # bytes that a file may have
    try:
        with pytest.raises(RunError, match="could not be written to .*: File too large. The weights are"):
            forward(*trial.inputs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    trial.require_same(shelved, tmp_path)  # from the beginning


class Branches(nn.Module):
    """Read twice by one call, added to itself, weights that calls read themselves, parts of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.scale = nn.Parameter(torch.full((1, 8, 1, 1), 1.5))
        self.place = nn.Parameter(torch.randn(8, 9, 9))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.conv(images) * self.scale))
        square = hidden * hidden
        summed = torch.relu(self.norms[1](square) + square) + hidden * self.scale
        placed = torch.relu(self.norms[2](summed)) + self.place.unsqueeze(0)
        return torch.cat([placed, hidden, square * self.scale], dim=1).flatten(1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("slots", [1, 3])
def test_branches_of_all_kinds(batch: int, slots: int) -> None:
    torch.manual_seed(0)
    trial = Trial(Branches(), torch.randn(batch, 4, 9, 9))
    trial.require_same(revolve(len(trial.chain.stages), slots))
    trial.require_same(_one_by_one(trial, 1, True))


def test_a_gradient_that_is_handed_in_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    trial = Trial(model, torch.randn(2, 3, 5, 5))
    result = trial.by(_one_by_one(trial, 0, True))(*trial.inputs)
    gradient = torch.randn_like(result)
    before = gradient.clone()
    result.backward(gradient)
    assert torch.equal(before, gradient)


def test_what_changes_between_forward_and_backward_is_noticed() -> None:
    torch.manual_seed(0)
    trial = Trial(Branches(), torch.randn(2, 4, 9, 9))
    weight = next(trial.model.parameters())
    for change in (trial.inputs[0].zero_, weight.zero_):
        result = trial.by(_one_by_one(trial, 0, True))(*trial.inputs).sum()
        with torch.no_grad():
            change()
        with pytest.raises(RunError, match="changed in place"):
            result.backward()


class Mistaken(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        if self.kind == "random":
            return self.conv(images) + torch.randn(3, 1, 1)
        return self.conv(images.mul_(2))


@pytest.mark.parametrize(
    ("kind", "message"), [("random", "random numbers"), ("input", "overwrites the input")]
)
def test_what_could_not_be_computed_again_is_refused(kind: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        staged(Mistaken(kind), [torch.randn(1, 3, 4, 4)])


def test_the_gradient_of_an_input_comes_back() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 17, 19, requires_grad=True)
    trial = Trial(Odd(), images)
    torch.manual_seed(3)
    trial.model.load_state_dict(trial.state)
    trial.model(images)[0].sum().backward()
    expected, images.grad = images.grad, None
    torch.manual_seed(3)
    trial.model.load_state_dict(trial.state)
    trial.by(_one_by_one(trial, 1, True))(images)[0].sum().backward()
    assert expected is not None and images.grad is not None and torch.equal(expected, images.grad)


def test_frozen_weights_get_no_gradient() -> None:
    torch.manual_seed(0)
    model = build("demo").train()
    for weight in model.stem.parameters():  # type: ignore[union-attr]
        weight.requires_grad = False
    trial = Trial(model, torch.randn(2, 1, 28, 28))
    trial.require_same(_one_by_one(trial, 1, True))
    assert all(weight.grad is None for weight in model.stem.parameters())  # type: ignore[union-attr]
