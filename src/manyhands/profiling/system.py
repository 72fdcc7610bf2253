"""What the system says about this device: memory it may use, processor, frequency, heat and throttling.

Every path is below a root folder, which is `/` but for tests.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manyhands.errors import RunError

VCGENCMD = ("usr/bin/vcgencmd", "opt/vc/bin/vcgencmd")
# What the firmware of a Raspberry Pi reports now: bit, what it is, the way out. Bits 16 higher: since boot.
FIRMWARE = (
    (0, "under-voltage", "Use a stronger power supply or a shorter cable"),
    (1, "the firmware caps its frequency", "Use a stronger power supply, cool it"),
    (2, "the firmware throttles it", "Cool it"),
    (3, "the soft temperature limit is reached", "Cool it"),
)
SINCE_BOOT = 16
MAY_IDLE = (
    "intel_pstate",
    "amd-pstate",
    "amd-pstate-epp",
)  # with these, "powersave" still runs at full speed


@dataclass(frozen=True, slots=True)
class Room:
    """How much more memory this process could take, and what forbids more."""

    left_bytes: int
    by: str


@dataclass(frozen=True, slots=True)
class Health:
    """Heat and what it does. `throttled`: what holds the processor back now, with the way out."""

    temperature_c: float | None
    throttled: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    throttle_count: int  # times since boot, as x86 processors count them


def read(path: Path) -> str | None:
    """The text of a file of the system without its last newline or zero byte, or None."""
    try:
        return path.read_text(errors="replace").rstrip("\0\n ")
    except OSError:
        return None


def number(path: Path) -> int | None:
    text = read(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _line(path: Path, key: str) -> str | None:
    """What follows a key in a file of lines such as `MemAvailable:  1000 kB`."""
    for line in (read(path) or "").splitlines():
        if re.match(rf"{re.escape(key)}\s*[:\s]", line):
            return line[len(key) :].lstrip(" \t:").strip()
    return None


def _kilobytes(path: Path, key: str) -> int | None:
    text = _line(path, key)
    return int(text.split()[0]) * 1024 if text else None


# ---- memory -------------------------------------------------------------------------------------------


def resident_bytes(root: Path) -> int:
    return _kilobytes(root / "proc/self/status", "VmRSS") or 0


def room(root: Path, num_sharing: int = 1) -> Room:
    """The least of what is free, what the control groups leave and what the address space leaves.

    `num_sharing` processes that train side by side divide the first two among them.
    """
    found = [Room(left // num_sharing, "cgroup") for left in _left_in_groups(root)]
    free = _kilobytes(root / "proc/meminfo", "MemAvailable")
    if free is not None:
        found.append(Room(free // num_sharing, "free memory"))
    space = (_line(root / "proc/self/limits", "Max address space") or "unlimited").split()[0]
    if space != "unlimited":
        used = _kilobytes(root / "proc/self/status", "VmSize") or 0
        found.append(Room(max(int(space) - used, 0), "address space"))
    if not found:
        raise RunError("the system does not say how much memory is free (no MemAvailable in /proc/meminfo).")
    return min(found, key=lambda each: each.left_bytes)


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group of this process leaves, in both versions; a group's parents count as well."""
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = Path(path.lstrip("/"))
        for folder in (base / inside, *(base / parent for parent in inside.parents)):
            limit, used = number(folder / names[0]), number(folder / names[1])
            if limit is not None and used is not None:
                cached = int(_line(folder / "memory.stat", names[2]) or 0)  # given up when memory is short
                yield max(limit - (used - min(cached, used)), 0)


# ---- processor ----------------------------------------------------------------------------------------


def processor(root: Path) -> str:
    """`Raspberry Pi 4 Model B Rev 1.4`, or what the processor calls itself."""
    return (
        read(root / "proc/device-tree/model")
        or _line(root / "proc/cpuinfo", "model name")
        or _line(root / "proc/cpuinfo", "Model")
        or platform.machine()
    )


