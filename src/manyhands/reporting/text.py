"""Tables for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.ir.report import PlanFacts, SegmentFacts


def amount(num_bytes: float) -> str:
    """`1.5 MB`: bytes as a person says them."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def plan_view(facts: PlanFacts) -> RenderableType:
    """The plan as a table, what runs whole, and the forecast."""
    table = Table(
        title=f"Plan for batch {facts.batch} on {len(facts.devices)} devices",
        box=SIMPLE,
        title_justify="left",
    )
    for heading, justify in (
        ("#", "right"),
        ("layers", "left"),
        ("cut", "left"),
        ("result", "left"),
        ("received", "right"),
        ("twice", "right"),
        ("work, %", "left"),
    ):
        width = {"layers": 12, "cut": 14, "work, %": 11}.get(heading)
        table.add_column(heading, justify=justify, min_width=width, overflow="fold")  # type: ignore[arg-type]
    for index, segment in enumerate(facts.segments):
        table.add_row(*_segment_row(index, segment))
    parts: list[RenderableType] = [table]
    parts += [Text(line) for line in plan_notes(facts)]
    return Group(*parts)


def _segment_row(index: int, segment: SegmentFacts) -> tuple[str, ...]:
    names = segment.first if segment.num_layers == 1 else f"{segment.first} .. {segment.last}"
    counted = f"{names} ({segment.num_layers})" if segment.num_layers > 1 else names
    shares = " ".join(f"{share * 100:.0f}" for _, share in segment.shares)
    twice = f"{segment.redundant:.0%}" if segment.redundant >= 0.005 else ""
    size = "x".join(map(str, segment.shape[1:])) or "1"
    received = amount(segment.received_bytes) if segment.received_bytes else ""
    return str(index), counted, segment.layout, size, received, twice, shares


def plan_notes(facts: PlanFacts) -> list[str]:
    """What the table leaves out, a line each."""
    lines = [
        f"{layer.name} runs whole: {layer.reason} ({layer.extra_flops:.2g} extra operations)."
        for layer in facts.whole
    ]
    if facts.summed_bytes:
        lines.append(f"Gradients added up among devices: {amount(facts.summed_bytes)} a step.")
    weights = " ".join(amount(size) for _, size in facts.weight_bytes)
    lines.append(f"Weights held: {weights}.")
    cost = facts.forecast
    basis = "measured speeds" if facts.measured else "nominal speeds, not measured"
    peaks = " ".join(amount(size) for _, size in cost.peak_bytes)
    lines.append(
        f"Forecast ({basis}): {duration(cost.seconds)} a step, {amount(cost.traffic_bytes)} on the network; "
        f"peak tensors {peaks}."
    )
    lines.append("Exact: trains as one device would, to rounding." if facts.exact else "NOT exact.")
    return lines
