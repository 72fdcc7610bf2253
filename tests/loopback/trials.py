"""One random case: draw a model and a plan from a seed, train both ways, compare."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor, nn

from manyhands.api import lower, make_worker, plan
from manyhands.errors import RequestError
from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Graph, Pointwise
from manyhands.ir.plan import Plan, Segment
from manyhands.ir.program import Message, Program, Send
from manyhands.planning.lowering import Lowered
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.packing import bits_bytes
from manyhands.runtime.transport import Transport
from manyhands.tracing.graphs import Traced, trace
from manyhands.verifying import (
    Difference,
    Outcome,
    Trial,
    compare,
    flatten,
    make_trial,
    reference,
    sensitivity,
    train,
)
from tests.loopback.random_blocks import Lambda
from tests.loopback.random_models import Net, random_model
from tests.loopback.random_plans import Wish, random_wish

STEPS = 3
REDO = (0, 1, 1, 2, 100)  # samples at a time; 0: kept
BANDS = (1, 1, 2, 3, 5)  # of rows
LOSSES = ((), (Axis.BATCH,), (Axis.BATCH, Axis.ROWS, Axis.COLUMNS), (Axis.CHANNELS,), tuple(Axis))
IN_FLIGHT = (0, 400, 64 << 20)  # bytes: a step waits for its weights, or leaves them to the next


@dataclass(frozen=True)
class Case:
    seed: int
    model: nn.Module
    traced: Traced
    wish: Wish
    plan: Plan
    trial: Trial

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.wish}"


def draw(seed: int) -> Case | None:
    """The case of a seed; None where a device would have nothing to do."""
    rng, own = Random(seed), Random(-seed - 1)
    packed = own.random() < 0.5
    model, example = _trainable(rng, own if packed else None)
    try:
        traced = trace(model, example)
    except RequestError as error:
        assert "overwrites memory" in str(error) or "an empty" in str(error), f"seed {seed}: {error}"
        return None
    wish = random_wish(rng, traced.graph)
    if packed and own.random() < 0.5:
        wish = replace(wish, fuse=rectified(traced.graph))
    try:
        chosen = plan(traced.graph, wish.num_devices, wish.strategy, shares=wish.shares, fuse=wish.fuse)
    except RequestError as error:
        assert "nothing to do" in str(error) or "cannot be cut" in str(error), f"seed {seed}: {error}"
        return None
    chosen = replace(_redone(chosen, own), in_flight_bytes=own.choice(IN_FLIGHT), packed=packed)
    chosen = replace(chosen, loss=own.choice(LOSSES), ahead=own.random() < 0.9)
    return Case(seed, model, traced, wish, chosen, make_trial(traced.graph, example, steps=STEPS))


def _redone(chosen: Plan, rng: Random) -> Plan:
    """The plan, in two of three cases with some segments computed a second time in backward."""
    if rng.random() < 1 / 3:
        return chosen
    refills = rng.choice((0.0, 0.5, 1.0))
    return replace(chosen, segments=tuple(_segment(segment, refills, rng) for segment in chosen.segments))


def _segment(segment: Segment, refills: float, rng: Random) -> Segment:
    redo = rng.choice(REDO)
    bands = rng.choice(BANDS) if redo else 1
    return replace(segment, redo=redo, refill=rng.random() < refills, bands=bands)


def rectified(graph: Graph) -> tuple[str, ...]:
    pairs = [(layer.name, layer.operation) for layer in graph.layers]
    return tuple(name for name, kind in pairs if isinstance(kind, Pointwise) and kind.rectifies)


def _with_rectifiers(model: nn.Module, rng: Random) -> None:
    """After half of its blocks."""
    kinds = (
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.ReLU6(),
        nn.ReLU6(inplace=True),
        Lambda(lambda self, x: x.relu()),
    )
    for net in [module for module in model.modules() if isinstance(module, Net)]:
        for index, block in enumerate(net.blocks):
            if rng.random() < 0.5:
                net.blocks[index] = nn.Sequential(block, copy.deepcopy(rng.choice(kinds)))


def _trainable(rng: Random, rectifying: Random | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A random model that plain PyTorch can train: some overwrite what their own backward needs.

    And of which something is left: rectifiers may make all of it zero.
    """
    while True:
        model, shapes = random_model(rng)
        if rectifying is not None:
            _with_rectifiers(model, rectifying)
        model = model.double()
        example = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
        trial = copy.deepcopy(model)
        try:
            outputs = flatten(trial(*(tensor.clone() for tensor in example)))
            torch.stack([output.sum() for output in outputs]).sum().backward()
        except RuntimeError:
            continue
        if any(float(output.abs().max()) > 1e-9 for output in outputs):  # else rounding decides its signs
            return model, example


def compare_case(case: Case) -> tuple[Difference, Lowered, dict[str, Outcome]]:
    """Train by the plan and plainly."""
    lowered = lower(case.traced.graph, case.plan)

    last = Random(case.seed).random() < 0.5  # half of the devices compute with the channels last

    def work(device: str, transport: Transport) -> Outcome:
        worker = make_worker(case.traced, lowered, copy.deepcopy(case.model), device, transport)
        if last == (case.plan.devices.index(device) % 2 == 0):
            worker.use_format(torch.channels_last, convolving=case.seed % 3 > 0)
        return train(worker, case.trial)

    outcomes = run_in_process(case.plan.devices, work)
    plain = reference(case.model, case.traced.graph, case.trial)
    return compare(case.traced.graph, plain, tuple(outcomes.values())), lowered, outcomes


def sent(program: Program) -> list[Message]:
    return [step.message for step in program.steps if isinstance(step, Send)]


def miscounted(lowered: Lowered, outcomes: dict[str, Outcome]) -> list[str]:
    """Devices that sent more or less than their program says; of packed tiles it says only the most."""
    found = []
    for program in lowered.programs:
        messages = sent(program)
        whole = sum(message.num_bytes for message in messages if not message.packed)
        most = whole + sum(m.num_bytes + bits_bytes(m.tile.numel) for m in messages if m.packed)
        if not STEPS * whole <= outcomes[program.device].sent_bytes <= STEPS * most:
            found.append(program.device)
    return found


def rounding_explains(case: Case, difference: Difference) -> bool:
    """Does plain training itself move about as much when its weights and inputs move in their last digits?"""
    moved = sensitivity(case.model, case.traced.graph, case.trial)
    return moved > 1e-12 and difference.worst <= 1000 * moved
