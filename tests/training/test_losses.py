"""The losses of jobs: what the devices evaluate in parts adds up to what torch evaluates at once."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.geometry import Axis, Span, Tile
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Transport
from manyhands.training.losses import LOSSES, make_loss
from manyhands.training.means import MeanOf
from manyhands.training.trainer import Settings, Trainer

ANCHORS = ((1.0, 2.0), (2.0, 1.0))
SHAPE = (4, 2 * (5 + 3), 6, 5)  # two anchors, three classes


def targets_of(name: str, draw: torch.Generator) -> Tensor:
    match name:
        case "cross_entropy":
            return torch.randint(SHAPE[1], (SHAPE[0], *SHAPE[2:]), generator=draw)
        case "yolov2":
            corners = torch.rand(SHAPE[0], 3, 2, generator=draw, dtype=torch.float64) * 60
            labels = torch.randint(-1, 3, (SHAPE[0], 3, 1), generator=draw)
            return torch.cat([labels, corners, corners + 50], dim=-1)
        case _:
            return torch.rand(SHAPE, generator=draw, dtype=torch.float64)


def tiles_of(axes: tuple[Axis, ...]) -> list[Tile]:
    """The output cut in two, unequally, along each of these axes."""
    dimensions = {axis.dimension(4) for axis in axes}
    halves = [
        (Span(0, 1), Span(1, size)) if n in dimensions else (Span(0, size),) for n, size in enumerate(SHAPE)
    ]
    return [Tile(spans) for spans in product(*halves)]


@pytest.mark.parametrize("name", LOSSES)
def test_parts_add_up_to_the_whole(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    output, targets = torch.randn(SHAPE, generator=draw, dtype=torch.float64), targets_of(name, draw)
    loss, whole = make_loss(name, ANCHORS, 3), Tile.whole(SHAPE)
    assert isinstance(loss, MeanOf)
    one = output.clone().requires_grad_()
    loss(one, targets).backward()
    assert one.grad is not None
    total, parts = 0.0, tiles_of(loss.axes)
    assert len(parts) == 2 ** len(loss.axes)
    for tile in parts:
        some = output[tile.within(whole)].clone().requires_grad_()
        value = loss.part(some, targets, tile, whole)
        value.backward()
        total += float(value.detach())
        assert some.grad is not None
        torch.testing.assert_close(some.grad, one.grad[tile.within(whole)], rtol=1e-12, atol=1e-15)
    assert total == pytest.approx(float(loss(output, targets)), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_targets_of_another_batch_are_refused_though_a_part_of_them_would_fit(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    loss, whole, tile = make_loss(name, ANCHORS, 3), Tile.whole(SHAPE), Tile.whole((2, *SHAPE[1:]))
    assert isinstance(loss, MeanOf)
    twice = targets_of(name, draw).repeat(2, *(1,) * (targets_of(name, draw).ndim - 1))
    with pytest.raises(RequestError, match="targets"):
        loss.part(torch.randn(2, *SHAPE[1:], dtype=torch.float64), twice, tile, whole)


def segmenter() -> nn.Module:
    """A class for every pixel: the output is as large as the image."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.Conv2d(6, 4, 1)
    return nn.Sequential(first, nn.BatchNorm2d(6), nn.ReLU(), last).double()


MODEL = segmenter()
IMAGES = torch.randn(4, 3, 12, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.randint(4, (4, 12, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_evaluates_parts_as_plain_torch_evaluates_the_whole(accumulate: int) -> None:
    model = copy.deepcopy(MODEL)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        each = []
        for _ in range(accumulate):
            loss = F.cross_entropy(model(IMAGES), LABELS) / accumulate
            loss.backward()
            each.append(float(loss.detach()))
        optimiser.step()
        losses.append(sum(each))
    plan = api.plan(api.trace(MODEL, IMAGES).graph, 2, "rows", loss=LOSSES["cross_entropy"])

    def work(device: str, transport: Transport) -> tuple[list[float | None], dict[str, Tensor] | None]:
        settings = Settings(make_loss("cross_entropy", (), 1))
        here = Trainer(copy.deepcopy(MODEL), (IMAGES,), plan, transport, device, settings)
        here.worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9))
        assert here.worker.territory.evaluation is not None
        found = [here.step(*[((IMAGES,), LABELS)] * accumulate) for _ in range(3)]
        state = here.collect()
        return found, None if state is None else state.model

    for found, state in run_in_process(plan.devices, work).values():
        assert found == pytest.approx(losses, rel=1e-12)
        for name, tensor in (state or {}).items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_a_loss_of_ones_own_is_not_evaluated_in_parts() -> None:
    plan = api.plan(api.trace(MODEL, IMAGES).graph, 1, "single", loss=(Axis.BATCH,))

    def work(device: str, transport: Transport) -> None:
        with pytest.raises(RequestError, match="Plan it anew"):
            Trainer(copy.deepcopy(MODEL), (IMAGES,), plan, transport, device, Settings(F.cross_entropy))

    run_in_process(plan.devices, work)
