"""A chain of stages, and how it is run forward and backward when not everything fits in memory.

Stages are numbered from 0. State n is what stage n and all after it read of what was there before; the last
state is what the network returns. One state is at hand, the present one; others may be stored. A schedule is
a list of actions, of which the first ones lead to the last state: there gradients are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Store:
    """Keep the present state; `disk`: there and not in memory, written while the next stages are computed."""

    state: int
    disk: bool = False


@dataclass(frozen=True, slots=True)
class Restore:
    """The present state is this stored one again; `last`: it is not needed any more after that.

    One that was on disk is in memory from then on.
    """

    state: int
    last: bool


@dataclass(frozen=True, slots=True)
class Advance:
    """Compute stages forward and keep nothing but the state after them."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tape:
    """Compute a stage forward and keep what its backward needs; `blind`: nobody reads what it returns."""

    stage: int
    blind: bool
    mode: int = 0


@dataclass(frozen=True, slots=True)
class Back:
    """Compute a taped stage backward."""

    stage: int


@dataclass(frozen=True, slots=True)
class Disk:
    """How fast states are written and read again, as measured."""

    write_bytes_per_s: float
    read_bytes_per_s: float


Action = Store | Restore | Advance | Tape | Back


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to tape a stage. Bytes are those beyond what is counted elsewhere."""

    keeps: frozenset[int]  # tensors of the states before and after it that its backward needs
    own_bytes: int  # of other things that its backward needs
    taped_bytes: int  # at most at once while its forward is taped, beyond the state before it
    backward_bytes: int  # at most at once in backward, beyond what is kept and the gradients of its results
    first_s: float  # its taped forward, the first time that the stage is computed
    again_s: float  # at other times
    blind_s: float  # at other times, where nobody reads what it returns
    backward_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as measured. A result in the same memory as something it reads is the same tensor as that."""

    name: str
    first_s: float  # forward, where nothing is kept
    again_s: float
    forward_bytes: int  # at most at once meanwhile, results included, beyond the state before it
    noted_bytes: int  # that stay until the step ends: what a second time has to find as the first did
    modes: tuple[Mode, ...]


@dataclass(frozen=True)
class Chain:
    """Stages in a row, the states between them, and the sizes of the tensors in those."""

    tensor_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]  # of each tensor; 0: it has none
    stages: tuple[Stage, ...]
    states: tuple[frozenset[int], ...]  # one more than stages

    def __post_init__(self) -> None:
        assert len(self.states) == len(self.stages) + 1
        assert len(self.tensor_bytes) == len(self.gradient_bytes)

    def bytes_of(self, tensors: Iterable[int]) -> int:
        return sum(self.tensor_bytes[tensor] for tensor in tensors)

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of the gradients of each state."""
        return tuple(sum(self.gradient_bytes[tensor] for tensor in state) for state in self.states)

    @cached_property
    def noted_bytes(self) -> int:
        return sum(stage.noted_bytes for stage in self.stages)

    def held_bytes(self, stage: int, mode: Mode) -> int:
        """What a taped stage adds to its state: what its backward needs, and the state after it."""
        return self.bytes_of((self.states[stage + 1] | mode.keeps) - self.states[stage]) + mode.own_bytes

    def kept_bytes(self, stage: int, mode: Mode) -> int:
        """What is left of that when its backward begins."""
        return self.bytes_of(mode.keeps - self.states[stage]) + mode.own_bytes

    @property
    def plain_s(self) -> float:
        """How long all of it takes where everything is kept."""
        return sum(stage.modes[0].first_s + stage.modes[0].backward_s for stage in self.stages)
