"""Start the processes of a run on this machine, listen to them, and end them all when one ends badly.

Devices of one machine meet at a file and talk over loopback. Devices of several machines are started by one
command on each of them, and meet at a store of the first device (`meeting.py`).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from manyhands.errors import DeviceLost, RequestError, RunError
from manyhands.ir.cluster import Cluster
from manyhands.runtime.hosts import interfaces
from manyhands.runtime.meeting import JOIN_TIMEOUT_S, Meeting, connect, meet
from manyhands.runtime.watching import Failure, Watch

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Event = dict[str, Any]
TIMEOUT_S = 120.0
GRACE_S = 3.0  # for the others to notice a death and say what they saw


@dataclass
class Rank:
    """One process of a run."""

    device: str
    process: subprocess.Popen[str]
    errors: Path
    failure: Event | None = None
    events: list[Event] = field(default_factory=list)


def launch(
    task: str,
    job: Any,
    devices: tuple[str, ...],
    on_event: Callable[[str, Event], None] = lambda device, event: None,
    *,
    threads: int = 1,
    timeout_s: float = TIMEOUT_S,
    here: tuple[str, ...] | None = None,
    cluster: Cluster | None = None,
    facts: dict[str, str] | None = None,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    within: Mapping[str, Sequence[str]] | None = None,
    interface: str = "lo",
) -> dict[str, list[Event]]:
    """Run a task on one process a device and return what each said. Raises when any of them fails.

    With `here`, only those devices are started on this machine; the others are started on theirs, by the same
    call with their names. The run begins when all are there, and is refused everywhere if one brings other
    `facts` than the first. While it waits, every process says {"event": "waiting", "missing": [...]}.

    `within` has, by device, what to put before the command of its process, such as what limits its memory or
    puts it into a network of its own; `interface` is then where such processes reach each other.

    A process watches its standard input: when the starter is gone, however it went, so is the process.
    """
    common = {"task": task, "job": job, "devices": devices, "threads": threads, "timeout_s": timeout_s}
    chosen = dict.fromkeys(devices, interface)
    if here is not None:
        if cluster is None:
            raise ValueError("devices of several machines need the cluster with their addresses")
        chosen = interfaces(cluster, devices, here)
        common["meeting"] = asdict(_meeting(cluster, devices, facts or {}, join_timeout_s))
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        spoken: queue.Queue[tuple[Rank, Event | None]] = queue.Queue()
        ranks = []
        try:
            for device, own in chosen.items():
                spec = common | {"rank": devices.index(device), "store": f"{folder}/store"}
                before = (within or {}).get(device, ())
                errors = Path(folder) / f"{device}.err"
                ranks.append(_start(device, spec, own, errors, spoken, before))
            _listen(ranks, spoken, on_event)
        finally:
            _end(ranks)
        return {rank.device: rank.events for rank in ranks}


def _meeting(
    cluster: Cluster, devices: tuple[str, ...], facts: dict[str, str], join_timeout_s: float
) -> Meeting:
    """Where these devices meet. The versions are facts of every run; the caller may say them otherwise."""
    torch_version = ".".join(metadata.version("torch").split(".")[:2])
    versions = {"version": metadata.version("manyhands"), "torch": torch_version}
    addresses = tuple(cluster.device(name).address or "" for name in devices)
    return Meeting(devices, addresses, cluster.meeting_port, versions | facts, join_timeout_s)


def _start(
    device: str,
    spec: dict[str, Any],
    interface: str,
    errors: Path,
    spoken: queue.Queue[Any],
    before: Sequence[str],
) -> Rank:
    environment = os.environ | {"OMP_NUM_THREADS": str(spec["threads"]), "GLOO_SOCKET_IFNAME": interface}
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "manyhands.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=environment,
        )
    rank = Rank(device, process, errors)
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):  # it died at once: the reader tells
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
    threading.Thread(target=_read, args=(rank, process.stdout, spoken), daemon=True).start()
    return rank


def _read(rank: Rank, stream: IO[str], spoken: queue.Queue[tuple[Rank, Event | None]]) -> None:
    """Pass on what a rank says; what a user's own code prints is not for us."""
    for line in stream:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                spoken.put((rank, event))
    rank.process.wait()
    spoken.put((rank, None))


