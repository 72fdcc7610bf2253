"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.ir.plan import Cost
from manyhands.ir.report import Advice, Help, PlanFacts, SegmentFacts


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
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading, justify in (
        ("#", "right"),
        ("layers", "left"),
        ("cut", "left"),
        ("result", "left"),
        ("received", "right"),
        ("twice", "right"),
        ("time", "right"),
        ("work, %", "left"),
    ):
        width = {"layers": 12, "cut": 10, "work, %": 8}.get(heading)
        table.add_column(heading, justify=justify, min_width=width, overflow="fold")  # type: ignore[arg-type]
    for index, segment in enumerate(facts.segments):
        table.add_row(*_segment_row(index, segment))
    parts: list[RenderableType] = [table]
    if facts.advice is not None and facts.advice.alternatives:
        parts += [_rivals(facts, facts.advice), Text()]
    parts += [Text(line) for line in plan_notes(facts)]
    return Group(*parts)


def _rivals(facts: PlanFacts, advice: Advice) -> Table:
    """The best of each named strategy beside the plan."""
    table = Table(title="Against the named strategies", box=SIMPLE, title_justify="left")
    for heading, justify in (("plan", "left"), ("a step", "right"), ("largest peak", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    largest = max(size for _, size in facts.forecast.peak_bytes)
    table.add_row("this one", duration(facts.forecast.seconds), amount(largest), "")
    for other in sorted(advice.alternatives, key=lambda other: other.seconds or float("inf")):
        seconds = "" if other.seconds is None else duration(other.seconds)
        peak = "" if other.largest_peak_bytes is None else amount(other.largest_peak_bytes)
        table.add_row(other.name, seconds, peak, other.note)
    return table


def _segment_row(index: int, segment: SegmentFacts) -> tuple[str, ...]:
    names = segment.first if segment.num_layers == 1 else f"{segment.first} .. {segment.last}"
    counted = f"{names} ({segment.num_layers})" if segment.num_layers > 1 else names
    shares = " ".join(f"{share * 100:.0f}" for _, share in segment.shares)
    twice = f"{segment.redundant:.0%}" if segment.redundant >= 0.005 else ""
    size = "x".join(map(str, segment.shape[1:])) or "1"
    received = amount(segment.received_bytes) if segment.received_bytes else ""
    slowest = max((seconds for _, seconds in segment.seconds), default=0.0)
    time = duration(slowest) if segment.seconds else ""
    return str(index), counted, segment.layout, size, received, twice, time, shares


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
    lines.append(
        f"Forecast ({basis}): {duration(cost.seconds)} a step, {amount(cost.traffic_bytes)} on the network."
    )
    if facts.packed:
        lines.append("Zeros of rectified layers do not travel: how many bytes do is an estimate.")
    if facts.ahead:
        lines.append("Of results that others wait for, a part is computed and sent first.")
    limits = dict(facts.limits)
    peaks = [
        f"{device} {amount(size)}" + (f" of {amount(limit)}" if (limit := limits.get(device)) else "")
        for device, size in cost.peak_bytes
    ]
    lines.append(f"Peak memory: {', '.join(peaks)}.")
    if short := facts.short:
        lines.append(f"Does NOT fit: {', '.join(short)} would need more memory than there is.")
    lines += _redone_notes(facts.segments)
    if facts.bound:
        lines.append(f"Bound by {facts.bound}.")
    lines += _advice_notes(facts.advice) if facts.advice else []
    if facts.wire:
        lines.append(f"NOT exact: tiles and gradients are rounded to {facts.wire} for their way.")
    else:
        lines.append("Exact: trains as one device would, to rounding.")
    return lines


def _redone_notes(segments: tuple[SegmentFacts, ...]) -> list[str]:
    """What is computed twice for the sake of memory."""
    redone = [index for index, segment in enumerate(segments) if segment.redo]
    if not redone:
        return []
    refilled = [index for index in redone if segments[index].refill]
    given = f", and of {_ranges(refilled)} even what is read" if refilled else ""
    notes = [f"To fit, segments {_ranges(redone)} are computed a second time in backward{given}."]
    for bands in sorted({segments[index].bands for index in redone} - {1}):
        banded = [index for index in redone if segments[index].bands == bands]
        notes.append(f"Segments {_ranges(banded)} are computed in {bands} bands of rows, one after another.")
    return notes


def _ranges(numbers: list[int]) -> str:
    """`0-3, 5`: neighbours as one."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _advice_notes(advice: Advice) -> list[str]:
    lines = []
    if advice.left_out:
        them = "them" if len(advice.left_out) > 1 else "it"
        lines.append(f"Left out: {', '.join(advice.left_out)}; the step is shorter without {them}.")
    helps = [f"{each.change} {_effect(each)}" for each in _most_first(advice.helps)]
    if helps:
        lines.append(f"What would help: {'; '.join(helps)}.")
    return lines


def _most_first(helps: tuple[Help, ...]) -> list[Help]:
    return sorted(helps, key=lambda each: float("inf") if each.ratio is None else each.ratio)


def _effect(each: Help) -> str:
    if each.ratio is None:
        return f"({each.note})"
    if each.ratio >= 0.98:
        return "(no gain)"
    return f"(an image takes {each.ratio:.0%} of the time)"


def comparison(foreseen: Cost, measured: Cost, names: list[str]) -> RenderableType:
    """A forecast beside what was measured: the step, each device's memory, and every segment."""
    table = Table(title="Foreseen and measured, a step", box=SIMPLE, title_justify="left")
    for heading in ("", "foreseen", "measured", "error"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("time", *_pair(foreseen.seconds, measured.seconds, duration))
    table.add_row("on the network", *_pair(foreseen.traffic_bytes, measured.traffic_bytes, amount))
    peaks = dict(measured.peak_bytes)
    for device, size in foreseen.peak_bytes:
        table.add_row(f"peak memory, {device}", *_pair(size, peaks[device], amount))
    for name, expected, found in zip(names, foreseen.segments, measured.segments, strict=True):
        times = dict(found)
        for device, seconds in expected:
            if seconds or times[device]:
                table.add_row(f"{name}, {device}", *_pair(seconds, times[device], duration))
    return table


def _pair(foreseen: float, measured: float, text: Callable[[float], str]) -> tuple[str, str, str]:
    error = f"{foreseen / measured - 1:+.0%}" if measured else ""
    return text(foreseen), text(measured), error
