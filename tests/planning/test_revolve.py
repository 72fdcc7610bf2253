"""Binomial checkpointing: replayed on paper, against brute force and against another's implementation."""

from __future__ import annotations

from functools import cache

import pytest
from checkpoint_schedules import EndReverse, Forward
from checkpoint_schedules import Revolve as TheirRevolve
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.ir.schedule import Action, Advance, Back, Restore, Store, Tape
from manyhands.planning.revolve import advances, fewest_slots, recompute_factor, revolve

CHAINS = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n + 2)))


def replay(length: int, actions: tuple[Action, ...]) -> tuple[int, int]:
    """Stages advanced, and the most states stored at once; an illegal action fails."""
    present: int | None = 0
    stored: set[int] = set()
    left, advanced, most = length, 0, 0
    for action in actions:
        match action:
            case Store(state):
                assert present == state and state not in stored
                stored.add(state)
            case Restore(state, last):
                assert state in stored
                present = state
                stored -= {state} if last else set()
            case Advance(start, stop):
                assert present == start < stop < left
                present, advanced = stop, advanced + stop - start
            case Tape(stage, blind):
                assert present == stage == left - 1 and blind == (left < length)
                present = None
            case Back(stage):
                assert present is None and stage == left - 1
                left = stage
        most = max(most, len(stored))
    assert left == 0 and not stored
    return advanced, most


@cache
def fewest_by_brute_force(length: int, slots: int) -> int:
    """The recursion that defines it: go on, store, reverse the rest with a slot less, then what is before."""
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(
        part + fewest_by_brute_force(length - part, slots - 1) + fewest_by_brute_force(part, slots)
        for part in range(1, length)
    )


@settings(deadline=None)
@given(CHAINS)
def test_a_schedule_is_legal_fits_and_costs_what_the_closed_form_says(chain: tuple[int, int]) -> None:
    length, slots = chain
    advanced, most = replay(length, revolve(length, slots))
    assert most <= slots and advanced == advances(length, slots)


@settings(deadline=None)
@given(CHAINS)
def test_no_other_schedule_advances_fewer_stages(chain: tuple[int, int]) -> None:
    assert advances(*chain) == fewest_by_brute_force(*chain)


@pytest.mark.parametrize(("length", "slots"), [(10, 3), (18, 4), (34, 5), (50, 9), (152, 13)])
def test_another_implementation_advances_as_many(length: int, slots: int) -> None:
    theirs = 0
    for action in TheirRevolve(length, slots):
        if isinstance(action, EndReverse):
            break
        if isinstance(action, Forward) and not action.write_adj_deps:
            theirs += action.n1 - action.n0
    assert theirs == advances(length, slots)


@settings(deadline=None)
@given(st.integers(2, 200), st.floats(1.0, 4.0))
def test_the_fewest_slots_for_a_time_are_enough_and_one_less_is_not(length: int, factor: float) -> None:
    slots = fewest_slots(length, factor)
    assert recompute_factor(length, slots) <= factor
    assert slots == 1 or recompute_factor(length, slots - 1) > factor
