"""What there is to say about a plan before it runs: the facts behind the printed table."""

from __future__ import annotations

from dataclasses import dataclass

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
    measured: bool = False  # are the speeds behind the forecast measured, or nominal
