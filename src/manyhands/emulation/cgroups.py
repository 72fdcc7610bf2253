"""Limits that the kernel keeps, by control groups: of memory, and of the processor's time.

A process that needs more memory than its group has is killed; one that has had its part of the processor's
time stands still until the next period. Version 1 has a folder for each kind of limit, version 2 one for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from manyhands.emulation.names import FAMILY, is_leftover, own_prefix
from manyhands.errors import RequestError, RunError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US, LONGEST_US = 5_000, 20_000  # of time: whoever has had its part waits for so long at most
LEAST_US = 1_000  # of a period: the kernel knows no smaller part
LEAST_CORES = LEAST_US / LONGEST_US
_NO_QUOTA = {"cpu.cfs_quota_us": "-1", "cpu.max": "max"}
_V1_FILES = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us"}
_GONE_S = 30.0  # within which the kernel lets go of processes that were killed, and of their memory


@dataclass(frozen=True)
class Group:
    """A group of processes with limits: its folders, one in version 2, one a kind of limit in version 1."""

    folders: tuple[Path, ...]
    memory_bytes: int | None

    @property
    def before(self) -> tuple[str, ...]:
        """What to put before a command so that it runs inside."""
        entering = " && ".join(f'echo $$ > "{folder / "cgroup.procs"}"' for folder in self.folders)
        return ("sh", "-c", f'{entering} && exec "$@"', "sh") if self.folders else ()

    @property
    def kills(self) -> int:
        """How often the kernel killed one of its processes for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            for folder in self.folders:
                with suppress(OSError):
                    lines = (line.split() for line in (folder / name).read_text().splitlines())
                    return next((int(words[1]) for words in lines if words[0] == "oom_kill"), 0)
        return 0

    @property
    def peak_bytes(self) -> int | None:
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            for folder in self.folders:
                with suppress(OSError, ValueError):
                    return int((folder / name).read_text())
        return None


def why_not(root: Path = ROOT, kinds: tuple[str, ...] = ("memory",)) -> str | None:
    """Why no such limit can be set here; None where all can."""
    if os.geteuid() != 0:
        return f"limits of {' and '.join(kinds)} need root"
    for kind in kinds:
        place = _place(root, kind)
        if place is None:
            return f"no control group of this system limits {kind}"
        if not os.access(place, os.W_OK):
            return f"control groups in {place} cannot be made: it is read-only, as in most containers"
    return None


def _place(root: Path, kind: str) -> Path | None:
    """Where groups with a limit of this kind are made."""
    if (root / kind / _V1_FILES[kind]).exists():
        return root / kind
    controllers = root / "cgroup.subtree_control"
    if not controllers.is_file():
        return None
    if kind not in controllers.read_text().split():
        with suppress(OSError):
            controllers.write_text(f"+{kind}")
    return root if kind in controllers.read_text().split() else None


@contextmanager
def limited(
    label: str, *, memory_bytes: int | None = None, cores: float | None = None, root: Path = ROOT
) -> Iterator[Group]:
    """A group that has so much memory and no swap, and so many cores, or part of one. It goes in the end."""
    folders: list[Path] = []
    try:
        for kind, limit in (("memory", memory_bytes), ("cpu", cores)):
            if limit is None:
                continue
            place = _place(root, kind)
            if place is None:
                raise RequestError(f"{why_not(root, (kind,))}.")
            folder = place / f"{own_prefix()}{label}"
            try:
                if folder not in folders:
                    folder.mkdir()
                    folders.append(folder)
                _limit(folder, kind, limit)
            except OSError as error:
                raise RequestError(f"{folder} cannot limit {kind}: {error.strerror}.") from None
        yield Group(tuple(folders), memory_bytes)
    finally:
        with ExitStack() as stack:
            for folder in folders:
                stack.callback(_remove, folder)


def _limit(folder: Path, kind: str, limit: float) -> None:
    period_us = max(PERIOD_US, round(LEAST_US / limit)) if kind == "cpu" else 0
    match kind, (folder / _V1_FILES[kind]).exists():
        case "memory", True:
            (folder / "memory.limit_in_bytes").write_text(str(int(limit)))
            (folder / "memory.swappiness").write_text("0")
        case "memory", False:
            (folder / "memory.max").write_text(str(int(limit)))
            with suppress(OSError):  # a system without swap has no such file
                (folder / "memory.swap.max").write_text("0")
        case _, True:
            (folder / "cpu.cfs_period_us").write_text(str(period_us))
            (folder / "cpu.cfs_quota_us").write_text(str(round(limit * period_us)))
        case _:
            (folder / "cpu.max").write_text(f"{round(limit * period_us)} {period_us}")


def _remove(folder: Path) -> None:
    """End what still runs in a group, and the group. At full speed: freeing memory takes time, too."""
    deadline = time.monotonic() + _GONE_S
    for file, unlimited in _NO_QUOTA.items():
        if (folder / file).exists():
            with suppress(OSError):
                (folder / file).write_text(unlimited)
    while True:
        with suppress(OSError):
            for line in (folder / "cgroup.procs").read_text().split():
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(int(line)).kill()
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"the control group {folder} does not go: {error.strerror}.") from None
            time.sleep(0.02)


def remove_leftovers(root: Path = ROOT) -> int:
    """Groups of processes that are no more, with all that runs in them; how many there were."""
    places = {place for kind in _V1_FILES if (place := _place(root, kind)) is not None}
    found = [f for place in places for f in place.glob(f"{FAMILY}*") if is_leftover(f.name)]
    for folder in found:
        _remove(folder)
    return len(found)
