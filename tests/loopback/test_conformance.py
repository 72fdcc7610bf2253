"""Every case of the conformance table, with three plans each; `bench conformance` tries them all."""

import json

import pytest
from rich.console import Console

from manyhands.benches.conformance import (
    Attempt,
    Crashed,
    Direction,
    Outcome,
    Ran,
    Refused,
    Verdict,
    examine,
    judge,
    table,
    to_json,
)
from manyhands.benches.conformance_cases import CASES, Case, Peers
from manyhands.verifying import TOLERANCE

ROWS = (
    "conv 3x3, padding 1",
    "conv 3x3 stride 2; conv 7x7 stride 2 padding 3",
    "conv without padding",
    "conv dilation 2",
    "depthwise, grouped conv",
    "even kernel 4, stride 2, padding 1",
    "transposed conv, kernel = stride",
    "transposed conv 4, stride 2, padding 1",
    "pooling, kernel = stride",
    "overlapping max pool 3, stride 2, padding 1",
    "adaptive / global average pool",
    "batch norm, training",
    "group norm",
    "nearest up-sampling",
    "bilinear up-sampling",
    "residual add, concat",
    "flatten + linear head",
    "uneven: height 31 on 2 devices",
    "stride 2 with odd local height (30 on 2, 2 devices)",
    "fused halos over several layers",
    "unequal shares by device speed",
    "ceil_mode pooling",
    "count_include_pad pooling",
    "asymmetric padding",
    '"same" padding',
    "align_corners",
    "pixel (un)shuffle",
    "squeeze-and-excite",
    "dropout",
    "shared modules",
    "batch 1 on 3 devices",
    "1-row tiles",
)
DIRECTIONS = tuple(Direction)


def chosen(attempt: Attempt) -> bool:
    """A fused group in rows, a grid layer by layer, and a plan that changes from rows to channels."""
    wanted = (("rows", 3, True), ("grid", 4, False))
    changes = attempt.strategy.startswith("rows;") and not attempt.fused
    return changes or (attempt.strategy, attempt.num_devices, attempt.fused) in wanted


def test_every_row_is_there_in_its_order() -> None:
    assert tuple(dict.fromkeys(case.row for case in CASES)) == ROWS
    assert len({(case.row, case.variant) for case in CASES}) == len(CASES)


def test_others_are_quoted_for_the_rows_they_were_measured_on() -> None:
    quoted = {case.row for case in CASES if case.peers != Peers()}
    assert quoted == set(ROWS[: ROWS.index("ceil_mode pooling")])


@pytest.mark.parametrize("case", CASES, ids=[f"{case.row}-{case.variant}" for case in CASES])
def test_trains_like_one_device(case: Case) -> None:
    outcomes = examine(case, chosen)
    assert len(outcomes) == 3
    assert all(isinstance(outcome, Ran) and outcome.worst <= TOLERANCE for outcome in outcomes), outcomes


def test_a_batch_of_one_is_not_cut_by_batch_and_says_why() -> None:
    (case,) = (case for case in CASES if case.row == "batch 1 on 3 devices")
    outcomes = examine(case, lambda attempt: attempt.strategy == "batch")
    assert outcomes and all(isinstance(o, Refused) and "the batch is 1" in o.reason for o in outcomes)


def ran(worst: float = 0.0, directions: tuple[Direction, ...] = DIRECTIONS) -> list[Outcome]:
    return [Ran(Attempt(direction, direction.value, 4, True), worst) for direction in directions]


def test_exact_takes_every_plan_and_every_direction() -> None:
    attempt = Attempt(Direction.ROWS, "rows", 2, fused=True)
    assert judge({CASES[0]: ran()}).verdict is Verdict.EXACT
    assert judge({CASES[0]: [*ran(), Refused(attempt, "nothing to do")]}).verdict is Verdict.EXACT
    assert judge({CASES[0]: [*ran(), Ran(attempt, 1e-6)]}).verdict is Verdict.WRONG
    assert judge({CASES[0]: [*ran(), Ran(attempt, float("nan"))]}).verdict is Verdict.WRONG
    assert judge({CASES[0]: [*ran(), Crashed(attempt, "KeyError: 'x'")]}).verdict is Verdict.REFUSED
    assert judge({CASES[0]: ran(directions=DIRECTIONS[1:])}).verdict is Verdict.REFUSED


def test_table_and_json_tell_the_same_facts() -> None:
    rows = [judge({CASES[0]: ran()}), judge({CASES[1]: ran(float("inf"))})]
    console = Console(width=200, record=True)
    console.print(table(rows))
    drawn, told = console.export_text(), json.loads(to_json(rows))["rows"]
    for row in told:
        assert row["name"].split(";")[0] in drawn and row["verdict"] in drawn
    assert told[0]["peers"]["torch DTensor 2.13"] == "WRONG"
    assert told[1]["worst_difference"] is None and len(told[1]["failures"]) == len(DIRECTIONS)
