"""Binomial checkpointing: the fewest stages computed again for a chain of equal stages (Revolve).

A. Griewank and A. Walther, Algorithm 799: Revolve, ACM Transactions on Mathematical Software 26(1), 2000.
"""

from __future__ import annotations

from math import comb

from manyhands.ir.schedule import Action, Advance, Back, Restore, Store, Tape


def sweeps(length: int, slots: int) -> int:
    """How often a stage is advanced at most, with so many stored states, the first one among them."""
    assert length >= 1 and slots >= 1
    number = 0
    while comb(slots + number, slots) < length:
        number += 1
    return number


def advances(length: int, slots: int) -> int:
    """Stages advanced in the best schedule, the way to the end included."""
    slots = min(slots, max(length - 1, 1))  # more are of no use
    number = sweeps(length, slots)
    return number * length - comb(slots + number, slots + 1)


def recompute_factor(length: int, slots: int) -> float:
    """Time over that of a step which keeps everything, where a stage takes as long forward as backward.

    As the paper on training on the edge counts: without the forward that tapes a stage for its backward.
    """
    return max(1.0, (advances(length, slots) + length) / (2 * length))


def fewest_slots(length: int, factor: float) -> int:
    """The least number of stored states with which a step takes at most `factor` times as long."""
    assert factor >= 1
    low, high = 1, length
    while low < high:
        middle = (low + high) // 2
        if recompute_factor(length, middle) <= factor:
            high = middle
        else:
            low = middle + 1
    return low


def revolve(length: int, slots: int) -> tuple[Action, ...]:
    """The best schedule for a chain whose first state is at hand, with so many stored states."""
    actions = _enter(0, length, slots)
    seen = Tape(length - 1, blind=True), Tape(length - 1, blind=False)  # the loss reads what the last returns
    return tuple(seen[1] if action == seen[0] else action for action in actions)


def _enter(start: int, stop: int, slots: int) -> list[Action]:
    """Reverse stages start to stop, whose first state is at hand."""
    if stop - start == 1:
        return _reverse(start)
    return [Store(start), *_forth_and_back(start, stop, slots)]


def _reverse(stage: int) -> list[Action]:
    return [Tape(stage, blind=True), Back(stage)]


def _again(start: int, stop: int, slots: int) -> list[Action]:
    """The same, where the first state is stored; it is let go with its last use."""
    if stop - start == 1:
        return [Restore(start, last=True), *_reverse(start)]
    return [Restore(start, last=False), *_forth_and_back(start, stop, slots)]


def _forth_and_back(start: int, stop: int, slots: int) -> list[Action]:
    """The first state is stored and at hand: reverse the later part, then the earlier one."""
    if slots == 1:
        middle = stop - 1  # nothing else can be stored, so stage by stage
        return [Advance(start, middle), *_reverse(middle), *_again(start, middle, slots)]
    middle = start + _first_part(stop - start, slots)
    return [Advance(start, middle), *_enter(middle, stop, slots - 1), *_again(start, middle, slots)]


def _first_part(length: int, slots: int) -> int:
    """How far to go before the next state is stored: the least over all, by the closed form."""
    return min(
        range(1, length),
        key=lambda part: part + advances(length - part, slots - 1) + advances(part, slots),
    )
