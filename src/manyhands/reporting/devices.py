"""A survey of devices and links as tables."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.ir.cluster import Link
from manyhands.ir.survey import DeviceFacts, Survey

FEW = 6  # links that are all listed; of more, only those that differ


HEADINGS = (
    "threads",
    "conv 3x3\nGFLOP/s",
    "product\nGFLOP/s",
    "copying\nGB/s",
    "launch\nµs",
    "usable\nMB",
    "bare\nMB",
)


def survey_view(survey: Survey) -> RenderableType:
    """A line for each device, what is doubtful, and what the network is like."""
    table = Table(box=SIMPLE, title="Devices", title_justify="left")
    table.add_column("device", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for facts in survey.devices:
        table.add_row(*_device_row(facts))
    parts: list[RenderableType] = [table]
    if any(link in survey.differing or len(survey.links) <= FEW for link in survey.links):
        parts.append(_link_table(survey))
    parts += [Text(line) for line in _notes(survey)]
    return Group(*parts)


def _device_row(facts: DeviceFacts) -> tuple[str, ...]:
    return (
        facts.device,
        f"{facts.threads} of {facts.cores}",
        _digits(facts.convolution_flops_per_s / 1e9),
        _digits(facts.product_flops_per_s / 1e9),
        _digits(facts.memory_bytes_per_s / 1e9),
        _digits(facts.launch_s * 1e6),
        f"{facts.usable_bytes / 1e6:.0f}",
        f"{facts.bare_bytes / 1e6:.0f}",
    )


def _state(facts: DeviceFacts) -> str:
    """`Raspberry Pi 4, 1.5 GHz (ondemand), 61 °C; usable memory is set by free memory.`"""
    text = facts.processor
    if facts.frequency_hz is not None:
        text += f", {facts.frequency_hz / 1e9:.2g} GHz" + (f" ({facts.governor})" if facts.governor else "")
    if facts.temperature_c is not None:
        text += f", {facts.temperature_c:.0f} °C"
    return f"{text}; usable memory is set by {facts.usable_by}."


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _link_table(survey: Survey) -> Table:
    every = len(survey.links) <= FEW
    table = Table(
        box=SIMPLE, title="Links, each alone" if every else "Links that differ", title_justify="left"
    )
    for heading in ("from", "to", "rate", "latency"):
        table.add_column(heading, justify="left" if heading in ("from", "to") else "right")
    for link in survey.links if every else survey.differing:
        table.add_row(link.source, link.target, *link_texts(link))
    return table


def link_texts(link: Link) -> tuple[str, str]:
    """`94.1 Mbit/s` and `0.21 ms`."""
    bits = link.bytes_per_s * 8
    rate = f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{_digits(bits / 1e6)} Mbit/s"
    return rate, f"{link.latency_s * 1e3:.2f} ms"


def _notes(survey: Survey) -> list[str]:
    """What the tables leave out, a line each."""
    states: dict[str, list[str]] = {}
    for facts in survey.devices:
        states.setdefault(_state(facts), []).append(facts.device)
    lines = [f"{', '.join(names)}: {state}" for state, names in states.items()]
    lines += [f"{facts.device}: {warning}." for facts in survey.devices for warning in facts.warnings]
    if len(survey.devices) > 1 and survey == survey.alike:
        lines.append("Processes of one machine: each has the medians of all.")
    if survey.links:
        usual = Link("", "", survey.bytes_per_s, survey.latency_s)
        rate, latency = link_texts(usual)
        lines.append(f"Two devices alone: {rate}, {latency} (medians of {len(survey.links)} links).")
    if not survey.every_pair:
        lines.append("With so many devices a ring and some other pairs were measured, not every pair.")
    if survey.together is not None:
        rate, _ = link_texts(Link("", "", survey.together.bytes_per_s, 0))
        kind = "they share one medium" if survey.together.shared else "switched, nobody waits for other pairs"
        lines.append(f"All at once: {rate} in sum: {kind}.")
    return lines
