"""Learning rates follow from the step alone."""

import math

import pytest

from manyhands.training.schedules import Schedule


def test_a_cosine_falls_from_one_to_its_end_after_a_straight_rise() -> None:
    schedule = Schedule(name="cosine", warmup=4, final=0.1)
    found = [schedule.at_step(step, 104) for step in range(104)]
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[54] == pytest.approx(0.55)
    assert found[103] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 99 / 100)) / 2)
    assert all(a > b for a, b in zip(found[4:], found[5:], strict=False))


def test_steps_multiply_where_they_are_said() -> None:
    schedule = Schedule(name="steps", at=(3, 6), factor=0.5)
    assert [schedule.at_step(step, 9) for step in range(8)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_without_a_schedule_the_rate_stays() -> None:
    assert {Schedule().at_step(step, 9) for step in range(9)} == {1.0}
