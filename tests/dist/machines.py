"""Two machines out of one: network namespaces with a cable between them, and commands started in each."""

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

START = Path(__file__).with_name("start_devices.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable"


@dataclass
class Command:
    """A starter on one of the machines, and what it has said so far."""

    process: subprocess.Popen[str]
    said: list[dict[str, Any]] = field(default_factory=list)
    lines: "queue.Queue[dict[str, Any] | None]" = field(default_factory=queue.Queue)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def until(self, *kinds: str, seconds: float = 120.0) -> dict[str, Any]:
        """The next event of these kinds. Fails when the command ends before, or it takes longer."""
        limit = time.monotonic() + seconds
        while True:
            try:
                event = self.lines.get(timeout=max(limit - time.monotonic(), 0))
            except queue.Empty:
                pytest.fail(f"no {kinds} within {seconds:g} s, only {self.said}")
            if event is None:
                pytest.fail(f"ended without {kinds}, after {self.said}")
            self.said.append(event)
            if event["event"] in kinds:
                return event

    def ranks(self) -> list[psutil.Process]:
        """The processes of its devices, in the order of their start."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [child for child in children if "manyhands.rank" in " ".join(child.cmdline())]
        return sorted(found, key=lambda child: child.create_time())


@dataclass
class Machine:
    address: str
    inside: tuple[str, ...] = ()  # the command that runs another one inside the machine
    commands: list[Command] = field(default_factory=list)

    def start(self, specification: Path, names: str) -> Command:
        words = [*self.inside, sys.executable, str(START), str(specification), names]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = Command(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment))
        self.commands.append(command)
        threading.Thread(target=command.read, daemon=True).start()
        return command

    def stop(self) -> None:
        for command in self.commands:
            with suppress(psutil.NoSuchProcess):
                for rank in command.ranks():
                    rank.kill()
            command.process.kill()
            command.process.wait()

    def sent_bytes(self) -> int:
        """What has left through the cable so far."""
        words = [*self.inside, "ip", "-json", "-statistics", "link", "show", "dev", CABLE]
        facts = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        return int(facts[0]["stats64"]["tx"]["bytes"])


@contextmanager
def loopback_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two starters on this machine: the same meeting, without the network. Needs no rights."""
    machines = Machine("127.0.0.1"), Machine("127.0.0.1")
    try:
        yield machines
    finally:
        for machine in machines:
            machine.stop()


@contextmanager
def namespace_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two network namespaces with a cable between them. They go whatever happens."""
    unique = f"manyhands-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    names = f"{unique}-a", f"{unique}-b"
    machines = tuple(
        Machine(address, ("ip", "netns", "exec", name))
        for name, address in zip(names, ADDRESSES, strict=True)
    )
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            _ip("-n", name, "link", "set", CABLE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield machines[0], machines[1]
    finally:
        for machine in machines:
            machine.stop()
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@cache
def no_namespaces() -> str:
    """Why network namespaces cannot be had here, or nothing. The reason is printed, once."""
    name, reason = f"manyhands-{uuid.uuid4().hex[:6]}", ""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        reason = "network namespaces need root and the command `ip`, so two hosts are not tested"
    else:
        try:
            _ip("netns", "add", name)
            _ip("netns", "delete", name)
        except subprocess.CalledProcessError as error:
            reason = f"network namespaces are not allowed here ({error.stderr.strip()}): two hosts not tested"
    if reason:
        warnings.warn(reason, stacklevel=2)  # printed even where skips are only counted
    return reason


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
