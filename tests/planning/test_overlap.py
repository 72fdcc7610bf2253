"""With room for more on its way, weights change and travel while other gradients still flow back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.graph import Graph, Input, Layer
from manyhands.ir.program import (
    NO_BUCKET,
    Backward,
    Content,
    Program,
    Receive,
    Send,
    Update,
    gradient_steps,
    parse_program,
    sent_bytes,
)
from manyhands.planning import weights
from manyhands.planning.checking import Flawed, check
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.memory import peaks
from manyhands.planning.simulation import simulate
from manyhands.planning.strategies import plan_by_name
from tests.planning.plans import conv
from tests.planning.test_programs import with_steps

ROOM = 64 << 20


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 64)


def deep_net() -> Graph:
    x = Layer("x", Input(0), (), (1, 2, 12, 6), differentiable=False)
    names = ["x", "one", "two", "three", "four"]
    layers = (conv(name, source, (1, 2, 12, 6), 2) for source, name in pairwise(names))
    return Graph((x, *layers), ("four",))


def made(in_flight_bytes: int, *, clip: bool = False, devices: str = "ab") -> Lowered:
    graph = deep_net()
    plan = replace(plan_by_name(graph, tuple(devices), "rows"), in_flight_bytes=in_flight_bytes)
    return lower(graph, plan, clip=clip)


def updates(program: Program) -> list[int | None]:
    return [step.bucket for step in program.steps if isinstance(step, Update)]


def test_weights_change_bucket_by_bucket_before_backward_is_over() -> None:
    found = made(ROOM)
    check(found)
    for program in found.programs:
        assert parse_program(str(program)) == program
        assert updates(program) == [*range(len(found.buckets)), NO_BUCKET] and len(found.buckets) > 2
        steps = program.steps
        last = max(index for index, step in enumerate(steps) if isinstance(step, Backward))
        assert steps.index(Update(0)) < last
        sent = [s.message.content for s in steps[:last] if isinstance(s, Send)]
        assert Content.WEIGHTS in sent


@pytest.mark.parametrize(("in_flight_bytes", "clip"), [(0, False), (4 << 20, False), (ROOM, True)])
def test_in_the_end_they_change_at_once(in_flight_bytes: int, clip: bool) -> None:
    """Clipping needs the norm of all gradients."""
    found = made(in_flight_bytes, clip=clip)
    check(found)
    assert all(updates(program) == [None] for program in found.programs)


def test_as_much_travels_and_accumulating_leaves_it_out() -> None:
    early, late = made(ROOM), made(0)
    assert [sent_bytes(p) for p in early.programs] == [sent_bytes(p) for p in late.programs]
    for program in early.programs:
        alone = gradient_steps(program)
        assert not any(isinstance(step, Update) for step in alone)
        assert all(s.message.content is not Content.WEIGHTS for s in alone if isinstance(s, Send | Receive))


def test_weights_that_are_sent_before_they_change_are_found() -> None:
    found = made(ROOM)
    steps = [step for step in found.program("a").steps if step != Update(1)]
    with pytest.raises(Flawed, match="those of the step before"):
        check(with_steps(found, "a", tuple(steps)))


def test_gradients_that_come_after_the_change_are_found() -> None:
    found = made(ROOM)
    steps = list(found.program("a").steps)
    steps.remove(Update(1))
    first = next(
        i for i, s in enumerate(steps) if isinstance(s, Receive) and s.message.content is Content.SLOPES
    )
    steps.insert(first, Update(1))
    with pytest.raises(Flawed, match="changed already"):
        check(with_steps(found, "a", tuple(steps)))


def test_on_a_thin_wire_it_is_foreseen_to_be_faster_and_to_take_more_memory() -> None:
    early, late = made(ROOM, devices="abc"), made(0, devices="abc")
    slow = Cluster(tuple(Device(name, flops_per_s=1e6) for name in "abc"), 1e4, 1e-4)
    seconds = [simulate(each, slow, memory=False).cost.seconds for each in (early, late)]
    assert seconds[0] < seconds[1]
    assert max(peaks(early).values()) > max(peaks(late).values())
