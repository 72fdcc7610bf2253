"""Devices as network namespaces at one switch, each with a cable of a limited rate. Linux, as root.

The switch is a namespace too: of the machine's own network nothing is touched.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from manyhands.emulation.names import FAMILY, is_leftover, own_prefix
from manyhands.emulation.stopping import unstopped
from manyhands.errors import RequestError, RunError

NAMESPACES = Path("/run/netns")
PLUG = "eth0"  # the network device of every emulated device
BUCKET_S = 0.001  # of a rate that may pass at once: timers of a busy machine come late by as much
LEAST_BUCKET = 9_000  # bytes: some frames, which the kernel hands over together
LARGEST_PACKET = 65_536  # bytes that the kernel hands over together, if nobody says otherwise
FRAMED = 1.05  # what is handed over together is so many times as long with the headers of its frames
TRIES = 20  # to make a namespace
COPY_ENDED = (RuntimeError, struct.error)  # what pyroute2 raises when a process of its own is no more
DELAY, TOKENS, ORDER = 0x30000, 0x10000, 0x20000  # queues, from the first to the last
TC_H_ROOT = 0xFFFFFFFF  # where the first is put
QUEUE_S = 0.4  # after which a packet that waits for its turn is dropped


def why_not() -> str | None:
    """Why there are no namespaces to be had here; None where there are."""
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        return "network namespaces are only to be had on Linux"
    if os.geteuid() != 0:
        return "network namespaces need root (sudo)"
    if not _capable("CapEff", 12, 21):  # of network administration, and of system administration
        return "network namespaces need root with all its rights, which a container may not have"
    return None


def _capable(kind: str, *bits: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    held = int(next(line.split()[1] for line in lines if line.startswith(f"{kind}:")), 16)
    return all(held >> bit & 1 for bit in bits)


def address(number: int) -> str:
    """Of the device of that number, in its emulated network."""
    return f"10.78.{number // 200}.{number % 200 + 1}"


@contextmanager
def wired(bytes_per_s: Mapping[str, float], latency_s: float = 0.0) -> Iterator[Network]:
    """A namespace for each device, sending and receiving at its rate. They go in the end."""
    if reason := why_not():
        raise RequestError(f"{reason}.")
    network = Network(tuple(bytes_per_s), own_prefix())
    try:
        with unstopped(), _made():
            network.make(bytes_per_s, latency_s)
        yield network
    finally:
        with unstopped():
            network.remove()


@contextmanager
def _made() -> Iterator[None]:
    """What the kernel refuses is told in a line."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except (OSError, *COPY_ENDED, NetlinkError) as error:
        raise RequestError(
            f"this kernel does not make the emulated network (namespaces, veth, bridge, tbf): {error}."
        ) from None


class Network:
    """The namespaces of a run."""

    def __init__(self, devices: tuple[str, ...], prefix: str) -> None:
        self.devices, self.prefix = devices, prefix
        self.switch = f"{prefix}switch"
        self.delayed = False  # does the kernel delay packets as asked?

    def namespace(self, device: str) -> str:
        return f"{self.prefix}at-{device}"

    def before(self, device: str) -> tuple[str, ...]:
        """What to put before a command so that it runs at a device."""
        return ("nsenter", f"--net={NAMESPACES / self.namespace(device)}")

    def make(self, bytes_per_s: Mapping[str, float], latency_s: float) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        for name in (self.switch, *map(self.namespace, self.devices)):
            _create(name)
        with IPRoute(netns=self.switch) as switch:
            switch.link("add", ifname="bridge", kind="bridge")
            (bridge,) = switch.link_lookup(ifname="bridge")
            switch.link("set", index=bridge, state="up")
            for number, device in enumerate(self.devices):
                port, inside = f"port{number}", self.namespace(device)
                plug = {"ifname": PLUG, "net_ns_fd": inside}
                switch.link("add", ifname=port, kind="veth", peer=plug)
                (index,) = switch.link_lookup(ifname=port)
                switch.link("set", index=index, master=bridge, state="up")
                _shape(switch, index, bytes_per_s[device])
                with IPRoute(netns=inside) as own:
                    (lo,) = own.link_lookup(ifname="lo")
                    own.link("set", index=lo, state="up")
                    (eth,) = own.link_lookup(ifname=PLUG)
                    own.addr("add", index=eth, address=address(number), prefixlen=16)
                    own.link("set", index=eth, state="up")
                    self.delayed = _shape(own, eth, bytes_per_s[device], latency_s)
                    most = largest_packet(min(bytes_per_s.values()))
                    with suppress(NetlinkError):  # of an old kernel: then the queue takes packets apart
                        own.link("set", index=eth, gso_max_size=most)

    def sent_bytes(self, device: str) -> int:
        """What has left a device through its cable."""
        words = [*self.before(device), "cat", "/proc/net/dev"]
        lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
        own = next(line for line in lines if line.strip().startswith(f"{PLUG}:"))
        return int(own.partition(":")[2].split()[8])

    def remove(self) -> None:
        for name in (self.switch, *map(self.namespace, self.devices)):
            _remove(name)


