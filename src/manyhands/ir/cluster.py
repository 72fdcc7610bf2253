"""Where to compute: devices, the links between them, and how fast each is."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands.ir.plan import Plan
from manyhands.ir.profile import BARE_BYTES, Profile

FIRST_PORT, NUM_PORTS = 20_000, 40_000  # where a meeting's port is looked for: 20000 to 59999
DELAY = "MANYHANDS_DELAY_S"  # variable: seconds that messages are held back on emulated wires without netem


@dataclass(frozen=True, slots=True)
class Device:
    """A machine. Without an address it is a process on this one."""

    name: str
    address: str | None = None
    memory_bytes: int | None = None
    flops_per_s: float = 4e9
    memory_bytes_per_s: float = 2e9
    launch_s: float = 50e-6  # to start one layer, however small
    bare_bytes: int = BARE_BYTES  # of a process that is ready to train and holds no weights yet


@dataclass(frozen=True, slots=True)
class Link:
    source: str
    target: str
    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that was stepped on a cluster, in turns with others, and the seconds of a step."""

    name: str  # its strategy; `auto` if a search found it
    plan: Plan
    seconds: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices, the usual rate and latency between two of them, and the links that differ.

    Rates are those of one pair alone. Where devices share a medium, such as a radio, all of them together
    have no more than `shared_bytes_per_s`. `cores`: of the one machine on which all devices are processes.
    """

    devices: tuple[Device, ...]
    bytes_per_s: float = 12.5e6
    latency_s: float = 0.5e-3
    links: tuple[Link, ...] = ()
    port: int | None = None  # where devices of several machines meet, if somebody wants to say
    shared_bytes_per_s: float | None = None
    cores: int | None = None
    profiles: tuple[Profile, ...] = ()  # of the model at hand, where it was measured
    trials: tuple[Trial, ...] = ()  # of plans for it

    @property
    def meeting_port(self) -> int:
        """The port said, else one that follows from names and addresses: one file, one port everywhere."""
        if self.port is not None:
            return self.port
        text = json.dumps([(device.name, device.address) for device in self.devices])
        return FIRST_PORT + int(hashlib.sha256(text.encode()).hexdigest(), 16) % NUM_PORTS

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    def hastened(self, factor: float) -> Cluster:
        """The same with a network that is so many times as fast."""
        shared = self.shared_bytes_per_s
        links = tuple(replace(link, bytes_per_s=factor * link.bytes_per_s) for link in self.links)
        shared = None if shared is None else factor * shared
        return replace(self, bytes_per_s=factor * self.bytes_per_s, links=links, shared_bytes_per_s=shared)

    def profile(self, name: str) -> Profile | None:
        return next((profile for profile in self.profiles if profile.device == name), None)

    def device(self, name: str) -> Device:
        return next(device for device in self.devices if device.name == name)

    def link(self, source: str, target: str) -> Link:
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return Link(source, target, self.bytes_per_s, self.latency_s)


def local_cluster(num_devices: int) -> Cluster:
    """Processes on this machine, named device-0, device-1, ..."""
    return Cluster(tuple(Device(f"device-{i}") for i in range(num_devices)), 1e9, 50e-6, cores=cores_here())


def cores_here(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: those it is bound to, or fewer where a container's time is limited."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2, version 1
        with suppress(OSError, ValueError):  # no such system, or no limit
            limit, period = (int(word) for file in files for word in (groups / file).read_text().split())
            if limit > 0:
                return max(1, min(bound, round(limit / period)))
    return bound
