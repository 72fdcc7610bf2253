"""What `manyhands profile` found: facts of each device, and of the links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from manyhands.ir.cluster import Link

DIFFERS = 1.2  # a link this much faster or slower than the usual one is worth its own table
DIFFERS_S = 0.2e-3  # and of latencies, only those by which a message is really later


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device, measured. Rates are what training gets out of it, with so many threads."""

    device: str
    processor: str
    cores: int
    threads: int
    convolution_flops_per_s: float  # 3x3, forward and backward
    product_flops_per_s: float  # of matrices, forward and backward
    memory_bytes_per_s: float  # read and written by a copy larger than the caches
    launch_s: float
    bare_bytes: int  # of a process that is ready to train and holds no weights yet
    usable_bytes: int  # for one training process, the bare process included
    usable_by: str  # what sets that limit: "free memory", "cgroup", "address space"
    frequency_hz: float | None = None
    governor: str | None = None
    temperature_c: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Together:
    """All pairs busy at once: bytes a second of all of them in sum, and whether they share one medium."""

    bytes_per_s: float
    shared: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """Every device, and each measured link alone. Of many devices not every pair was measured."""

    devices: tuple[DeviceFacts, ...]
    links: tuple[Link, ...] = ()
    together: Together | None = None
    every_pair: bool = True

    @property
    def bytes_per_s(self) -> float:
        return median(link.bytes_per_s for link in self.links)

    @property
    def latency_s(self) -> float:
        return median(link.latency_s for link in self.links)

    @property
    def alike(self) -> Survey:
        """Every device with the rates of most: processes of one machine differ only by chance."""
        devices = self.devices
        return replace(
            self,
            devices=tuple(
                replace(
                    facts,
                    convolution_flops_per_s=median(d.convolution_flops_per_s for d in devices),
                    product_flops_per_s=median(d.product_flops_per_s for d in devices),
                    memory_bytes_per_s=median(d.memory_bytes_per_s for d in devices),
                    launch_s=median(d.launch_s for d in devices),
                    bare_bytes=max(d.bare_bytes for d in devices),
                    usable_bytes=min(d.usable_bytes for d in devices),
                )
                for facts in devices
            ),
        )

    @property
    def differing(self) -> tuple[Link, ...]:
        """The links that are not like most."""
        return tuple(
            link
            for link in self.links
            if _ratio(link.bytes_per_s, self.bytes_per_s) > DIFFERS
            or (
                _ratio(link.latency_s, self.latency_s) > DIFFERS
                and abs(link.latency_s - self.latency_s) > DIFFERS_S
            )
        )


def _ratio(one: float, other: float) -> float:
    return max(one, other) / min(one, other)
