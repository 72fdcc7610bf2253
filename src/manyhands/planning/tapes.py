"""What autograd keeps of a chunk between its forward and its backward, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Layer
from manyhands.ir.portions import Portion
from manyhands.planning.ledger import Block
from manyhands.planning.liveness import Buffer

Read = tuple[str, int, int]  # (input, bytes read, bytes of the tile at hand)


@dataclass
class Node:
    """One layer on a tape: what it keeps, and what of which input it read."""

    layer: Layer
    kept: list[Block]
    reads: list[Read]
    result_bytes: int
    filter_bytes: int
    copied_bytes: int  # of an input that had to be put in one piece


@dataclass
class Tape:
    nodes: list[Node] = field(default_factory=list)
    results: list[str] = field(default_factory=list)  # those that leave the chunk and have a gradient
    sources: dict[str, Buffer] = field(default_factory=dict)
    unshared: set[str] = field(default_factory=set)  # sources whose gradient nobody else holds
    here: dict[str, tuple[Block, Tile]] = field(default_factory=dict)  # while the chunk computes
    small: list[Block] = field(default_factory=list)  # the graph's own, between what it keeps
    keep: bool = True
    again: bool = False
    leaves: bool = True  # are results left for later steps?
    portion: Portion | None = None  # only this; None: all
    unread: frozenset[str] = frozenset()  # whose results nobody asks for
    gapped: set[str] = field(default_factory=set)  # sources of which a band is read, not in one piece
    late: Sequence[str] = ()  # convolutions whose weights' gradients are left for later
    left: list[tuple[Node, Block]] = field(default_factory=list)  # those, with the gradients of their results
    borrowed: set[Block] = field(default_factory=set)  # that have to stay as they are

    @property
    def of_samples(self) -> bool:
        """Are gradients given for samples one by one, which lie in one piece?"""
        return self.portion is not None and not self.portion.banded

    def region(self, name: str, whole: Tile) -> Tile:
        """What this pass computes or reads of a layer; a mean that is exchanged reads nothing."""
        return whole if self.portion is None else self.portion.regions[name] & whole