def _shape(route: Any, index: int, bytes_per_s: float, latency_s: float = 0.0) -> bool:
    """A rate; who waits for it is sorted as on a Linux machine. Packets are delayed before that, so that they
    are sorted when they wait, if the kernel knows how to: does it?
    """
    bucket = _bucket(bytes_per_s)
    limit = bucket + int(QUEUE_S * bytes_per_s)
    delayed = latency_s > 0 and _delay(route, index, latency_s)
    above = DELAY + 1 if delayed else TC_H_ROOT
    tokens = {"rate": int(bytes_per_s), "burst": bucket, "limit": limit, "mtu": 0}
    route.tc("add", "tbf", index, TOKENS, parent=above, **tokens)
    for kind in ("fq_codel", "pfifo_fast"):  # what Linux machines have by default, the one or the other
        if _added(route, kind, index, ORDER, TOKENS + 1):
            break
    return delayed


def _bucket(bytes_per_s: float) -> int:
    """Bytes that pass at once after a pause."""
    return max(int(BUCKET_S * bytes_per_s), LEAST_BUCKET)


def largest_packet(bytes_per_s: float) -> int:
    """Bytes that are handed over together over a wire. If they did not fit into the bucket, the queue would
    take them apart into frames, which costs several times as much of the processor.
    """
    return min(int(_bucket(bytes_per_s) / FRAMED), LARGEST_PACKET)


def _delay(route: Any, index: int, latency_s: float) -> bool:
    """Packets leave later by as much, where the kernel knows how to."""
    return _added(route, "netem", index, DELAY, TC_H_ROOT, delay=round(1e6 * latency_s), limit=100_000)


def _added(route: Any, kind: str, index: int, handle: int, above: int, **options: int) -> bool:
    """Put a queue into another, if the kernel has that kind."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        route.tc("replace", kind, index, handle, parent=above, **options)
        return True
    except NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
            raise
        return False


def _create(name: str) -> None:
    """A process of pyroute2's makes it, and is given up too early where the machine is busy: then again."""
    from pyroute2 import netns

    for _ in range(TRIES):
        with suppress(FileExistsError, TimeoutError, *COPY_ENDED):  # begun, and not made whole
            netns.create(name)
        if os.path.ismount(NAMESPACES / name):
            return
        _remove(name)
    raise RunError(f"no network namespace could be made in {TRIES} tries. Is the machine very busy?")


def _remove(name: str) -> None:
    from pyroute2 import netns

    with suppress(OSError):
        netns.remove(name)


def remove_leftovers() -> int:
    """Namespaces of processes that are no more; how many there were."""
    found = [path.name for path in NAMESPACES.glob(f"{FAMILY}*") if is_leftover(path.name)]
    for name in found:
        _remove(name)
    return len(found)
