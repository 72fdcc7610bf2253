"""What the kernel keeps of an emulated device: the rate of its wire, its part of a core, its memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.emulation import cgroups, devices, network
from tests.dist.test_emulation import FAST, PAIR, needs_root, start

RECEIVER = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    total, first = len(peer.recv(1 << 16)), time.perf_counter()
    came = 0
    while part := peer.recv(1 << 16):
        came += len(part)
    print(came / (time.perf_counter() - first))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""
WORK = """
import time
start, busy = time.perf_counter(), time.process_time()
while time.perf_counter() - start < 2:
    sum(range(1000))
print((time.process_time() - busy) / (time.perf_counter() - start))
"""


HEARS = """
import socket, struct, sys, time
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    for _ in range(10):
        message = peer.recv(int(sys.argv[1]), socket.MSG_WAITALL)
        print(time.monotonic() - struct.unpack_from("d", message)[0])
"""
SAYS = """
import socket, struct, sys, time
with socket.create_connection((sys.argv[1], 5000)) as peer:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    for _ in range(10):
        time.sleep(0.1)
        peer.sendall(struct.pack("d", time.monotonic()).ljust(int(sys.argv[2])))
"""


@needs_root
@pytest.mark.parametrize(
    ("bytes_per_s", "out", "into"),
    [(2.5e6, 1, 10), (12.5e6, 1, 10), (12.5e6, 10, 1), (2.5e6, 10, 1), (300e6, 1, 1)],
)
def test_a_wire_passes_its_rate_and_no_more(bytes_per_s: float, out: int, into: int) -> None:
    """Like iperf, over two seconds and more, from one end and into the other, where that is the thinner one.

    Headers take 3 to 5 % of the rate, the bucket gives a little.
    """
    with network.wired({"a": out * bytes_per_s, "b": into * bytes_per_s}) as wires:
        receiver = start(wires.before("b"), sys.executable, "-c", RECEIVER)
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        size = str(int(2.5 * bytes_per_s))
        start(wires.before("a"), sys.executable, "-c", SENDER, network.address(1), size).wait()
        rate = float(receiver.communicate()[0])
        assert wires.sent_bytes("a") > 2.5 * bytes_per_s
    assert 0.85 < rate / bytes_per_s < 1.03


@needs_root
def test_where_the_kernel_delays_packets_rate_and_order_come_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for a thin wire is sorted then, too. The delay has a stand-in here."""
    from pyroute2 import IPRoute

    def delay(route: IPRoute, index: int, latency_s: float) -> bool:
        bucket, top = 1_000_000, network.TC_H_ROOT
        sizes = {"rate": 10**9, "burst": bucket, "limit": bucket, "mtu": 0}
        route.tc("replace", "tbf", index, network.DELAY, parent=top, **sizes)
        return latency_s == 0.01

    monkeypatch.setattr(network, "_delay", delay)
    with network.wired({"a": 12.5e6}, latency_s=0.01) as wires:
        assert wires.delayed
        with IPRoute(netns=wires.namespace("a")) as own:
            (eth,) = own.link_lookup(ifname=network.PLUG)
            queues = {each["handle"]: each for each in own.get_qdiscs(index=eth)}
    chain = [(queues[handle]["parent"], queues[handle].get_attr("TCA_KIND")) for handle in sorted(queues)]
    assert chain == [
        (network.DELAY + 1, "tbf"),
        (network.TOKENS + 1, chain[1][1]),
        (network.TC_H_ROOT, "tbf"),
    ]
    assert chain[1][1] in ("fq_codel", "pfifo_fast")


@needs_root
@pytest.mark.parametrize("cores", [0.06, 0.3])
def test_a_group_has_its_part_of_a_core_and_no_more(cores: float) -> None:
    with cgroups.limited("part", cores=cores) as group:
        output, _ = start(group.before, sys.executable, "-c", WORK).communicate()
    assert 0.75 * cores < float(output) < 1.1 * cores


@needs_root
@pytest.mark.parametrize(("cores", "period_us"), [(0.9, 5_000), (0.2, 5_000), (0.1, 10_000), (0.05, 20_000)])
def test_periods_are_short(cores: float, period_us: int) -> None:
    """A device stands still for the rest of its period: a long one would add its length to every message."""
    with cgroups.limited("part", cores=cores) as group:
        (folder,) = group.folders
        file = "cpu.cfs_period_us" if (folder / "cpu.cfs_period_us").exists() else "cpu.max"
        assert int((folder / file).read_text().split()[-1]) == period_us