def _listen(
    ranks: list[Rank],
    spoken: queue.Queue[tuple[Rank, Event | None]],
    on_event: Callable[[str, Event], None],
) -> None:
    """Pass on what the ranks say until all have ended; on the first bad end, find out whose fault it was."""
    running = {rank.device for rank in ranks}
    deadline: float | None = None
    while running:
        try:
            rank, event = spoken.get(
                timeout=None if deadline is None else max(deadline - time.monotonic(), 0)
            )
        except queue.Empty:
            break
        if event is None:
            running.discard(rank.device)
            if rank.process.returncode and deadline is None:
                deadline = time.monotonic() + GRACE_S
        elif event.get("event") == "failed":
            rank.failure = event
        else:
            rank.events.append(event)
            on_event(rank.device, event)
    failed = [rank for rank in ranks if rank.process.poll() or rank.failure]
    if failed:
        raise _verdict(failed)


def _verdict(failed: list[Rank]) -> Exception:
    """One line that names the device at fault: killed comes before failed, failed before lost another."""
    for rank in failed:
        code = rank.process.returncode
        if code is not None and code < 0 and rank.failure is None:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else f": {_last_line(rank.errors)}"
            return DeviceLost(rank.device, f"its process was ended by {name}{hint}")
    for rank in failed:
        if rank.failure is None and rank.process.returncode is not None:
            return DeviceLost(rank.device, f"exit code {rank.process.returncode}: {_last_line(rank.errors)}")
    for rank in failed:
        if rank.failure and rank.failure["kind"] == "request":
            return RequestError(rank.failure["message"])
        if rank.failure and rank.failure["kind"] == "error":
            return RunError(f"{rank.failure['device']} failed: {rank.failure['message']}")
    # Who gave up waiting closes its connections, so the others only see it go: what it says comes first.
    told = [rank.failure for rank in failed if rank.failure is not None]
    first = next((failure for failure in told if failure["message"].startswith("no answer")), told[0])
    return DeviceLost(first["device"], f"{first['message']} (said by {first['by']})")


def _last_line(path: Path) -> str:
    lines = path.read_text().strip().splitlines()
    return lines[-1] if lines else "no message"


def _end(ranks: list[Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        if rank.process.stdin is not None:
            with suppress(OSError):
                rank.process.stdin.close()


# ---- the other side: inside a rank --------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a rank finds itself, and its watch over devices on other machines, if there are any."""

    rank: int
    devices: tuple[str, ...]
    timeout_s: float
    watch: Watch | None = None

    @property
    def device(self) -> str:
        return self.devices[self.rank]


def say(event: str, **facts: Any) -> None:
    """Tell the starter something: one JSON line."""
    print(json.dumps({"event": event} | facts), flush=True)


def die_with_starter() -> None:
    """End this process as soon as the starter's end of standard input closes."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def join(spec: dict[str, Any], end: Callable[[Failure], NoReturn]) -> Place:
    """Meet the other ranks. `end` says what failed and ends this process, when a watch sees others fail."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(spec["threads"])
    place = Place(spec["rank"], tuple(spec["devices"]), spec["timeout_s"])
    size, timeout = len(place.devices), timedelta(seconds=place.timeout_s)
    if "meeting" not in spec:
        method = f"file://{spec['store']}"
        dist.init_process_group("gloo", method, rank=place.rank, world_size=size, timeout=timeout)
        return place
    store, watch = _join_hosts(spec["meeting"], place, end)
    store.set_timeout(timeout)
    try:
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        text = f"the devices met but could not connect: {reason}. Is there a firewall between them?"
        end(watch.settle({"kind": "error", "device": place.device, "message": text, "by": place.device}))
    return replace(place, watch=watch)


def _join_hosts(
    given: dict[str, Any], place: Place, end: Callable[[Failure], NoReturn]
) -> tuple[TCPStore, Watch]:
    """The store where all devices met, and a watch that has begun."""
    meeting = Meeting(**given | {key: tuple(given[key]) for key in ("devices", "addresses")})
    frozen = {"kind": "lost", "device": meeting.first, "message": "it answered once and never again"}
    # A call to the store of a frozen process never comes back, so the deadline needs a clock of its own.
    limit = threading.Timer(meeting.join_timeout_s + GRACE_S, end, [frozen | {"by": place.device}])
    limit.daemon = True
    limit.start()
    store, card = meet(meeting, place.device, say)
    watch = Watch(connect(meeting, place.timeout_s), card, place.devices, place.timeout_s, end)
    limit.cancel()
    return store, watch
