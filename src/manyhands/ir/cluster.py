"""Where to compute: devices, the links between them, and how fast each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A machine. Without an address it is a process on this one."""

    name: str
    address: str | None = None
    memory_bytes: int | None = None
    flops_per_s: float = 4e9


@dataclass(frozen=True, slots=True)
class Link:
    source: str
    target: str
    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices, the usual rate and latency between two of them, and the links that differ."""

    devices: tuple[Device, ...]
    bytes_per_s: float = 12.5e6
    latency_s: float = 0.5e-3
    links: tuple[Link, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    def link(self, source: str, target: str) -> Link:
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return Link(source, target, self.bytes_per_s, self.latency_s)


def local_cluster(num_devices: int) -> Cluster:
    """Processes on this machine, named device-0, device-1, ..."""
    return Cluster(tuple(Device(f"device-{i}") for i in range(num_devices)), 1e9, 50e-6)