def test_limits_of_groups_of_version_2(tmp_path: Path) -> None:
    """What is written into its files, where this machine may have version 1."""
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    assert cgroups.why_not(tmp_path, ("memory", "cpu")) is None or os.geteuid() != 0
    assert cgroups._place(tmp_path, "cpu") == cgroups._place(tmp_path, "memory") == tmp_path
    cgroups._limit(tmp_path, "cpu", 0.3)
    cgroups._limit(tmp_path, "memory", 9e8)
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    del written["cgroup.subtree_control"]
    assert written == {"cpu.max": "1500 5000", "memory.max": "900000000", "memory.swap.max": "0"}
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "memory.peak").write_text("123456\n")
    group = cgroups.Group((tmp_path,), 900_000_000)
    assert (group.kills, group.peak_bytes) == (2, 123456)
    (tmp_path / "cgroup.subtree_control").unlink()
    assert cgroups._place(tmp_path, "cpu") is None


READ_ONLY = """
mount -o remount,ro,bind "$1" && shift && exec "$@"
"""
ASKING = """
from manyhands.emulation import cgroups, devices
from manyhands.errors import RequestError
print(devices.why_not())
try:
    with cgroups.limited("x", memory_bytes=100_000_000):
        pass
except RequestError as error:
    print(error)
"""


@needs_root
def test_control_groups_that_are_read_only_are_told_in_a_line() -> None:
    """As in most containers."""
    place = cgroups._place(cgroups.ROOT, "memory")
    words = ("unshare", "-m", "sh", "-c", READ_ONLY, "sh", str(place), sys.executable, "-c", ASKING)
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    assert told[0] == f"control groups in {place} cannot be made: it is read-only, as in most containers"
    assert told[1].endswith("cannot limit memory: Read-only file system.")


def test_whatever_is_handed_over_together_fits_into_the_bucket_with_the_headers_of_its_frames() -> None:
    """Linux takes 320 bytes off what it is told, for its own headers."""
    for rate in map(float, range(1_000_000, 80_000_000, 50_000)):
        passes, content = max(9_000, rate / 1000), network.largest_packet(rate) - 320
        framed = content + 66 * -(-content // 1448)
        assert 0.9 * min(passes, 65_536) < framed <= passes


@needs_root
@pytest.mark.parametrize(("bytes_per_s", "out"), [(30.15e6, 1), (41.5e6, 1), (12.5e6, 10)])
def test_a_wire_does_not_take_packets_apart(bytes_per_s: float, out: int) -> None:
    """What is handed over together comes so: one by one frames cost several times as much of the cores."""
    with network.wired({"a": out * bytes_per_s, "b": bytes_per_s}) as wires:
        receiver = start(wires.before("b"), sys.executable, "-c", RECEIVER)
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        size = str(int(bytes_per_s))
        start(wires.before("a"), sys.executable, "-c", SENDER, network.address(1), size).wait()
        receiver.wait()
        words = [*wires.before("b"), "cat", "/proc/net/dev"]
        lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    counts = next(line for line in lines if network.PLUG in line).partition(":")[2].split()
    received_bytes, packets = int(counts[0]), int(counts[1])
    assert received_bytes / packets > 0.4 * network.largest_packet(bytes_per_s)


@needs_root
@pytest.mark.parametrize("bytes_per_s", [2e6, 5e6, 35e6])
def test_a_message_after_a_pause_takes_as_long_as_on_the_wire(bytes_per_s: float) -> None:
    """Of 50 kB, like the border of a tile. Little passes at once, or messages after computing would be faster
    than the wire is. Each takes at least so long; that none takes much longer, one of ten shows.
    """
    size, passes = 50_000, max(9_000, bytes_per_s / 1000)
    with network.wired({"a": bytes_per_s, "b": bytes_per_s}) as wires:
        hears = start(wires.before("b"), sys.executable, "-c", HEARS, str(size))
        assert hears.stdout is not None and hears.stdout.readline() == "ready\n"
        start(wires.before("a"), sys.executable, "-c", SAYS, network.address(1), str(size)).wait()
        taken = [float(word) for word in hears.communicate()[0].split()]
    assert len(taken) == 10 and min(taken) > 0.95 * (size - passes) / bytes_per_s
    assert min(taken) < 1.1 * size / bytes_per_s + 0.005


@needs_root
def test_who_needs_more_memory_than_there_is_is_killed_and_named() -> None:
    small = replace(PAIR, devices=tuple(replace(d, memory_bytes=60_000_000) for d in PAIR.devices))
    with devices.emulated(small, FAST) as emulation:
        enough = start(emulation.within["a"], sys.executable, "-c", "x = bytearray(20_000_000)")
        assert enough.wait() == 0 and emulation.killed() is None
        assert (emulation.groups["a"].peak_bytes or 0) > 20_000_000
        too_much = start(emulation.within["b"], sys.executable, "-c", "x = bytearray(b'1') * 90_000_000")
        assert too_much.wait() == -signal.SIGKILL
        assert emulation.killed() == "b needed more than 60 MB"
