"""Which addresses are this machine's own, and through which interface it reaches the other devices."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

import psutil

from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, Device

ANY_PORT = 9  # a datagram socket that is only connected sends nothing, so any will do


def interfaces(cluster: Cluster, devices: tuple[str, ...], here: tuple[str, ...]) -> dict[str, str]:
    """The network interface each device of this machine uses, found by the route to the devices elsewhere.

    Raises RequestError where a device has no address or one that is not this machine's, and where another's
    address has no machine or no route.
    """
    run = [cluster.device(name) for name in devices]
    _check(run, here)
    elsewhere = [device for device in run if device.name not in here]
    local = local_addresses()
    for name in here:
        _check_own(cluster.device(name), local)
    for peer in elsewhere:
        _check_way_out(peer, run)
    routes = [interface_to(peer, cluster.meeting_port, local) for peer in elsewhere]
    return {name: _choose(cluster.device(name), routes, local) for name in here}


def local_addresses() -> dict[str, str]:
    """Interface by address, for every address of this machine."""
    return {
        address.address.partition("%")[0]: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def interface_to(peer: Device, port: int, local: Mapping[str, str]) -> str:
    """The interface by which packets to this device leave. Nothing is sent to find out."""
    family, sockaddr = resolve(peer)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((sockaddr[0], ANY_PORT, *sockaddr[2:]))
        except OSError as error:
            raise unreachable(peer, port, error) from None
        source = str(probe.getsockname()[0]).partition("%")[0]
    return _interface(source, local)


def resolve(device: Device) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Address family and socket address of a device's address, which may be a name."""
    try:
        found = socket.getaddrinfo(device.address, ANY_PORT, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        raise RequestError(
            f"{device.name}: no machine is found under {device.address!r} ({reason(error)}). "
            "Write its IP address in the cluster file."
        ) from None
    family, _, _, _, sockaddr = found[0]
    return family, sockaddr


def unreachable(device: Device, port: int, error: OSError) -> RequestError:
    """What to say when there is no way to a device."""
    return RequestError(
        f"{device.name} at {device.address}, port {port}, cannot be reached: {reason(error)}. Is it "
        "switched on and in the same network, and is its address in the cluster file right?"
    )


def reason(error: Exception) -> str:
    """What the system says, as part of a sentence: `connection refused`."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return text[:1].lower() + text[1:]


def _check(run: list[Device], here: tuple[str, ...]) -> None:
    names = [device.name for device in run]
    if strangers := [name for name in here if name not in names]:
        raise RequestError(f"{strangers[0]!r} has no part in this run. Its devices are {', '.join(names)}.")
    if homeless := [device.name for device in run if not device.address]:
        raise RequestError(
            f"{homeless[0]} has no address in the cluster file, so no other machine can find it. "
            'Add address = "..." under its name.'
        )
    inward = [device for device in run if is_loopback(device.address)]
    if inward and len(inward) < len(run):
        raise RequestError(
            f"{inward[0].name} is at {inward[0].address}, which every machine takes for itself. "
            "Write the address under which the others reach it."
        )


def is_loopback(address: str | None) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address or "").is_loopback
    except ValueError:
        return False


def _check_own(device: Device, local: Mapping[str, str]) -> None:
    """A machine's own name often stands for loopback in its hosts file: that is its own address, too."""
    address = str(resolve(device)[1][0])
    if address not in local and not is_loopback(address):
        outward = [own for own in local if not is_loopback(own)]
        raise RequestError(
            f"{device.name} is at {device.address} in the cluster file, but this machine is at "
            f"{', '.join(outward) or 'no address'}. Start it on its own machine, or correct the address."
        )


def _check_way_out(peer: Device, run: list[Device]) -> None:
    """Loopback leads to another device only where the file says that all are on one machine."""
    if is_loopback(str(resolve(peer)[1][0])) and not all(is_loopback(device.address) for device in run):
        raise RequestError(
            f"{peer.name}: {peer.address} stands for this machine itself here. "
            "Write the IP address of its own machine in the cluster file."
        )


def _choose(own: Device, routes: list[str], local: Mapping[str, str]) -> str:
    """One interface for all: that of this device's own address if packets leave there, else the first."""
    home = _interface(str(resolve(own)[1][0]), local)
    return home if home in routes or not routes else routes[0]


def _interface(address: str, local: Mapping[str, str]) -> str:
    """All of 127.x.x.x is this machine's, though only 127.0.0.1 is listed."""
    return local.get(address) or local.get("127.0.0.1", "lo")
