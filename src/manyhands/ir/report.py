"""What there is to say about a plan before it runs: the facts behind the printed table."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.ir.geometry import Shape, Tile
from manyhands.ir.plan import Cost


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One fused group: which layers, how it is cut, what reaches it by network, who computes how much."""

    first: str
    last: str
    num_layers: int
    layout: str
    shape: tuple[int, ...]  # of its last result
    received_bytes: int  # values and statistics, forward and backward
    redundant: float  # computed twice, as a part of what one device would compute
    shares: tuple[tuple[str, float], ...]  # of the operations of the segment
    seconds: tuple[tuple[str, float], ...] = ()  # of each device, forward and backward, foreseen
    redo: int = 0  # samples at a time that are computed a second time in backward; 0: none
    refill: bool = False  # is what it was given computed a second time, too?
    bands: int = 1  # of rows, one after another


@dataclass(frozen=True, slots=True)
class WholeLayer:
    """A layer that could not be cut, and what that costs: operations done again on other devices."""

    name: str
    reason: str
    extra_flops: int


@dataclass(frozen=True, slots=True)
class PlanFacts:
    batch: int
    devices: tuple[str, ...]
    exact: bool
    segments: tuple[SegmentFacts, ...]
    whole: tuple[WholeLayer, ...]
    summed_bytes: int  # weights that several devices hold: their gradients are added up every step
    weight_bytes: tuple[tuple[str, int], ...]  # held by each device
    forecast: Cost
    packed: bool = False  # does only what is not zero travel of rectified layers?
    ahead: bool = False  # is what others wait for computed first?
    wire: str | None = None  # type to which tiles and gradients are rounded for their way
    measured: bool = False  # are the speeds behind the forecast measured, or nominal
    limits: tuple[tuple[str, int | None], ...] = ()  # memory of each device
    bound: str = ""  # what the step waits for most
    advice: Advice | None = None  # where the plan was chosen, not named

    @property
    def short(self) -> tuple[str, ...]:
        """Devices that would need more memory than they have."""
        limits = dict(self.limits)
        return tuple(d for d, size in self.forecast.peak_bytes if size > (limits.get(d) or size))


@dataclass(frozen=True, slots=True)
class Alternative:
    """A named strategy with its best shares: what it would cost, or why it cannot be."""

    name: str
    seconds: float | None
    largest_peak_bytes: int | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Help:
    """A change of the request or the cluster, and what an image would then take as a part of now."""

    change: str
    ratio: float | None  # None: it would then fit, as now it does not, or not at all
    note: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """Why this plan: what else there was, whom it leaves out, what would help most."""

    alternatives: tuple[Alternative, ...]
    left_out: tuple[str, ...]
    helps: tuple[Help, ...]


@dataclass(frozen=True, slots=True)
class CutMap:
    """One tensor, cut: who owns which tile of it, and who has to do with more of it than it owns."""

    layer: str
    shape: Shape
    owned: tuple[tuple[str, Tile], ...]  # disjoint, together the whole; devices without a piece are missing
    beyond: tuple[tuple[str, Tile], ...]  # tiles that a device computes or reads, where it does not own them


@dataclass(frozen=True, slots=True)
class DrawnSegment:
    """What a drawing says of a segment, beside its facts."""

    result: CutMap  # of its last layer
    idle: tuple[str, ...]  # devices that compute nothing of it
    received: tuple[tuple[str, int], ...]  # bytes that reach each device for it, forward and backward
    earlier: tuple[tuple[int, int], ...]  # of these, what skips segments: (segment it is from, bytes)


@dataclass(frozen=True, slots=True)
class PlanPicture:
    """Everything a drawing of a plan shows."""

    model: str
    facts: PlanFacts
    inputs: tuple[CutMap, ...]
    segments: tuple[DrawnSegment, ...]  # as in the facts
    loss_received: tuple[tuple[str, int], ...]  # bytes that reach each device for the sake of the loss


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command came to on one emulated device."""

    device: str
    exit_code: int
    seconds: float  # until it ended
    cores: float  # of the machine, at most
    sent_bytes: int
    peak_bytes: int | None  # of all its processes, files in memory included
    memory_bytes: int | None = None  # it has no more than this
    stopped: bool = False  # by us, because another had failed


@dataclass(frozen=True, slots=True)
class EmulatedRun:
    """What a command came to on emulated devices, and how these were emulated."""

    dilation: float  # times as fast as asked for: seconds that are told are so many on the devices asked for
    core_flops_per_s: float  # of this machine
    bytes_per_s: float  # of every wire, as emulated
    held_back_s: float  # our messages, where the kernel cannot delay packets
    devices: tuple[Outcome, ...]
    others_cores: float  # of this machine, that others took meanwhile
    failure: str | None = None  # which device needed more memory than it has
