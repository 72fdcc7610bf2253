"""Run a command on every device of an emulated cluster, with one console, and take all down afterwards."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import tomlkit

from manyhands.emulation.devices import LATENCY_S, Emulation, check, emulated, require
from manyhands.emulation.names import own_prefix
from manyhands.emulation.others import Others, note
from manyhands.errors import RequestError, RunError
from manyhands.ir.cluster import Cluster, cores_here
from manyhands.ir.report import EmulatedRun, Outcome
from manyhands.loading import load_cluster
from manyhands.profiling.device import core_flops_per_s

CLUSTER, AS = "MANYHANDS_CLUSTER", "MANYHANDS_AS"  # where a command finds the cluster, and which device it is
PLAIN = " `manyhands emulate --plain` runs the command for plain local processes, without limits."
GRACE_S = 10.0  # for the others to end, after one has ended badly

Tell = Callable[[str, str], None]  # a device and a line that it printed
Happened = queue.Queue[tuple[str | None, float]]  # a device has ended, or (None) nobody listens; and when


def run(cluster: Path, command: Sequence[str], dilation: float | None, tell: Tell) -> EmulatedRun:
    """The command on every device at once."""
    read = load_cluster(cluster, None)
    check(read)
    require(PLAIN)
    _refuse_missing(command)
    tell("", f"how fast {cores_here()} busy cores of this machine are, for about 12 s ...")
    core = core_flops_per_s()
    with _folder() as folder, emulated(read, core, dilation) as emulation:
        path = Path(folder, "cluster.toml")
        path.write_text(cluster_text(emulation.cluster))
        tell("", describe(emulation))
        others = Others()
        ended = _run_all(emulation, command, path, tell)
        taken = others.cores()
        if text := note(taken):
            tell("", text)
        outcomes = tuple(_outcome(emulation, name, *ended[name]) for name in emulation.cluster.names)
        rate, held_back_s = emulation.cluster.bytes_per_s, emulation.held_back_s
        killed = emulation.killed()
        return EmulatedRun(emulation.dilation, core, rate, held_back_s, outcomes, taken, killed)


def _outcome(emulation: Emulation, name: str, code: int, seconds: float, stopped: bool) -> Outcome:
    group, sent_bytes = emulation.groups[name], emulation.wires.sent_bytes(name)
    part, limit = emulation.cores[name], group.memory_bytes
    return Outcome(name, code, seconds, part, sent_bytes, group.peak_bytes, limit, stopped)


def describe(emulation: Emulation) -> str:
    """What is emulated and what is not, in a line."""
    parts = ", ".join(f"{name} {part:.0%} of a core" for name, part in emulation.cores.items())
    rate = 8 * emulation.cluster.bytes_per_s / 1e6
    text = (
        f"emulated, {emulation.dilation:.3g} times as fast as asked for, where all times that are told would "
    )
    text += f"be {emulation.dilation:.3g} times as long: {parts}; {rate:.3g} Mbit/s"
    if emulation.held_back_s:
        text += f"; manyhands' messages are held back {1e3 * emulation.held_back_s:.2g} ms, for this kernel "
        text += "cannot delay packets: other programs' are not"
    if 0 < emulation.cluster.latency_s < LATENCY_S:
        text += (
            f"; a message takes {1e3 * LATENCY_S:g} ms, where so many times as fast as asked for would be "
        )
        text += f"{1e3 * emulation.cluster.latency_s:.2g} ms"
    return text


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Of the device that failed first, as others fail or are stopped for want of it; as a shell says it."""
    failed = [outcome for outcome in outcomes if outcome.exit_code]
    first = min(failed, key=lambda outcome: outcome.seconds, default=None)
    return 0 if first is None else as_shell(first.exit_code)


def as_shell(code: int) -> int:
    """An exit code; of who was killed by a signal, 128 and the signal's number."""
    return code if code >= 0 else 128 - code


def run_plain(cluster: Path, command: Sequence[str]) -> int:
    """The command once, for local processes as many as there are devices: nothing is emulated."""
    read = load_cluster(cluster, None)
    check(read)
    _refuse_missing(command)
    with _folder() as folder:
        path = Path(folder, "cluster.toml")
        path.write_text(cluster_text(read, plain=True))
        try:
            return as_shell(subprocess.call(command, env=os.environ | {CLUSTER: str(path)}))
        except OSError as error:
            raise RequestError(f"{command[0]} cannot be run: {error.strerror}.") from None


