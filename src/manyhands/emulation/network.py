"""Devices as network namespaces at one switch, each with a cable of a limited rate. Linux, as root.

The switch is a namespace too: of the machine's own network nothing is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from manyhands.emulation.names import is_leftover, own_prefix
from manyhands.errors import RequestError

NAMESPACES = Path("/run/netns")
PLUG = "eth0"  # the network device of every emulated device
BUCKET_S = 0.02  # of a rate that may pass at once: timers of a virtual machine come late by as much
LEAST_BUCKET = 64_000  # bytes: the kernel hands over packets of up to 64 kB
QUEUE_S = 0.4  # after which a packet that waits for its turn is dropped


def why_not() -> str | None:
    """Why there are no namespaces to be had here; None where there are."""
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        return "network namespaces are a thing of Linux"
    return None if os.geteuid() == 0 else "network namespaces need root"


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
        network.make(bytes_per_s, latency_s)
        yield network
    finally:
        network.remove()


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
        from pyroute2 import IPRoute, netns

        for name in (self.switch, *map(self.namespace, self.devices)):
            netns.create(name)
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
                    _shape(own, eth, bytes_per_s[device])
                    if latency_s:
                        self.delayed = _delay(own, eth, latency_s)

    def sent_bytes(self, device: str) -> int:
        """What has left a device through its cable."""
        from pyroute2 import IPRoute

        with IPRoute(netns=self.namespace(device)) as own:
            (eth,) = own.link_lookup(ifname=PLUG)
            (facts,) = own.link("get", index=eth)
            return int(facts.get_attr("IFLA_STATS64")["tx_bytes"])

    def remove(self) -> None:
        for name in (self.switch, *map(self.namespace, self.devices)):
            _remove(name)


def _shape(route: Any, index: int, bytes_per_s: float) -> None:
    """A rate; connections take turns at it where the kernel knows how to, as they do on a Linux machine."""
    bucket = max(int(BUCKET_S * bytes_per_s), LEAST_BUCKET)
    limit = bucket + int(QUEUE_S * bytes_per_s)
    route.tc("add", "tbf", index, 0x10000, rate=int(bytes_per_s), burst=bucket, limit=limit, mtu=0)
    _child(route, "fq_codel", index)


def _delay(route: Any, index: int, latency_s: float) -> bool:
    """Packets leave later by as much, where the kernel knows how to."""
    return _child(route, "netem", index, delay=round(1e6 * latency_s), limit=100_000)


def _child(route: Any, kind: str, index: int, **options: int) -> bool:
    """Put another queue behind the rate, if the kernel has that kind."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        route.tc("replace", kind, index, 0x20000, parent=0x10001, **options)
        return True
    except NetlinkError:
        return False


def _remove(name: str) -> None:
    from pyroute2 import netns

    with suppress(OSError):
        netns.remove(name)


def remove_leftovers() -> int:
    """Namespaces of processes that are no more; how many there were."""
    found = [path.name for path in NAMESPACES.glob("manyhands-*") if is_leftover(path.name)]
    for name in found:
        _remove(name)
    return len(found)
