"""How a chain of stages is run forward and backward when not everything fits in memory: a list of actions.

Stages are numbered from 0. State n is what stage n reads; the last state is what the loss reads. There is one
state at hand, the present one, and a number of stored ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Store:
    """Keep a copy of the present state."""

    state: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The present state is this stored one again; `last`: it is not needed any more after that."""

    state: int
    last: bool


@dataclass(frozen=True, slots=True)
class Advance:
    """Compute stages forward and keep nothing but the state after them."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """Compute a stage forward once more, keeping what its backward needs, and then backward."""

    stage: int


Action = Store | Restore | Advance | Reverse
