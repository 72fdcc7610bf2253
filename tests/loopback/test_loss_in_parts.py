"""A loss that is a sum of parts: each device evaluates its own, and all of them know the sum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from manyhands.api import lower, make_worker, plan, verify
from manyhands.errors import RequestError
from manyhands.ir.geometry import Axis
from manyhands.ir.program import Content, Receive
from manyhands.planning.lowering import Lowered
from manyhands.runtime.computing import Batch
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Transport
from manyhands.tracing.graphs import Traced, trace
from manyhands.verifying import Outcome, compare, cropped, make_trial, reference, train

EVERY, PLACES = tuple(Axis), (Axis.BATCH, Axis.ROWS, Axis.COLUMNS)
EXAMPLE = (torch.randn(4, 3, 12, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64),)


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1)
    return nn.Sequential(*layers).double()


NETWORK = _network()


def network() -> nn.Module:
    """The same weights each time, also in threads, which share torch's random numbers."""
    return copy.deepcopy(NETWORK)


def lowered_by(
    strategy: str, devices: int, loss: tuple[Axis, ...], **wishes: object
) -> tuple[Traced, Lowered]:
    traced = trace(network(), EXAMPLE)
    chosen = plan(traced.graph, devices, strategy, loss=loss, **wishes)  # type: ignore[arg-type]
    return traced, lower(traced.graph, chosen)


def brought_bytes(lowered: Lowered) -> int:
    """For the sake of the loss."""
    end = len(lowered.plan.segments)
    steps = (step for program in lowered.programs for step in program.steps if isinstance(step, Receive))
    return sum(s.message.num_bytes for s in steps if s.message.segment == end)


@pytest.mark.parametrize(
    ("strategy", "devices", "loss", "tellers", "brings"),
    [
        ("rows", 3, EVERY, 3, False),
        ("rows", 3, (Axis.BATCH,), 0, True),  # every device has a part of every sample
        ("batch:2,rows:2", 4, EVERY, 4, False),
        ("batch:2,rows:2", 4, (Axis.BATCH,), 2, True),  # two devices evaluate the same samples
        ("channels", 2, EVERY, 2, False),
        ("channels", 2, PLACES, 0, True),
        ("rows:2,channels:2", 4, PLACES, 2, True),
        ("rows; 3 = single", 2, EVERY, 0, False),
    ],
)
def test_parts_are_exact_and_bring_no_more_than_they_need(
    strategy: str, devices: int, loss: tuple[Axis, ...], tellers: int, brings: bool
) -> None:
    traced, lowered = lowered_by(strategy, devices, loss)
    assert len(lowered.regions.tellers) == tellers
    _, whole = lowered_by(strategy, devices, ())
    assert (brought_bytes(lowered) > 0) == brings
    assert brought_bytes(lowered) <= brought_bytes(whole)
    trial = make_trial(traced.graph, EXAMPLE)

    def work(device: str, transport: Transport) -> Outcome:
        return train(make_worker(traced, lowered, network(), device, transport), trial)

    outcomes = run_in_process(lowered.plan.devices, work)
    assert compare(traced.graph, reference(network(), traced.graph, trial), tuple(outcomes.values())).exact
    told = {tuple(o.losses) for o in outcomes.values() if o.losses[0] is not None}
    assert len(told) == 1, "the devices know different losses"


def test_where_parts_would_overlap_everybody_evaluates_all() -> None:
    """By unequal shares the samples of one device's rows are others than those of another's."""
    _, lowered = lowered_by("rows:2,batch:2", 4, (Axis.BATCH,), shares=(3, 1, 1, 1))
    assert not lowered.regions.tellers
    _, equal = lowered_by("rows:2,batch:2", 4, (Axis.BATCH,))
    assert len(equal.regions.tellers) == 2


def test_losses_of_several_batches_are_added_up() -> None:
    traced, lowered = lowered_by("rows", 2, EVERY)
    trial = make_trial(traced.graph, EXAMPLE)

    def work(device: str, transport: Transport) -> float | None:
        worker = make_worker(traced, lowered, network(), device, transport)
        worker.use_optimiser(trial.make_optimiser)
        tiles = worker.territory.inputs
        given = [
            Batch(cropped(inputs, tiles), trial.loss, 0, tiles, trial.part) for inputs in trial.batches[:2]
        ]
        return worker.step(*given)

    found = run_in_process(lowered.plan.devices, work)
    expected = sum(float(trial.loss((network()(inputs[0]),)).detach()) for inputs in trial.batches[:2])
    for loss in found.values():
        assert loss == pytest.approx(expected, rel=1e-12)


def test_a_batch_whose_loss_has_no_parts_is_refused() -> None:
    traced, lowered = lowered_by("rows", 2, EVERY)
    trial = make_trial(traced.graph, EXAMPLE)

    def work(device: str, transport: Transport) -> None:
        worker = make_worker(traced, lowered, network(), device, transport)
        with pytest.raises(RequestError, match="Plan it anew"):
            worker.step(Batch(EXAMPLE, trial.loss))

    run_in_process(lowered.plan.devices, work)


class Twice(nn.Module):
    """Returns one result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return y, y


def test_of_several_outputs_everybody_evaluates_all() -> None:
    model = Twice()
    chosen = plan(trace(model, EXAMPLE).graph, 2, "rows", loss=EVERY)
    assert verify(model, EXAMPLE, chosen).exact


def test_numbers_travel_and_not_outputs() -> None:
    _, lowered = lowered_by("rows", 3, EVERY)
    messages = [s.message for p in lowered.programs for s in p.steps if isinstance(s, Receive)]
    told = [m for m in messages if m.content is Content.LOSS]
    assert len(told) == 6
    assert {m.num_bytes for m in told} == {8}
