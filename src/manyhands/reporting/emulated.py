"""The console of an emulated cluster: one for all devices, and a table in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.ir.report import Outcome
from manyhands.reporting.text import amount

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def console(stream: IO[str]) -> Callable[[str, str], None]:
    """Prints a line of a device after its name, in a colour of its own."""
    out, lock = Console(file=stream, highlight=False, soft_wrap=True), threading.Lock()
    colours: dict[str, str] = {}

    def tell(device: str, line: str) -> None:
        with lock:
            if not device:
                out.print(Text(line))
                return
            colour = colours.setdefault(device, COLOURS[len(colours) % len(COLOURS)])
            out.print(Text(f"{device} ", colour) + Text(line))

    return tell


def outcomes_view(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Emulated devices", title_justify="left")
    for heading in ("device", "part of a core", "sent", "peak memory", "ended after", "exit code"):
        table.add_column(heading)
    for each in outcomes:
        peak = "" if each.peak_bytes is None else amount(each.peak_bytes)
        ended = (f"{each.seconds:.1f} s", str(each.exit_code))
        table.add_row(each.device, f"{each.cores:.0%}", amount(each.sent_bytes), peak, *ended)
    return table
