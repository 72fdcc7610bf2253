"""With room for more on its way, weights travel while the next step begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.graph import Graph, Input, Layer
from manyhands.ir.parsing import parse_program
from manyhands.ir.program import (
    Content,
    Expect,
    Forward,
    Program,
    Receive,
    Send,
    Update,
    forward_steps,
    gradient_steps,
    postponed,
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


def weights_received(program: Program) -> list[int]:
    """Where in a program weights are waited for."""
    return [
        index
        for index, step in enumerate(program.steps)
        if isinstance(step, Receive) and step.message.content is Content.WEIGHTS
    ]


@pytest.mark.parametrize("clip", [False, True])
def test_weights_are_waited_for_by_the_next_step_before_the_layer_that_needs_them(clip: bool) -> None:
    found = made(ROOM, clip=clip)
    check(found)
    needed = {p.name: layer.name for layer in found.graph.layers for p in layer.parameters}
    assert len(found.buckets) > 2
    for program in found.programs:
        assert parse_program(str(program)) == program
        steps = program.steps
        assert steps.count(Update()) == 1 and len(postponed(program)) == len(found.buckets)
        for index in weights_received(program):
            message = steps[index].message  # type: ignore[union-attr]
            pieces = [p for _, part in found.buckets[message.segment].parts for p in part]
            readers = {needed[piece.parameter] for piece in pieces}
            first = min(i for i, s in enumerate(steps) if isinstance(s, Forward) and readers & set(s.layers))
            assert index < first
            assert not any(isinstance(s, Forward) for s in steps[index:first]), "no earlier than needed"
            assert steps.index(Update()) < steps.index(Expect(message))


def test_those_that_are_needed_first_leave_first() -> None:
    found = made(ROOM)
    for program in found.programs:
        sent = [s.message for s in program.steps if isinstance(s, Send)]
        buckets = [message.segment for message in sent if message.content is Content.WEIGHTS]
        assert buckets == sorted(buckets, reverse=True) and len(set(buckets)) > 2


def test_not_all_send_to_the_same_device_at_once() -> None:
    """Of one bucket, whatever the others do, every device is sent to by one other at a time."""
    found = made(ROOM, devices="abc")
    for content in (Content.SLOPES, Content.WEIGHTS):
        ways = []
        for program in found.programs:
            sent = [s.message for s in program.steps if isinstance(s, Send)]
            ways.append([m.target for m in sent if m.content is content and m.segment == 0])
        assert ways and all(len(set(turn)) == len(turn) for turn in zip(*ways, strict=True))


@pytest.mark.parametrize("in_flight_bytes", [0, 4 << 20])
def test_without_room_a_step_waits_for_its_own(in_flight_bytes: int) -> None:
    found = made(in_flight_bytes)
    check(found)
    for program in found.programs:
        assert not postponed(program)
        assert min(weights_received(program)) > program.steps.index(Update())


def test_as_much_travels_and_predicting_and_accumulating_leave_it_out() -> None:
    roomy, tight = made(ROOM), made(0)
    assert [sent_bytes(p) for p in roomy.programs] == [sent_bytes(p) for p in tight.programs]
    for program, other in zip(roomy.programs, tight.programs, strict=True):
        late = [Receive(message) for message in postponed(program)]
        for some, waits in ((gradient_steps, late), (forward_steps, [])):
            alone = some(program)
            assert [s for s in alone if s in late] == [s for s in program.steps if s in waits]
            assert tuple(s for s in alone if s not in late) == some(other) and len(alone) > 4
            assert not any(isinstance(step, Update) for step in alone)
            sent = [s.message.content for s in alone if isinstance(s, Send)]
            assert sent and Content.WEIGHTS not in sent and Content.SLOPES not in sent


def test_weights_that_are_sent_before_they_change_are_found() -> None:
    found = made(ROOM)
    steps = [step for step in found.program("a").steps if step != Update()]
    with pytest.raises(Flawed, match="those of the step before"):
        check(with_steps(found, "a", tuple(steps)))


def test_gradients_that_come_after_the_change_are_found() -> None:
    found = made(ROOM)
    steps = list(found.program("a").steps)
    steps.remove(Update())
    first = next(
        i for i, s in enumerate(steps) if isinstance(s, Receive) and s.message.content is Content.SLOPES
    )
    steps.insert(first, Update())
    with pytest.raises(Flawed, match="changed already"):
        check(with_steps(found, "a", tuple(steps)))


def test_a_layer_that_would_read_the_weights_of_the_step_before_is_found() -> None:
    found = made(ROOM)
    steps = list(found.program("a").steps)
    first = min(weights_received(found.program("a")))
    late = steps.pop(first)
    steps.insert(next(i for i, s in enumerate(steps) if i > first and isinstance(s, Forward)) + 1, late)
    with pytest.raises(Flawed, match="those of the step before"):
        check(with_steps(found, "a", tuple(steps)))


def test_only_weights_may_come_before_they_are_expected() -> None:
    found = made(ROOM)
    steps = list(found.program("a").steps)
    value = next(s for s in steps if isinstance(s, Receive) and s.message.content is Content.VALUE)
    steps.remove(Expect(value.message))
    steps.insert(steps.index(value) + 1, Expect(value.message))
    with pytest.raises(Flawed, match="not expected"):
        check(with_steps(found, "a", tuple(steps)))


def test_a_device_sends_no_faster_than_its_wire() -> None:
    found = made(ROOM, devices="abc")
    slow = Cluster(tuple(Device(name, flops_per_s=1e6) for name in "abc"), 1e4, 1e-4)
    seconds = simulate(found, slow, memory=False).cost.seconds
    assert seconds >= max(sent_bytes(program) for program in found.programs) / 1e4


def test_weights_that_the_next_step_would_wait_for_in_vain_are_found() -> None:
    found = made(ROOM)
    steps = found.program("a").steps
    sent = next(s for s in steps if isinstance(s, Send) and s.message.content is Content.WEIGHTS)
    with pytest.raises(Flawed, match="nobody sends"):
        check(with_steps(found, "a", tuple(step for step in steps if step != sent)))


def test_on_a_thin_wire_it_is_foreseen_to_be_faster_and_to_take_more_memory() -> None:
    roomy, tight = made(ROOM, devices="abc"), made(0, devices="abc")
    slow = Cluster(tuple(Device(name, flops_per_s=1e6) for name in "abc"), 1e4, 1e-4)
    seconds = [simulate(each, slow, memory=False).cost.seconds for each in (roomy, tight)]
    assert seconds[0] < seconds[1]
    assert max(peaks(roomy).values()) > max(peaks(tight).values())
