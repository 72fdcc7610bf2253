"""What one device needs to know to run its program: its tiles, its weights, its part in each statistic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Layer
from manyhands.ir.program import Program, Redo, Rerun


@dataclass(frozen=True, slots=True)
class Share:
    """A device's part in a statistic: a tile over (samples, channels), each from `count` elements."""

    device: str
    tile: Tile
    count: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the statistics of one layer are put together on one device.

    own: what this device measures, in its own tile; known: what it must know; shares: everybody's part in
    `known`, in the order of devices; readers: who computes with what this device measured, in the same order.
    """

    own: Share | None
    known: Tile | None
    shares: tuple[Share, ...]
    readers: tuple[Share, ...]
    total: int  # elements behind one statistic, over all devices
    group: int  # neighbouring channels that share one statistic


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a weight."""

    parameter: str
    tile: Tile

    def __str__(self) -> str:
        return f"{self.parameter}[{self.tile}]"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights that several devices hold, whose gradients travel together: each device owns a part of them.

    An owner adds up the gradients of its part, lets the optimiser change it, and sends it to the others. So
    gradients and optimiser state are divided among the devices, and as many bytes travel as in an all-reduce.
    """

    index: int
    parts: tuple[tuple[str, tuple[Piece, ...]], ...]  # by owner, in the order of devices
    item_bytes: int

    def part(self, owner: str) -> tuple[Piece, ...]:
        return dict(self.parts)[owner]

    def numel(self, owner: str) -> int:
        return sum(piece.tile.numel for piece in self.part(owner))

    def num_bytes(self, owner: str) -> int:
        return self.item_bytes * self.numel(owner)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A device's part of a loss that is a sum of parts: of which tile, and whose parts make the sum.

    Of several devices that evaluate the same tile, each for the gradient of its own rows, one tells.
    """

    tile: Tile
    tellers: tuple[str, ...]  # in the order of devices


@dataclass(frozen=True)
class Territory:
    """Regions of one device, by layer. `exports` lists what each chunk leaves for later steps."""

    device: str
    home: dict[str, Tile]
    computed: dict[str, Tile]
    needed: dict[tuple[str, int], Tile]  # tiles that have to be put together, by (layer, segment)
    weights: dict[str, Tile]
    exports: dict[int, tuple[str, ...]]
    segment_of: dict[str, int]
    exchanges: dict[str, Exchange]
    tape_holds_input: frozenset[str]  # exchanged norms whose own input is on their tape anyway
    inputs: tuple[Tile, ...]  # of the batch: what is read here of each input of the model
    owned: tuple[Piece, ...]  # of the trainable weights: what the optimiser of this device changes
    buckets: dict[int, Bucket]  # those in which this device has a part
    in_flight_bytes: int  # that may be on their way out while it goes on
    wire: str | None = None  # type to which tiles and gradients are rounded for their way
    evaluation: Evaluation | None = None  # None: no part of the loss, or all of it

    def buffer(self, source: str, segment: int) -> tuple[str, int | None]:
        """Where a segment finds a tensor: in a tile put together for it, or as this device computed it."""
        return source, segment if (source, segment) in self.needed else None

    def read_again(self, program: Program, layers: Mapping[str, Layer]) -> set[tuple[str, int | None]]:
        """What is read a second time in backward, so that nobody may overwrite it before."""
        again = [step.layers for step in program.steps if isinstance(step, Redo | Rerun)]
        return {
            self.buffer(source, self.segment_of[name])
            for names in again
            for name in names
            for source in layers[name].inputs
            if source not in names
        }
