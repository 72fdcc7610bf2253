"""A cluster made real on one machine: every device a namespace with a thin wire and a control group."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands.emulation import cgroups, network
from manyhands.emulation.names import FAMILY, is_leftover
from manyhands.emulation.stopping import unstopped
from manyhands.errors import RequestError
from manyhands.ir.cluster import DELAY, Cluster, cores_here

LATENCY_S = 100e-6  # of a message between two namespaces, by itself
NO_GPU = "CUDA_VISIBLE_DEVICES="  # small devices are emulated by their processors alone
LEAST_BYTES_PER_S = 1e3  # over a wire: what tbf can count
MOST_BYTES_PER_S = 3e9  # about what a core carries, and less than tbf can count
SPARE = 0.9  # of the cores: the machine has other things to do, too


@dataclass(frozen=True)
class Emulation:
    """Devices that are up: the cluster as it is now, and how to start something on each of them."""

    cluster: Cluster  # with addresses, and as fast as it is emulated
    dilation: float  # times as fast as it was asked for, computing and sending alike
    cores: dict[str, float]  # of this machine, for each device
    wires: network.Network
    groups: dict[str, cgroups.Group]
    held_back_s: float  # latency that our own messages are given, where the kernel cannot delay packets

    @property
    def within(self) -> dict[str, tuple[str, ...]]:
        """By device, what to put before a command so that it runs there, and ends with its starter."""
        return {
            name: (
                "setpriv",
                "--pdeathsig",
                "KILL",
                *self.wires.before(name),
                *self.groups[name].before,
                *("env", NO_GPU, *((f"{DELAY}={self.held_back_s:.6f}",) if self.held_back_s else ())),
            )
            for name in self.cluster.names
        }

    def killed(self) -> str | None:
        """Which device the kernel killed for want of memory, in words."""
        for name, group in self.groups.items():
            if group.kills and group.memory_bytes is not None:
                return f"{name} needed more than {group.memory_bytes / 1e6:.0f} MB"
        return None


def why_not() -> str | None:
    """What is missing to emulate devices here; None where nothing is."""
    missing = [command for command in ("nsenter", "setpriv") if shutil.which(command) is None]
    lacking = f"the command {missing[0]} is missing (it comes with util-linux)" if missing else None
    return network.why_not() or cgroups.why_not(kinds=("memory", "cpu")) or lacking


def require(otherwise: str = "") -> None:
    """Raises RequestError where devices cannot be emulated; else what a killed run left is removed."""
    if reason := why_not():
        raise RequestError(f"devices cannot be emulated here: {reason}.{otherwise}")
    remove_leftovers()


def remove_leftovers() -> int:
    """What a run left behind that was killed; how many namespaces and groups there were."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FAMILY}*"):
        if is_leftover(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    return cgroups.remove_leftovers() + network.remove_leftovers()


def dilation_for(cluster: Cluster, core_flops_per_s: float, cores: int) -> float:
    """The largest that this machine can emulate: a device has a core at most, all of them what there are, and
    no wire is faster than one can be.
    """
    speeds = [device.flops_per_s for device in cluster.devices]
    computing = core_flops_per_s * min(SPARE / max(speeds), SPARE * cores / sum(speeds))
    return min(computing, MOST_BYTES_PER_S / cluster.bytes_per_s)


@contextmanager
def emulated(cluster: Cluster, core_flops_per_s: float, dilation: float | None = None) -> Iterator[Emulation]:
    """The devices, up; they go in the end. Without a dilation, as fast as this machine can."""
    require()
    factor, cores = parts(cluster, core_flops_per_s, dilation)
    fast = _faster(cluster, factor)
    stack = ExitStack()
    try:
        with unstopped():
            rates = {device.name: fast.bytes_per_s for device in fast.devices}
            late_s = max(fast.latency_s - LATENCY_S, 0.0)
            wires = stack.enter_context(network.wired(rates, late_s))
            groups = {
                device.name: stack.enter_context(
                    cgroups.limited(device.name, memory_bytes=device.memory_bytes, cores=cores[device.name])
                )
                for device in fast.devices
            }
        yield Emulation(fast, factor, cores, wires, groups, 0.0 if wires.delayed else late_s)
    finally:
        with unstopped():
            stack.close()


def check(cluster: Cluster) -> None:
    """Raises RequestError for what cannot be emulated whatever the machine."""
    if cluster.links or cluster.shared_bytes_per_s is not None:
        raise RequestError("emulated devices are at one switch: leave out [[link]] and `shared`.")


def parts(
    cluster: Cluster, core_flops_per_s: float, dilation: float | None
) -> tuple[float, dict[str, float]]:
    """How many times as fast as asked for, and how much of a core each device gets. Raises RequestError."""
    check(cluster)
    most = dilation_for(cluster, core_flops_per_s, cores_here())
    factor = most if dilation is None else dilation
    cores = {d.name: factor * d.flops_per_s / core_flops_per_s for d in cluster.devices}
    slowest = min(cores, key=lambda name: cores[name])
    if factor > 1.001 * most:
        raise RequestError(f"--dilate {factor:g}: this machine is fast enough for {most:.3g} at most.")
    if cores[slowest] < cgroups.LEAST_CORES:
        least = factor * cgroups.LEAST_CORES / cores[slowest]
        if least <= most:
            out = f"use --dilate {least:.2g} or more"
        elif most * cluster.bytes_per_s >= MOST_BYTES_PER_S:
            out = (
                f"ask for a slower network, as no wire here is faster than {8e-9 * MOST_BYTES_PER_S:g} Gbit/s"
            )
        else:
            out = "take fewer devices, or such as differ less"
        raise RequestError(
            f"{slowest} would be {cores[slowest]:.1%} of a core of this machine, "
            f"which the kernel cannot keep: {out}."
        )
    if factor * cluster.bytes_per_s < LEAST_BYTES_PER_S:
        raise RequestError(
            f"a network of {8e-3 * factor * cluster.bytes_per_s:.2g} kbit/s is too slow to emulate: ask for "
            f"{8e-3 * LEAST_BYTES_PER_S / factor:.2g} kbit/s at least."
        )
    return factor, cores


def _faster(cluster: Cluster, factor: float) -> Cluster:
    """Devices and links faster alike, at the addresses of the emulated network."""
    devices = tuple(
        replace(
            device,
            address=network.address(number),
            flops_per_s=factor * device.flops_per_s,
            memory_bytes_per_s=factor * device.memory_bytes_per_s,
            launch_s=device.launch_s / factor,
        )
        for number, device in enumerate(cluster.devices)
    )
    latency_s = cluster.latency_s / factor
    return replace(
        cluster, devices=devices, bytes_per_s=factor * cluster.bytes_per_s, latency_s=latency_s, cores=None
    )
