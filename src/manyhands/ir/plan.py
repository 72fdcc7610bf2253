"""Who computes what: the one value in which everything is decided before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyhands.ir.geometry import Axis, Layout

LEAST_IN_FLIGHT = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring layers computed as one fused group, cut in one way; exchange is only between segments.

    `redo`: what backward needs is not kept but computed a second time, for so many samples at a time, from
    what the group was given. 0: it is kept. `refill`: nor is that kept which it alone was given: whoever
    computed it does so again. What came from other devices is kept in any case, so nothing travels twice.
    `bands`: where it is redone and its layers allow it, each device's part is computed in so many bands of
    rows, one after another, forward and backward, so that no more than one band of what is in between exists.
    """

    layers: tuple[str, ...]
    layout: Layout
    redo: int = 0
    refill: bool = False
    bands: int = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimiser keeps of each weight (momentum 1, Adam 2), and copies while it changes one."""

    slots: float = 1.0
    copies: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted or measured: the same type, so a report is a subtraction."""

    seconds: float
    traffic_bytes: int
    peak_bytes: tuple[tuple[str, int], ...]  # of each device
    segments: tuple[tuple[tuple[str, float], ...], ...] = ()  # seconds that each device computes in each


@dataclass(frozen=True, slots=True)
class Plan:
    """Which devices compute which layers in which layout. `graph` is the digest of the graph it is for.

    `in_flight_bytes` may be on their way out of a device while it goes on computing; they are held in memory.
    With more than the least, a step may end while new weights are on their way: the next one waits for them.
    `packed`: of rectified layers only what is not zero travels. `wire`: tiles and gradients are rounded to
    this type for their way, such as bfloat16; None: nothing is. `loss`: axes of the output along which the
    loss is a sum of parts: there each device evaluates its own part, and nobody needs the whole output.
    `ahead`: of a convolution's result that others wait for, a part is computed and sent first, and travels
    while the rest is computed: rows at the borders, or half of the samples.
    """

    graph: str
    batch: int
    devices: tuple[str, ...]
    segments: tuple[Segment, ...]
    in_flight_bytes: int = LEAST_IN_FLIGHT
    packed: bool = False
    wire: str | None = None
    loss: tuple[Axis, ...] = ()
    ahead: bool = False

    @property
    def exact(self) -> bool:
        """Same parameters as one device after the same steps, to rounding."""
        return self.wire is None or len(self.devices) == 1

    def evaluating(self, graph: str) -> Plan:
        """The same on the graph of the model in evaluation: nothing is rounded, and outputs are whole."""
        return replace(self, graph=graph, wire=None, loss=())
