"""Gradients of convolutions' weights after those of their inputs: the same ones, when they are asked for."""

from __future__ import annotations

from dataclasses import replace
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands import api
from manyhands.ir.choices import late_convolutions
from manyhands.ir.program import Backward, Fold, Forward, Program, Receive, Send, Slope
from manyhands.planning.checking import Flawed, check
from manyhands.planning.lowering import Lowered
from manyhands.runtime.late import Job, late_conv2d

WINDOWS = [((1, 1), (1, 1), (1, 1), 1), ((2, 2), (0, 1), (1, 1), 2), ((1, 1), (2, 2), (2, 2), 1)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_gradients_of_conv2d(window: tuple, order: torch.memory_format, with_bias: bool) -> None:
    """Of a piece of a larger weight, too; nothing is added to it before the job is done."""
    torch.manual_seed(0)
    *_, groups = window
    x = torch.randn(2, 4, 9, 8).contiguous(memory_format=order).requires_grad_()
    whole = nn.Parameter(torch.randn(8, 4 // groups, 3, 3).contiguous(memory_format=order))
    bias = nn.Parameter(torch.randn(6)) if with_bias else None
    jobs: list[Job] = []
    late = late_conv2d(jobs.append, x, whole[:6], bias, *window)
    expected = F.conv2d(x, whole[:6], bias, *window)
    assert torch.equal(late, expected)
    gradient = torch.randn_like(expected)
    tensors = [x, whole, *([bias] if bias is not None else [])]
    wanted = torch.autograd.grad(expected, tensors, gradient)
    late.backward(gradient)
    assert x.grad is not None and whole.grad is None and (bias is None or bias.grad is None)
    for job in jobs:
        job()
    for tensor, found in zip(tensors, wanted, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, found)


def test_a_weight_that_is_used_twice_gets_both_gradients() -> None:
    weight, jobs = nn.Parameter(torch.randn(3, 3, 1, 1)), list[Job]()
    x = torch.randn(2, 3, 4, 4)
    for _ in range(2):
        late_conv2d(jobs.append, x, weight, None, (1, 1), (0, 0), (1, 1), 1).sum().backward()
    for job in jobs:
        job()
    once: Tensor = torch.autograd.grad(F.conv2d(x, weight).sum(), weight)[0]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * once)


def test_weights_in_another_precision_and_frozen_ones() -> None:
    torch.manual_seed(0)
    x, jobs = torch.randn(2, 3, 5, 5), list[Job]()
    weight, bias = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4))
    cast = weight.to(torch.bfloat16)
    late_conv2d(jobs.append, x.bfloat16(), cast, None, (1, 1), (0, 0), (1, 1), 1).sum().backward()
    frozen = weight.detach()
    late_conv2d(jobs.append, x, frozen, bias, (1, 1), (0, 0), (1, 1), 1).sum().backward()
    assert len(jobs) == 2 and weight.grad is None and bias.grad is None
    for job in jobs:
        job()
    expected = torch.autograd.grad(F.conv2d(x.bfloat16(), weight.to(torch.bfloat16)).sum(), weight)[0]
    assert weight.grad is not None and weight.grad.dtype == torch.float32 and bias.grad is not None
    torch.testing.assert_close(weight.grad, expected)
    torch.testing.assert_close(bias.grad, torch.full((4,), 2 * 3 * 3.0))


def test_nothing_is_held_after_the_jobs_are_done() -> None:
    """One convolution after another: a job must not hold the graph, which holds where the jobs are kept."""
    weights = [nn.Parameter(torch.randn(3, 3, 3, 3)) for _ in range(3)]
    seen = _inputs_seen(weights)
    assert len(seen) == 3 and all(weight.grad is not None for weight in weights)
    assert not any(tensor() is not None for tensor in seen)


def _inputs_seen(weights: list[nn.Parameter]) -> list[ref[Tensor]]:
    """Of convolutions in a row, after a step: what they read."""
    jobs: list[Job] = []
    x, seen = torch.randn(2, 3, 9, 9), []
    for weight in weights:
        x = F.relu(late_conv2d(lambda job: jobs.append(job), x, weight, None, (1, 1), (1, 1), (1, 1), 1))
        seen.append(ref(x))
    x.sum().backward()
    for job in jobs:
        job()
    return seen


@pytest.mark.parametrize(("strategy", "fuse"), [("rows", ("0", "5")), ("batch", ("6",))])
def test_several_convolutions_in_a_row_train_exactly(strategy: str, fuse: tuple[str, ...] | None) -> None:
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    others = [nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)]
    model = nn.Sequential(*first, *others, nn.Conv2d(4, 2, 1))
    images = torch.randn(4, 3, 12, 12)
    graph = api.trace(model, images).graph
    chosen = api.plan(graph, 2, strategy, fuse=fuse)
    found = api.lower(graph, chosen).programs[0].steps
    chunks = {step.chunk: step.layers for step in found if isinstance(step, Forward)}
    late = [late_convolutions(chunks[s.chunk], graph.by_name()) for s in found if isinstance(s, Slope)]
    assert max(map(len, late)) > 1
    assert api.verify(model, (images,), chosen).worst < 1e-9


def _lowered() -> Lowered:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1))
    graph = api.trace(model, torch.empty(4, 3, 8, 8, device="meta")).graph
    return api.lower(graph, api.plan(graph, 2, "batch"))


def test_they_are_computed_between_sending_and_waiting() -> None:
    for program in _lowered().programs:
        slopes = [position for position, step in enumerate(program.steps) if isinstance(step, Slope)]
        assert slopes
        for position in slopes:
            left = Backward(program.steps[position].chunk, later=True)  # type: ignore[union-attr]
            between = program.steps[program.steps.index(left) + 1 : position]
            assert any(isinstance(step, Send) for step in between)
            assert not any(isinstance(step, Receive) for step in between)
            assert isinstance(program.steps[position + 1], Receive)


def test_a_program_that_forgets_them_is_refused() -> None:
    found = _lowered()
    first, *others = found.programs
    steps = tuple(step for step in first.steps if not isinstance(step, Slope))
    with pytest.raises(Flawed, match="some gradients of weights are left"):
        check(replace(found, programs=(Program(first.device, steps), *others)))


def test_they_are_not_sent_before_they_are_computed() -> None:
    found = _lowered()
    first, *others = found.programs
    slope = next(step for step in first.steps if isinstance(step, Slope))
    steps = [step for step in first.steps if step != slope]
    fold = next(position for position, step in enumerate(steps) if isinstance(step, Fold))
    steps.insert(fold, slope)
    with pytest.raises(Flawed, match="cannot send slopes .* some gradients of weights are left"):
        check(replace(found, programs=(Program(first.device, tuple(steps)), *others)))
