"""The verdict of `manyhands bench forecast`: each of its limits can fail it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from manyhands.benches import forecast
from manyhands.benches.forecast import Choice, Result, Row, Time
from manyhands.ir.plan import Cost


def row(rehearsed: bool, error: float, memory_error: float = 0.0) -> Row:
    cost = Cost(1.0 + error, 0, (("a", int(1e6 * (1 + memory_error))),))
    return Row("net", 2, "rows" if rehearsed else "columns", rehearsed, cost, 1.0, 0.01, (10**6,))


def choice(auto_s: float) -> Choice:
    return Choice("net", 2, Time("auto", 1.0, auto_s), (Time("single", 1.0, 1.2), Time("rows", 1.0, 1.0)))


GOOD = Result(
    (
        *(row(True, error) for error in (0.09, -0.09, 0.2)),
        *(row(False, error) for error in (-0.05, -0.24, 0.02)),
    ),
    (choice(1.04),),
)


def changed(number: int, new: Row) -> Result:
    return replace(GOOD, rows=(*GOOD.rows[:number], new, *GOOD.rows[number + 1 :]))


@pytest.mark.parametrize(
    "bad",
    [
        changed(1, row(True, -0.12)),  # the median of what was rehearsed
        changed(2, row(True, 0.26)),  # its worst
        changed(3, row(False, -0.2)),  # the median of what was not
        changed(4, row(False, -0.26)),
        changed(0, row(True, 0.09, -0.06)),  # memory: under
        changed(0, row(True, 0.09, 0.11)),  # and worst
        replace(GOOD, choices=(choice(1.0), choice(1.06))),
    ],
)
def test_each_limit_can_fail_it(bad: Result) -> None:
    assert GOOD.within and not bad.within


def test_both_forms_say_the_same() -> None:
    facts = json.loads(json.dumps(forecast.to_json(GOOD)))
    assert facts["within"] and facts["time_error"]["not rehearsed"]["worst"] == pytest.approx(0.24)
    assert facts["choices"][0]["regret"] == pytest.approx(1.04)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(forecast.table(GOOD))
    shown = captured.get()
    assert "plans not rehearsed: median error 5.0%" in shown and "1.040" in shown
