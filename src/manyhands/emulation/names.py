"""Names of what is made in the kernel: they say whose it is, so that what is left over can be told."""

from __future__ import annotations

import os
import re
from pathlib import Path

FAMILY = "manyhands-emulated-"  # how all names begin
_PATTERN = re.compile(rf"{FAMILY}(\d+)-(\d+)-")


def own_prefix() -> str:
    """How names begin that this process gives: with its number and when it was started."""
    return f"{FAMILY}{os.getpid()}-{_started(os.getpid())}-"


def is_leftover(name: str) -> bool:
    """Was it made by a process that is no more?"""
    match = _PATTERN.match(name)
    return match is not None and _started(int(match[1])) != int(match[2])


def _started(pid: int) -> int:
    """When a process was started, in ticks since the machine was: no clock that is set later changes that."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(fields[18])