def _refuse_missing(command: Sequence[str]) -> None:
    name = command[0]
    if name.startswith("-"):
        raise RequestError(f"emulate has no option {name}: its own come before --, the command after it.")
    if shutil.which(name) is None:
        why = "cannot be executed" if os.path.exists(name) else "there is no such command"
        raise RequestError(f"{name}: {why}.")


def _folder() -> tempfile.TemporaryDirectory[str]:
    """For files of this run; its name tells whose it was, if nobody removes it."""
    return tempfile.TemporaryDirectory(prefix=own_prefix())


def cluster_text(cluster: Cluster, *, plain: bool = False) -> str:
    """A cluster file of these devices."""
    latency_s = cluster.latency_s if plain else max(cluster.latency_s, LATENCY_S)
    network: dict[str, str | int] = {
        "bandwidth": f"{round(8 * cluster.bytes_per_s / 1e3)}kbit",
        "latency": f"{1e6 * latency_s:.1f}us",
    }
    if cluster.port is not None:
        network["port"] = cluster.port
    devices = []
    for device in cluster.devices:
        table: dict[str, str | float] = {"name": device.name, "gflops": device.flops_per_s / 1e9}
        table["memory_bandwidth"] = f"{device.memory_bytes_per_s / 1e6:.3f}MB/s"
        table["launch"] = f"{1e6 * device.launch_s:.3f}us"
        if device.address is not None and not plain:
            table["address"] = device.address
        table["bare"] = f"{device.bare_bytes}B"
        if device.memory_bytes is not None:
            table["memory"] = f"{device.memory_bytes}B"
        devices.append(table)
    return tomlkit.dumps({"network": network, "device": devices})


def _run_all(
    emulation: Emulation, command: Sequence[str], cluster: Path, tell: Tell
) -> dict[str, tuple[int, float, bool]]:
    """By device its exit code, after how many seconds it ended, and whether we stopped it then."""
    happened, began, ended = Happened(), time.monotonic(), dict[str, float]()
    with _started(emulation, command, cluster, tell, happened) as processes:
        deadline: float | None = None
        while len(ended) < len(processes):
            try:
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                name, when = happened.get(timeout=left)
            except queue.Empty:
                break
            if name is None:
                raise RunError("whoever read what it prints has gone, so it stopped.")
            ended[name] = when - began
            if deadline is None and processes[name].returncode:
                deadline = when + GRACE_S
    last = time.monotonic() - began
    return {n: (p.returncode, ended.get(n, last), n not in ended) for n, p in processes.items()}


@contextmanager
def _started(
    emulation: Emulation, command: Sequence[str], cluster: Path, tell: Tell, happened: Happened
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The command on each device; what it prints is told line by line. Whatever still runs is ended."""
    processes: dict[str, subprocess.Popen[str]] = {}
    readers = []
    try:
        for name, before in emulation.within.items():
            environment = os.environ | {CLUSTER: str(cluster), AS: name, "OMP_NUM_THREADS": "1"}
            environment["TMPDIR"] = str(cluster.parent)  # who is killed leaves nothing behind
            processes[name] = subprocess.Popen(
                [*before, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",  # what a command prints need not be text
                env=environment,
            )
            threading.Thread(target=_await, args=(name, processes[name], happened), daemon=True).start()
            given = (name, processes[name].stdout, tell, happened)
            reader = threading.Thread(target=_read, args=given, daemon=True)
            readers.append(reader)
            reader.start()
        yield processes
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        for process in processes.values():
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in readers:
            reader.join(1.0)


def _await(device: str, process: subprocess.Popen[str], happened: Happened) -> None:
    process.wait()
    happened.put((device, time.monotonic()))


def _read(device: str, stream: IO[str], tell: Tell, happened: Happened) -> None:
    """To the end, also where nobody hears it any more: else whoever prints would wait for ever."""
    heard = True
    for line in stream:
        try:
            if heard:
                tell(device, line.rstrip())
        except (OSError, SystemExit):  # rich ends its thread when a pipe is closed
            heard = False
            happened.put((None, time.monotonic()))
