"""A limit of memory that the kernel keeps: processes in a control group are killed when they need more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyhands.errors import RequestError

ROOT = Path("/sys/fs/cgroup")
_V1_LIMIT = "memory.limit_in_bytes"


def why_not(root: Path = ROOT) -> str | None:
    """Why no memory limit can be set here; None where it can."""
    if os.geteuid() != 0:
        return "limits of memory need root"
    if _memory_root(root) is None:
        return "no control group of this system limits memory"
    return None


def _memory_root(root: Path) -> Path | None:
    """Where groups with a memory limit are made: version 1 has a folder for it, version 2 one for all."""
    if (root / "memory" / _V1_LIMIT).exists():
        return root / "memory"
    controllers = root / "cgroup.subtree_control"
    if controllers.is_file():
        if "memory" not in controllers.read_text().split():
            with suppress(OSError):
                controllers.write_text("+memory")
        if "memory" in controllers.read_text().split():
            return root
    return None


@contextmanager
def limited(name: str, memory_bytes: int, root: Path = ROOT) -> Iterator[tuple[str, ...]]:
    """A group with a memory limit and no swap; what to put before a command so that it runs inside."""
    place = _memory_root(root)
    if place is None:
        raise RequestError(f"{why_not(root)}.")
    group = place / name
    group.mkdir()
    try:
        if (group / _V1_LIMIT).exists():
            (group / _V1_LIMIT).write_text(str(memory_bytes))
            (group / "memory.swappiness").write_text("0")
        else:
            (group / "memory.max").write_text(str(memory_bytes))
            with suppress(OSError):  # a system without swap has no such file
                (group / "memory.swap.max").write_text("0")
        yield ("sh", "-c", f'echo $$ > "{group / "cgroup.procs"}" && exec "$@"', "sh")
    finally:
        group.rmdir()
