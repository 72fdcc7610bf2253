"""The console of an emulated cluster: one for all devices, and a table in the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.ir.report import EmulatedRun, Outcome
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


def emulated_view(run: EmulatedRun) -> Table:
    times = f"{run.dilation:.3g} times"
    table = Table(title=f"Emulated devices, {times} as fast as asked for", title_justify="left")
    headings = (
        "device",
        "part of a core",
        "sent",
        "most memory *",
        "ended after",
        "at the speed asked for",
        "end",
    )
    for heading in headings:
        table.add_column(heading)
    for each in run.devices:
        peak = "" if each.peak_bytes is None else amount(each.peak_bytes)
        limit = "" if each.memory_bytes is None else f" of {amount(each.memory_bytes)}"
        ended = (f"{each.seconds:.1f} s", f"{run.dilation * each.seconds:.1f} s", _end(each))
        table.add_row(each.device, f"{each.cores:.0%}", amount(each.sent_bytes), f"{peak}{limit}", *ended)
    table.caption = "* of all its processes, and of files that the kernel keeps in memory for them"
    table.caption_justify = "left"
    return table


def _end(outcome: Outcome) -> str:
    """How it ended."""
    if outcome.stopped:
        return "stopped, since another had failed"
    if outcome.exit_code < 0:
        return f"killed by {signal.Signals(-outcome.exit_code).name}"
    return f"exit code {outcome.exit_code}" if outcome.exit_code else "done"