def last_cache_bytes(root: Path) -> int:
    """The largest cache of the first core, 0 where it is not told."""
    folder = root / "sys/devices/system/cpu/cpu0/cache"
    texts = [read(path) or "" for path in sorted(folder.glob("index*/size"))]
    units = {"": 1, "K": 1024, "M": 1024**2}
    found = [re.fullmatch(r"(\d+)([KM]?)", text) for text in texts]
    return max((int(match[1]) * units[match[2]] for match in found if match), default=0)


def frequency(root: Path) -> tuple[float | None, str | None, tuple[str, ...]]:
    """Hertz now, the governor, and what about them makes a measurement doubtful."""
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    now, limit, most = (
        number(folder / name) for name in ("scaling_cur_freq", "scaling_max_freq", "cpuinfo_max_freq")
    )
    governor, notes = read(folder / "scaling_governor"), []
    if governor == "powersave" and read(folder / "scaling_driver") not in MAY_IDLE:
        notes.append("the governor powersave keeps it slow: cpupower frequency-set -g performance")
    if limit is not None and most is not None and limit < most:
        notes.append(f"its frequency is limited to {limit / 1e6:.2g} of {most / 1e6:.2g} GHz")
    return (None if now is None else now * 1e3), governor, tuple(notes)


# ---- heat ---------------------------------------------------------------------------------------------


def health(root: Path) -> Health:
    zones = [
        zone for path in sorted((root / "sys/class/thermal").glob("thermal_zone*")) for zone in _zone(path)
    ]
    throttled = [
        (f"{kind} is at {now:.0f} °C, where it is held back from {limit:.0f} °C", "Cool it")
        for kind, now, limit in zones
        if limit is not None and now >= limit
    ]
    for path in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        kind = read(path / "type") or ""
        if ("cpufreq" in kind or kind == "Processor") and (number(path / "cur_state") or 0) > 0:
            throttled.append((f"{path.name} ({kind}) slows the processor", "Cool it"))
    word = _firmware_word(root)
    throttled += [(what, way) for bit, what, way in FIRMWARE if word >> bit & 1]
    past = [what for bit, what, _ in FIRMWARE if word >> bit + SINCE_BOOT & 1 and not word >> bit & 1]
    counts = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    return Health(
        max((now for _, now, _ in zones), default=None),
        tuple(throttled),
        tuple(f"since it was switched on: {what}" for what in past),
        sum(number(path) or 0 for path in counts),
    )


def _zone(path: Path) -> Iterator[tuple[str, float, float | None]]:
    """Kind, degrees, and the degrees from which the system slows the processor, if it says."""
    now = number(path / "temp")
    if now is None:
        return
    limits = [
        degrees
        for kind in sorted(path.glob("trip_point_*_type"))
        if read(kind) in ("passive", "hot")
        and (degrees := number(kind.with_name(kind.name.replace("_type", "_temp")))) is not None
        and degrees > 0
    ]
    yield read(path / "type") or path.name, now / 1000, min(limits) / 1000 if limits else None


def _firmware_word(root: Path) -> int:
    """The flags of a Raspberry Pi's firmware, 0 elsewhere."""
    text = read(root / "sys/devices/platform/soc/soc:firmware/get_throttled")
    for command in (root / name for name in VCGENCMD):
        if text is None and os.access(command, os.X_OK):
            ended = subprocess.run([command, "get_throttled"], capture_output=True, text=True, timeout=10)
            text = ended.stdout.strip().removeprefix("throttled=") if ended.returncode == 0 else None
    return int(text, 16) if text and re.fullmatch(r"(0x)?[0-9a-fA-F]+", text) else 0


def refuse_throttled(now: Health, before: Health | None = None) -> None:
    """Raise where the processor is held back, or was since `before`: what is measured then does not hold."""
    if now.throttled:
        what, way_out = now.throttled[0]
        raise RunError(f"it is throttled: {what}. {way_out} and measure again.")
    if before is not None and now.throttle_count > before.throttle_count:
        times = now.throttle_count - before.throttle_count
        raise RunError(f"it throttled {times} times while it was measured. Cool it and measure again.")
