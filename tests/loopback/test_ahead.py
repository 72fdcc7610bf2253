"""What others wait for is computed first: exact, sent before the rest, and chosen where that helps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import api
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.geometry import Span, Tile, rest_of
from manyhands.ir.parsing import parse_program
from manyhands.ir.plan import Plan
from manyhands.ir.program import Content, Finish, Forward, Program, Send
from manyhands.planning import ahead
from manyhands.planning.ahead import first_boxes
from manyhands.planning.checking import Flawed, check
from manyhands.planning.lowering import Lowered
from manyhands.runtime import late
from manyhands.runtime.computing import Batch
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Transport
from manyhands.tracing.graphs import Traced, trace
from manyhands.verifying import Outcome, compare, make_trial, reference, train

EXAMPLE = (torch.randn(4, 4, 24, 18, generator=torch.Generator().manual_seed(5), dtype=torch.float64),)


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LEAST_BYTES", 0)


def box(samples: tuple[int, int], rows: tuple[int, int]) -> Tile:
    return Tile((Span(*samples), Span(0, 8), Span(*rows), Span(0, 5)))


@pytest.mark.parametrize(
    ("sent", "first"),
    [
        ([((0, 4), (10, 11))], [((0, 4), (10, 11))]),  # the upper border
        ([((0, 4), (10, 12)), ((0, 4), (19, 20))], [((0, 4), (10, 12)), ((0, 4), (19, 20))]),
        ([((0, 4), (11, 12))], [((0, 4), (10, 12))]),  # near the border, behind what is computed twice
        ([((0, 4), (10, 20))], [((0, 2), (10, 20))]),  # all of it: half of the samples
        ([((0, 4), (10, 14)), ((0, 4), (15, 20))], [((0, 2), (10, 20))]),  # too much to be a border
    ],
)
def test_what_is_computed_first(
    sent: list[tuple[tuple[int, int], ...]], first: list[tuple[tuple[int, int], ...]]
) -> None:
    tile = box((0, 4), (10, 20))
    boxes = first_boxes(tile, [box(*where) for where in sent])
    assert list(boxes) == [box(*where) for where in first]
    rest = rest_of(tile, boxes)
    assert rest.numel + sum(b.numel for b in boxes) == tile.numel
    assert not any((rest & b).numel for b in boxes)


def test_of_one_sample_half_of_the_rows_come_first() -> None:
    tile = box((2, 3), (0, 7))
    assert first_boxes(tile, [tile]) == (box((2, 3), (0, 3)),)
    assert first_boxes(box((2, 3), (0, 1)), [box((2, 3), (0, 1))]) == ()


def convolutions() -> list[nn.Module]:
    """Every way in which windows lie: padding on one side of a tile only, strides, holes, groups, no bias."""
    return [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 5, padding=2, bias=False),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.Conv2d(4, 4, (3, 1), padding=(1, 0), groups=2),
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 3, padding=(2, 1)),
    ]


def network(number: int, norm: bool) -> nn.Module:
    """The convolution of that number in the middle, and as the first."""
    torch.manual_seed(number)
    first, middle, last = convolutions()[number], convolutions()[number], nn.Conv2d(4, 3, 3, padding=1)
    between = nn.BatchNorm2d(4) if norm else nn.Identity()
    return nn.Sequential(first, between, nn.ReLU(), middle, nn.Tanh(), last).double()


def lowered_by(model: nn.Module, strategy: str, devices: int) -> tuple[Traced, Lowered]:
    traced = trace(model, EXAMPLE)
    chosen = replace(api.plan(traced.graph, devices, strategy, fuse=("0", "3")), ahead=True)
    return traced, api.lower(traced.graph, chosen)


def finishes(program: Program) -> list[Finish]:
    return [step for step in program.steps if isinstance(step, Finish)]


@pytest.mark.parametrize("number", range(len(convolutions())))
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("rows", 3), ("grid", 4), ("channels", 2), ("batch:2,rows:2", 4), ("channels; 1 = rows; 4 = batch", 2)],
)
def test_it_is_exact(
    number: int, norm: bool, strategy: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parted = network(number, norm), set()
    traced, lowered = lowered_by(model, strategy, devices)
    plainly = late._some_rows

    def noted(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        parted.add(tuple(weight.shape[2:]))
        return plainly(x, weight, *others)

    monkeypatch.setattr(late, "_some_rows", noted)
    trial = make_trial(traced.graph, EXAMPLE)

    def work(device: str, transport: Transport) -> Outcome:
        worker = api.make_worker(traced, lowered, copy.deepcopy(model), device, transport)
        if lowered.plan.devices.index(device) % 2:
            worker.use_format(torch.channels_last)
        return train(worker, trial)

    outcomes = tuple(run_in_process(lowered.plan.devices, work).values())
    difference = compare(traced.graph, reference(model, traced.graph, trial), outcomes)
    assert difference.exact, difference
    assert convolutions()[number].kernel_size in parted, "it was computed all at once"


def test_it_is_sent_before_the_rest_is_computed_and_reads_back() -> None:
    _, lowered = lowered_by(network(0, norm=True), "rows", 3)
    (middle,) = (program for program in lowered.programs if program.device == "device-1")
    assert parse_program(str(middle)) == middle
    steps = [step for step in middle.steps if isinstance(step, Forward | Finish | Send)]
    begun = next(n for n, step in enumerate(steps) if isinstance(step, Forward) and step.ahead)
    *sends, last = steps[begun + 1 : begun + 4]
    assert isinstance(last, Finish)
    assert [s.message.target for s in sends if isinstance(s, Send)] == ["device-2", "device-0"]
    assert {s.message.content for s in sends if isinstance(s, Send)} == {Content.VALUE}


@pytest.mark.parametrize("strategy", ["rows", "channels"])
def test_programs_that_read_what_is_not_finished_are_refused(strategy: str) -> None:
    _, lowered = lowered_by(network(0, norm=True), strategy, 2)
    check(lowered)
    first, *others = lowered.programs
    last = finishes(first)[0]
    without = replace(first, steps=tuple(step for step in first.steps if step != last))
    with pytest.raises(Flawed, match="is not finished"):
        check(replace(lowered, programs=(without, *others)))


def test_it_is_the_same_where_nothing_is_learned() -> None:
    model = network(0, norm=False).eval()
    traced, lowered = lowered_by(model, "rows", 2)
    trial = make_trial(traced.graph, EXAMPLE, steps=1)

    def work(device: str, transport: Transport) -> torch.Tensor:
        worker = api.make_worker(traced, lowered, copy.deepcopy(model), device, transport)
        found = worker.predict(Batch(trial.batches[0], trial.loss))
        assert found is not None
        return found[0]

    for found in run_in_process(lowered.plan.devices, work).values():
        torch.testing.assert_close(found, model(*trial.batches[0]), rtol=1e-12, atol=1e-12)


def test_what_is_sent_comes_first_whichever_samples_these_are() -> None:
    _, lowered = lowered_by(network(0, norm=False), "channels; 1 = batch", 2)
    for program in lowered.programs:
        steps = [step for step in program.steps if isinstance(step, Forward | Finish | Send)]
        assert finishes(program)
        for finish in finishes(program):
            assert isinstance(steps[steps.index(finish) - 1], Send), f"{program.device}: {finish}"


def test_windows_that_lie_in_the_padding_alone_are_not_parted() -> None:
    layers = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1, padding=3), nn.Conv2d(4, 3, 3)
    model = nn.Sequential(*layers).double()
    chosen = api.plan(trace(model, EXAMPLE).graph, 2, "rows; 2 = single; 3 = rows", shares=(12, 1))
    assert api.verify(model, EXAMPLE, replace(chosen, ahead=True)).exact


def _chosen(mbit: float) -> Plan:
    """For a large image on two devices."""
    model = nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 32), (32, 32), (32, 32), (32, 8))))
    graph = api.trace(model, torch.empty(1, 3, 256, 256)).graph
    devices = tuple(Device(f"pi-{n}", flops_per_s=4e9) for n in range(2))
    return api.plan(graph, Cluster(devices, mbit * 1e6 / 8, 1e-4))


def test_it_is_chosen_where_it_is_foreseen_to_be_faster() -> None:
    assert _chosen(20).ahead
    assert not _chosen(1e6).ahead
