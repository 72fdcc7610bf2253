"""Names of what is made in the kernel: they say whose it is, so that what is left over can be told."""

from __future__ import annotations

import os
import re

import psutil

_PATTERN = re.compile(r"manyhands-(\d+)-(\d+)-")


def own_prefix() -> str:
    """How names begin that this process gives: with its number and when it was started."""
    return f"manyhands-{os.getpid()}-{_started(os.getpid())}-"


def is_leftover(name: str) -> bool:
    """Was it made by a process that is no more?"""
    match = _PATTERN.match(name)
    return match is not None and _started(int(match[1])) != int(match[2])


def _started(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        return -1 if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except psutil.NoSuchProcess:
        return -1
