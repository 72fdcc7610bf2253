"""What one device needs to know to run its program: its tiles, its weights, its part in each statistic."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.ir.geometry import Tile


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
    tape_holds_input: frozenset[str]  # exchanged norms whose own input need not be kept apart
    owned_weights: dict[str, tuple[Tile, ...]]  # pieces of weights of which this device is the first holder
