"""Programs: what they say, that they read back as themselves, and that flaws in them are found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.codec import decode, graph_digest, to_json
from manyhands.ir.parsing import parse_program
from manyhands.ir.plan import Plan
from manyhands.ir.program import (
    Content,
    Drop,
    Forward,
    Program,
    Receive,
    Send,
    Step,
    sent_bytes,
)
from manyhands.planning.checking import Flawed, check
from manyhands.planning.explaining import spent_by_kind
from manyhands.planning.lowering import Lowered
from manyhands.planning.simulation import Deadlock, simulate
from tests.planning.plans import lowered, small_net, two_convs

STRATEGIES = (
    "rows",
    "columns",
    "channels",
    "batch",
    "batch:2,rows:2",
    "rows; two = channels",
    "rows; fc = single",
)
CASES = [
    (4 if ":2" in s else n, s, f) for s in STRATEGIES for n in (2, 3) for f in (None, (), ("one", "relu"))
]

FIRST_DEVICE = """program a
  prepare one>1[0:1,0:3,0:5,0:4]
  expect value one>1[0:1,0:3,4:5,0:4] from b #0 48
  forward 0: one
  send value one>1[0:1,0:3,3:4,0:4] to b #1 48
  place one>1[0:1,0:3,0:4,0:4]
  drop one
  receive value one>1[0:1,0:3,4:5,0:4] from b #0 48
  prepare two>2[0:1,0:2,0:8,0:4]
  expect value two>2[0:1,0:2,4:8,0:4] from b #2 128
  forward 1: two
  drop one>1
  send value two>2[0:1,0:2,0:4,0:4] to b #3 128
  place two>2[0:1,0:2,0:4,0:4]
  drop two
  receive value two>2[0:1,0:2,4:8,0:4] from b #2 128
  loss
  drop two>2
  expect gradient one>1[0:1,0:3,3:4,0:4] from b #5 48
  backward 1 later
  send gradient one>1[0:1,0:3,4:5,0:4] to b #4 48
  return one>1[0:1,0:3,0:4,0:4]
  slope 1
  receive gradient one>1[0:1,0:3,3:4,0:4] from b #5 48
  backward 0
  expect slopes bucket>0[] from b #6 288
  send slopes bucket>0[] to b #7 144
  fold 0
  receive slopes bucket>0[] from b #6 288
  update
  expect weights bucket>0[] from b #9 144
  send weights bucket>0[] to b #8 288
  receive weights bucket>0[] from b #9 144"""


def test_two_convolutions_in_rows_on_two_devices() -> None:
    """One row of the map goes each way before the second convolution, and its gradient comes back."""
    programs = lowered(two_convs(), 2, "rows").programs
    assert str(programs[0]) == FIRST_DEVICE
    assert sent_bytes(programs[0]) == 48 + 128 + 48 + 432


@pytest.mark.parametrize(("num_devices", "strategy", "fuse"), CASES)
def test_programs_read_back_and_check(num_devices: int, strategy: str, fuse: tuple[str, ...] | None) -> None:
    found = lowered(small_net(), num_devices, strategy, fuse)
    check(found)
    for program in found.programs:
        assert parse_program(str(program)) == program


@pytest.mark.parametrize(("num_devices", "strategy", "fuse"), CASES)
def test_plans_read_back_from_json(num_devices: int, strategy: str, fuse: tuple[str, ...] | None) -> None:
    plan = lowered(small_net(), num_devices, strategy, fuse).plan
    assert decode(Plan, json.loads(to_json(plan))) == plan
    assert plan.graph == graph_digest(small_net())


@pytest.mark.parametrize("change", [{"batch": "four"}, {"surprise": 1}, {"segments": 3}])
def test_a_plan_that_cannot_be_read_says_why(change: dict[str, object]) -> None:
    stored = json.loads(to_json(lowered(small_net(), 2, "rows").plan)) | change
    with pytest.raises(ValueError, match=next(iter(change))):
        decode(Plan, stored)


def with_steps(found: Lowered, device: str, steps: tuple[Step, ...]) -> Lowered:
    programs = tuple(Program(p.device, steps) if p.device == device else p for p in found.programs)
    return replace(found, programs=programs)


def test_a_message_that_is_never_sent_is_found() -> None:
    found = lowered(two_convs(), 2, "rows")
    steps = found.program("a").steps
    lost = next(step for step in steps if isinstance(step, Send))
    flawed = with_steps(found, "a", tuple(step for step in steps if step is not lost))
    with pytest.raises(Flawed, match="deadlock.*receive value one"):
        check(flawed)
    with pytest.raises(Deadlock):
        simulate(flawed, cluster(1e6))


def test_a_message_that_nobody_receives_is_found() -> None:
    found = lowered(two_convs(), 2, "rows")
    steps = found.program("b").steps
    lost = next(step for step in steps if isinstance(step, Receive))
    with pytest.raises(Flawed):
        check(with_steps(found, "b", tuple(step for step in steps if step is not lost)))


def test_a_result_dropped_before_its_last_reader_is_found() -> None:
    found = lowered(two_convs(), 2, "rows")
    steps = list(found.program("a").steps)
    position = steps.index(Drop("one"))
    steps.insert(position - 2, steps.pop(position))
    with pytest.raises(Flawed, match="is not there"):
        check(with_steps(found, "a", tuple(steps)))


def test_steps_in_the_wrong_order_are_found() -> None:
    found = lowered(two_convs(), 2, "rows")
    steps = list(found.program("a").steps)
    first, second = (i for i, step in enumerate(steps) if isinstance(step, Forward))
    steps[first], steps[second] = steps[second], steps[first]
    with pytest.raises(Flawed):
        check(with_steps(found, "a", tuple(steps)))


def test_what_is_never_dropped_is_found() -> None:
    found = lowered(two_convs(), 2, "rows")
    steps = tuple(step for step in found.program("a").steps if step != Drop("two", 2))
    with pytest.raises(Flawed, match="left over"):
        check(with_steps(found, "a", steps))


def cluster(bytes_per_s: float, flops_per_s: float = 1e8) -> Cluster:
    return Cluster(tuple(Device(name, flops_per_s=flops_per_s) for name in "abcd"), bytes_per_s, 1e-4)


@pytest.mark.parametrize(("num_devices", "strategy", "fuse"), CASES)
def test_faster_links_and_devices_are_never_slower(
    num_devices: int, strategy: str, fuse: tuple[str, ...] | None
) -> None:
    found = lowered(small_net(), num_devices, strategy, fuse)
    links = [simulate(found, cluster(rate)).cost.seconds for rate in (1e4, 1e5, 1e6, 1e9)]
    assert links == sorted(links, reverse=True)
    speeds = [simulate(found, cluster(1e6, flops)).cost.seconds for flops in (1e6, 1e7, 1e9)]
    assert speeds == sorted(speeds, reverse=True)


def test_nothing_travels_that_was_computed_here() -> None:
    """Within a fused group each device computes its overlap itself."""
    found = lowered(two_convs(), 2, "rows", fuse=())
    messages = [step.message for p in found.programs for step in p.steps if isinstance(step, Send)]
    sends = [message.layer for message in messages if message.content is Content.VALUE]
    assert sends == ["two", "two"]


def test_what_a_step_is_spent_on_adds_up() -> None:
    program = lowered(two_convs(), 2, "rows").programs[0]
    spent = spent_by_kind(program, [1.0] * len(program.steps))
    assert sum(spent.values()) == len(program.steps)
    assert spent["waiting for tiles"] == 3 and spent["waiting for weights"] == 2
    assert spent["computing"] == 8  # forward and backward twice, slope, loss, fold, update
