"""A stage as the runtime sees it: what it computes, what is asked of it, and a way to do that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, fx, nn

from manyhands.runtime.tape import Box
from manyhands.runtime.thrift import Statistics

Values = dict[str, Any]


class Code(Protocol):
    """What a stage computes, from values by name to values by name."""

    @property
    def calls(self) -> tuple[fx.Node, ...]: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def makes(self) -> tuple[str, ...]: ...
    @property
    def modules(self) -> tuple[nn.Module, ...]: ...
    @property
    def weights(self) -> tuple[nn.Parameter, ...]: ...
    @property
    def constants(self) -> tuple[Tensor, ...]: ...
    def run(self, values: Values) -> Values: ...


@dataclass
class Notes:
    """What one step remembers of the first time that it computed a stage."""

    statistics: Statistics | None = None


@dataclass(frozen=True)
class Order:
    """What is asked of a stage: whether and how to tape it, and whether anybody reads its results.

    `boxes`: where the gradients of its results will lie, and whether they are nobody else's.
    """

    taped: bool
    mode: int = 0
    blind: bool = False
    boxes: dict[str, Box] = field(default_factory=dict)


class Recipe(Protocol):
    """A way to compute a stage."""

    @property
    def modes(self) -> int: ...
    @property
    def sees_blind(self) -> bool:
        """Is nothing computed where nobody reads the result?"""
        ...

    def is_settled(self, values: Values) -> bool:
        """Does it draw no random numbers, and change nothing when it is computed again?"""
        ...

    def run(self, values: Values, notes: Notes, order: Order) -> Values: ...
