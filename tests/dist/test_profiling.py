"""`manyhands profile` on real processes: the rate it finds is the rate there is, and it lands in the file."""

import json
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.loading import load_cluster
from tests.dist.machines import CABLE, Machine, namespace_machines, no_namespaces

LIMIT_MBIT = 60
LIMIT = LIMIT_MBIT * 1e6 / 8 * 1448 / 1514  # bytes of a message; the rest of each packet is headers
LOCAL = '[[device]]\nname = "one"  # first\n[[device]]\nname = "two"\nmemory = "300MB"\n'


def start(*words: str, inside: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*inside, sys.executable, "-m", "manyhands.cli", "profile", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def limit_rate(inside: tuple[str, ...], interface: str) -> None:
    """From here on, what leaves by this interface leaves at the limit, all of it in one queue.

    The bucket holds what 17 ms bring: with less, a virtual machine whose timers come late gives a lower rate.
    """
    words = f"tc qdisc add dev {interface} root tbf rate {LIMIT_MBIT}mbit burst 128kb latency 400ms"
    ended = subprocess.run([*inside, *words.split()], capture_output=True, text=True)
    if ended.returncode != 0:
        pytest.skip(f"no rate limits here, so rates are not tested: {ended.stderr.strip()}")


@pytest.fixture
def island() -> Iterator[tuple[str, ...]]:
    """A namespace with nothing but its own loopback, on which all messages share one queue."""
    if reason := no_namespaces():
        pytest.skip(reason)
    name = f"manyhands-{uuid.uuid4().hex[:6]}"
    inside = ("ip", "netns", "exec", name)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for words in ("mtu 1500", "up"):
            subprocess.run([*inside, "ip", "link", "set", "lo", *words.split()], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    if reason := no_namespaces():
        pytest.skip(reason)
    with namespace_machines() as machines:
        yield machines


def test_two_processes_are_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "local.toml"
    path.write_text(LOCAL)
    shown = outcome(start("--cluster", str(path), "--threads", "1"))
    assert "one" in shown and "GFLOP/s" in shown and f"Written into {path}" in shown
    cluster, read = load_cluster(path, None), tomllib.loads(path.read_text())
    assert "# first" in path.read_text() and cluster.devices[1].memory_bytes == 300_000_000
    for table in read["device"]:
        assert table["gflops"] > 0 and "memory_bandwidth" in table and "launch" in table and "memory" in table
    assert {"bandwidth", "latency"} <= set(read["network"]) and "link" not in read


def test_a_throttled_device_ends_it_with_the_reason() -> None:
    """A Pi that is too hot, seen where the system shows it: the folder is laid over with another one."""
    zone = "/sys/class/thermal/thermal_zone0"
    lines = [
        "mount -t tmpfs none /sys/class/thermal",
        f"mkdir {zone}",
        f"cd {zone}",
        "echo 84500 > temp; echo cpu-thermal > type",
        "echo passive > trip_point_0_type; echo 80000 > trip_point_0_temp",
    ]
    shell = ("unshare", "--mount", "sh", "-ec", "\n".join([*lines, 'exec "$@"']), "sh")
    if subprocess.run([*shell, "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to lay another folder over the system's, so heat is tested without the command")
    process = start("--threads", "1", inside=shell)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1 and not out
    last = err.splitlines()[-1]
    assert "throttled: cpu-thermal is at 84 °C" in last and "Cool it and measure again." in last


def test_one_queue_for_all_is_a_shared_medium_of_that_rate(island: tuple[str, ...]) -> None:
    limit_rate(island, "lo")
    facts = json.loads(outcome(start("--devices", "2", "--threads", "1", "--json", inside=island)))
    for link in facts["links"]:
        assert link["bytes_per_s"] == pytest.approx(LIMIT, rel=0.15)
    assert facts["together"]["shared"]
    assert facts["together"]["bytes_per_s"] == pytest.approx(LIMIT, rel=0.15)


def test_two_machines_behind_a_switch_are_measured(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Each machine's way out is limited by itself. The first device writes the file; both tell the same."""
    for machine in machines:
        limit_rate(machine.inside, CABLE)
    texts = [f'[[device]]\nname = "pi-{i}"\naddress = "{m.address}"\n' for i, m in enumerate(machines)]
    files = [tmp_path / f"{i}.toml" for i in range(2)]
    started = []
    for index, (file, machine) in enumerate(zip(files, machines, strict=True)):
        file.write_text("".join(texts))
        words = ("--cluster", str(file), "--as", f"pi-{index}", "--threads", "1", "--json")
        started.append(start(*words, inside=machine.inside))
    told: list[dict[str, Any]] = [json.loads(outcome(process)) for process in started]
    assert told[0] | {"written": None} == told[1] and told[0]["written"] == str(files[0])
    cluster = load_cluster(files[0], None)
    assert cluster.bytes_per_s == pytest.approx(LIMIT, rel=0.15)
    assert cluster.shared_bytes_per_s is None and not cluster.links
    assert told[0]["together"]["bytes_per_s"] == pytest.approx(2 * LIMIT, rel=0.2)
    assert files[1].read_text() == "".join(texts)
