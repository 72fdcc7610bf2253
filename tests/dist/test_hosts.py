"""Devices of several machines find each other, agree, train as on one machine, and end together."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import allclose
from torch.distributed import HashStore

from manyhands import models
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.codec import encode
from manyhands.loading import load_cluster
from manyhands.requests import Request
from manyhands.runtime.hosts import interfaces, local_addresses
from manyhands.runtime.meeting import Card, difference
from manyhands.runtime.ranks import launch
from manyhands.runtime.watching import Failure, Watch
from manyhands.tasks import MeasureJob, VerifyJob
from tests.dist.machines import Machine, loopback_machines, namespace_machines, no_namespaces

NAMES = ("pi-0", "pi-1")
STEPS = 3
SOON_S = 10.0
Machines = tuple[Machine, Machine]


@pytest.fixture
def namespaces() -> Iterator[Machines]:
    if reason := no_namespaces():
        pytest.skip(reason)
    with namespace_machines() as machines:
        yield machines


@pytest.fixture
def machines() -> Iterator[Machines]:
    """As far apart as we may: two namespaces, or without root two starters on this machine."""
    with loopback_machines() if no_namespaces() else namespace_machines() as machines:
        yield machines


@pytest.fixture
def free_port() -> int:
    """Asked of the system, so that runs of this test side by side do not meet each other."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Run:
    """A small training run as a file that both machines have."""

    def __init__(self, folder: Path, machines: Machines, port: int | None) -> None:
        self.path, self.folder, self.machines = folder / "run.json", folder, machines
        devices = tuple(Device(n, m.address) for n, m in zip(NAMES, machines, strict=True))
        self.cluster = Cluster(devices, port=port)
        self.more: dict[str, Any] = {"join_timeout_s": 120, "timeout_s": 60}
        self.more_of: dict[str, dict[str, Any]] = {}
        self.task, self.job = "measure", self.endless()

    def request(self) -> Request:
        request = Request.read("demo", "1x28x28", 8, None, len(self.cluster.devices), "batch", None, None)
        return replace(request, cluster=self.cluster)

    def endless(self) -> Any:
        request = self.request()
        return encode(MeasureJob("demo", request.inputs, request.plan(), 100_000, 0))

    def write(self) -> Path:
        given = {"cluster": encode(self.cluster), "task": self.task, "job": self.job}
        self.path.write_text(json.dumps(given | {"more": self.more, "more_of": self.more_of}))
        return self.path


@pytest.fixture
def run(tmp_path: Path, machines: Machines, free_port: int) -> Run:
    return Run(tmp_path, machines, free_port)


def outcome(folder: Path) -> dict[str, Any]:
    return {f"{p.name}/{key}": t for p in folder.glob("*.safetensors") for key, t in load_file(p).items()}


def test_two_hosts_train_as_one_does_and_the_gradients_cross_the_cable(
    tmp_path: Path, namespaces: Machines
) -> None:
    """Without a port in the file. In float64, where a process may choose its memory format as it measures."""
    run = Run(tmp_path, namespaces, None)
    folders = {where: tmp_path / where for where in ("apart", "local")}
    jobs = {}
    for where, folder in folders.items():
        folder.mkdir()
        request = run.request()
        job = VerifyJob("demo", request.inputs, request.plan(), STEPS, 0, 0.1, str(folder))
        jobs[where] = [encode(job)]
    run.task, run.job = "verify", jobs["apart"]
    before = [machine.sent_bytes() for machine in namespaces]
    commands = [m.start(run.write(), name) for m, name in zip(namespaces, NAMES, strict=True)]
    assert [command.until("end")["error"] for command in commands] == [None, None]
    # Each device sends half of the gradients and half of the new weights, in float64.
    model = models.build("demo")
    step_bytes = 8 * sum(parameter.numel() for parameter in model.parameters())
    sent = [machine.sent_bytes() - start for machine, start in zip(namespaces, before, strict=True)]
    assert min(sent) > STEPS * step_bytes
    launch("verify", jobs["local"], NAMES)
    apart, local = (outcome(folder) for folder in folders.values())
    assert apart.keys() == local.keys() and len(apart) > 10
    assert all(allclose(apart[key], local[key], rtol=0, atol=1e-12) for key in apart)


@pytest.mark.parametrize("starts", [0, 1], ids=["the first is there", "the first is missing"])
def test_who_is_missing_is_said_until_the_deadline(run: Run, starts: int) -> None:
    run.more["join_timeout_s"] = 6
    absent = NAMES[1 - starts]
    command = run.machines[starts].start(run.write(), NAMES[starts])
    assert command.until("waiting")["missing"] == [absent]
    assert command.until("waiting")["missing"] == [absent]
    end = command.until("end")
    assert end["error"] == "RequestError"
    assert absent in end["message"] and "within 6 s" in end["message"] and f"--as {absent}" in end["message"]
    if starts == 1:
        assert f"at {run.machines[0].address}, port {run.cluster.port}" in end["message"]


def test_a_late_host_is_waited_for(run: Run) -> None:
    first = run.machines[0].start(run.write(), "pi-0")
    assert first.until("waiting")["missing"] == ["pi-1"]
    run.machines[1].start(run.path, "pi-1").until("step")
    first.until("step")


def test_a_host_that_gave_up_is_missing_again_and_may_come_back(run: Run) -> None:
    second = run.machines[1].start(run.write(), "pi-1")
    third = Device("pi-2", run.machines[1].address)
    run.cluster = replace(run.cluster, devices=(*run.cluster.devices, third))
    run.job = run.endless()
    first = run.machines[0].start(run.write(), "pi-0")
    while first.until("waiting")["missing"] != ["pi-2"]:
        pass
    second.process.kill()
    while first.until("waiting")["missing"] != ["pi-1", "pi-2"]:
        pass
    run.machines[1].start(run.path, "pi-1,pi-2").until("step")
    first.until("step")


DIFFERENT = {
    "version": ("0.2.0", "0.1.0", "pi-1 has manyhands 0.2.0, pi-0 has 0.1.0. "),
    "plan": ("77aa", "88bb", "pi-1 has plan 77aa, pi-0 has 88bb. "),
}


@pytest.mark.parametrize("fact", DIFFERENT)
def test_a_difference_is_refused_on_both_hosts_in_the_same_words(run: Run, fact: str) -> None:
    second, first, words = DIFFERENT[fact]
    run.more_of = {"pi-0": {"facts": {fact: first}}, "pi-1": {"facts": {fact: second}}}
    commands = [m.start(run.write(), name) for m, name in zip(run.machines, NAMES, strict=True)]
    ends = [command.until("end") for command in commands]
    assert ends[0] == ends[1]
    assert ends[0]["error"] == "RequestError" and ends[0]["message"].startswith(words)
    assert not any(event["event"] == "step" for command in commands for event in command.said)


def test_a_taken_port_is_named_with_the_way_out(tmp_path: Path) -> None:
    with loopback_machines() as machines, socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        end = machines[0].start(Run(tmp_path, machines, port).write(), "pi-0").until("end")
    assert end["error"] == "RequestError"
    assert re.match(rf"port {port} is taken on pi-0.*\[network\].*port = \d+", end["message"])


def test_of_a_device_started_twice_one_is_refused_and_the_other_runs(run: Run) -> None:
    first = run.machines[0].start(run.write(), "pi-0")
    first.until("waiting")
    twice = [run.machines[1].start(run.path, "pi-1") for _ in range(2)]
    ends = sorted((command.until("step", "end") for command in twice), key=lambda event: event["event"])
    assert [event["event"] for event in ends] == ["end", "step"]
    assert ends[0]["error"] == "RequestError" and "pi-1" in ends[0]["message"]
    first.until("step")


@pytest.mark.parametrize("address", ["10.99.0.1", "10.77.0.77", "no-such-machine.invalid"])
def test_an_unreachable_host_is_named_long_before_the_deadline(
    tmp_path: Path, namespaces: Machines, free_port: int, address: str
) -> None:
    """No route at all, nobody at the address in this network, and a name that is nobody's."""
    run = Run(tmp_path, namespaces, free_port)
    run.cluster = replace(run.cluster, devices=(Device("pi-0", address), run.cluster.devices[1]))
    start = time.monotonic()
    end = namespaces[1].start(run.write(), "pi-1").until("end")
    assert time.monotonic() - start < 30 < run.more["join_timeout_s"]
    assert end["error"] == "RequestError" and "pi-0" in end["message"] and address in end["message"]
    assert "\n" not in end["message"]
    if address.startswith("10."):
        assert f"port {free_port}" in end["message"]


def started(run: Run) -> tuple[list[Any], list[psutil.Process]]:
    """Both commands of a run that has begun, and its processes by device."""
    commands = [m.start(run.write(), name) for m, name in zip(run.machines, NAMES, strict=True)]
    for command in commands:
        command.until("step")
    return commands, [command.ranks()[0] for command in commands]


@pytest.mark.parametrize("dead", [0, 1], ids=["the first", "another"])
def test_a_killed_device_is_named_on_every_host_soon_and_nobody_is_left(run: Run, dead: int) -> None:
    commands, ranks = started(run)
    ranks[dead].kill()
    killed_at = time.monotonic()
    ends = [command.until("end", seconds=SOON_S) for command in commands]
    assert time.monotonic() - killed_at < SOON_S
    assert [end["error"] for end in ends] == ["DeviceLost", "DeviceLost"]
    assert all(end["message"].startswith(f"{NAMES[dead]}: ") for end in ends), ends
    assert "SIGKILL" in ends[dead]["message"]
    _, alive = psutil.wait_procs(ranks, timeout=SOON_S)
    assert not alive


@pytest.mark.parametrize("frozen", [0, 1], ids=["the first", "another"])
def test_a_frozen_device_is_named_on_the_other_host(tmp_path: Path, free_port: int, frozen: int) -> None:
    with loopback_machines() as machines:
        run = Run(tmp_path, machines, free_port)
        run.more["timeout_s"] = 4
        commands, ranks = started(run)
        ranks[frozen].send_signal(signal.SIGSTOP)
        end = commands[1 - frozen].until("end", seconds=4 + SOON_S)
        assert end["error"] == "DeviceLost" and end["message"].startswith(f"{NAMES[frozen]}: "), end


def test_a_killed_starter_is_a_lost_device_to_the_others(run: Run) -> None:
    commands, ranks = started(run)
    commands[1].process.kill()
    assert commands[0].until("end", seconds=SOON_S)["message"].startswith("pi-1: ")
    _, alive = psutil.wait_procs(ranks, timeout=SOON_S)
    assert not alive


# ---- without processes --------------------------------------------------------------------------------


@dataclass
class Watched:
    """Three devices in one process that watch each other; what each would end with."""

    store: HashStore = field(default_factory=HashStore)
    ends: dict[str, Failure] = field(default_factory=dict)

    def watches(self, timeout_s: float = 60.0) -> dict[str, Watch]:
        names = ("pi-0", "pi-1", "pi-2")
        cards = {name: Card(name, {}) for name in names}
        for card in cards.values():
            card.show(self.store)  # type: ignore[arg-type]
        return {
            name: Watch(self.store, card, names, timeout_s, partial(self.ends.__setitem__, name))  # type: ignore[arg-type]
            for name, card in cards.items()
        }


def lost(device: str, by: str) -> Failure:
    return {"kind": "lost", "device": device, "message": "the connection broke", "by": by}


def test_the_first_death_is_everybodys_reason_and_not_those_that_follow_from_it() -> None:
    """pi-1 dies, pi-0 sees it; pi-2 sees pi-0 leave, or sees nothing at all and waits."""
    watched = Watched()
    watches = watched.watches()
    cause = lost("pi-1", "pi-0")
    assert watches["pi-0"].settle(cause) == cause
    assert watches["pi-2"].settle(lost("pi-0", "pi-2")) == cause
    watches["pi-1"].thread.join(SOON_S)
    assert watched.ends == dict.fromkeys(watches, cause)


def test_nobody_is_done_before_all_are() -> None:
    watches = Watched().watches()
    waiting = [threading.Thread(target=watches[name].finish) for name in ("pi-0", "pi-2")]
    for thread in waiting:
        thread.start()
    waiting[1].join(2.0)
    assert all(thread.is_alive() for thread in waiting)
    watches["pi-1"].finish()
    for thread in waiting:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in waiting)


def test_who_shows_no_life_is_the_cause_and_not_who_waited_for_it() -> None:
    """pi-2 freezes, pi-1 waits for it, pi-0 waits for pi-1 and is the first to lose patience."""
    watches = Watched().watches(timeout_s=4)
    watches["pi-2"].over.set()
    time.sleep(3.5)
    assert watches["pi-0"].settle(lost("pi-1", "pi-0"))["device"] == "pi-2"


def cluster(*addresses: str | None, port: int | None = None) -> Cluster:
    return Cluster(tuple(Device(f"pi-{i}", address) for i, address in enumerate(addresses)), port=port)


def test_the_port_follows_from_names_and_addresses_alone() -> None:
    made = cluster("10.0.0.1", "10.0.0.2")
    measured = replace(
        made, bytes_per_s=1.0, devices=tuple(replace(d, flops_per_s=1e9) for d in made.devices)
    )
    assert made.meeting_port == measured.meeting_port
    ports = {cluster("10.0.0.1", f"10.0.0.{i}").meeting_port for i in range(2, 102)}
    assert len(ports) > 90 and min(ports) >= 20_000 and max(ports) < 60_000
    renamed = replace(made, devices=(replace(made.devices[0], name="other"), made.devices[1]))
    assert renamed.meeting_port != made.meeting_port
    assert replace(made, port=1234).meeting_port == 1234


def test_a_cluster_file_may_say_the_port(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[[device]]\nname = "pi-0"\n[network]\nport = 4321\n')
    assert load_cluster(path, None).meeting_port == 4321
    path.write_text('[[device]]\nname = "pi-0"\n[network]\nport = 70000\n')
    with pytest.raises(RequestError, match=r"network.port.*65535"):
        load_cluster(path, None)


def outward() -> tuple[str, str]:
    """An address of this machine that is not loopback, and its interface."""
    found = [(a, i) for a, i in local_addresses().items() if i != "lo" and ":" not in a]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


def test_the_interface_is_that_of_the_route() -> None:
    address, interface = outward()
    assert interfaces(cluster(address, address), NAMES, ("pi-0",)) == {"pi-0": interface}
    inward = cluster("127.0.0.1", "127.0.0.1")
    assert interfaces(inward, NAMES, NAMES) == {"pi-0": "lo", "pi-1": "lo"}


def test_another_machines_device_cannot_be_started_here() -> None:
    address, _ = outward()
    with pytest.raises(RequestError, match=rf"^pi-1 is at 192\.0\.2\.7 .*this machine is at .*{address}"):
        interfaces(cluster(address, "192.0.2.7"), NAMES, ("pi-1",))


@pytest.mark.parametrize(
    ("made", "here", "words"),
    [
        (cluster("127.0.0.1", None), "pi-0", "pi-1 has no address"),
        (cluster("127.0.0.1", "192.0.2.7"), "pi-0", "pi-0 is at 127.0.0.1, which every machine takes"),
        (cluster("127.0.0.1", "127.0.0.1"), "pi-9", "'pi-9' has no part in this run"),
    ],
    ids=["no address", "loopback among others", "unknown name"],
)
def test_addresses_nobody_can_reach_are_refused(made: Cluster, here: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        interfaces(made, NAMES, (here,))


def test_the_first_fact_that_differs_is_named_with_every_device_that_differs() -> None:
    def card(**facts: str) -> dict[str, Any]:
        return {"facts": facts}

    same = card(version="1", model="a", plan="p")
    cards = {"pi-0": same, "pi-1": same, "pi-2": same}
    assert difference("pi-0", cards) == ""
    told = difference(
        "pi-0", cards | {"pi-1": card(version="1", model="b", plan="q"), "pi-2": card(plan="p")}
    )
    assert told.startswith("pi-2 has manyhands none, pi-0 has 1.")
    both = {name: card(version="1", model=name, plan="p") for name in ("pi-1", "pi-2")}
    told = difference("pi-0", cards | both)
    assert told.startswith("pi-1 has model pi-1, pi-2 has model pi-2, pi-0 has a.")


def test_the_namespaces_of_a_test_that_fails_are_gone() -> None:
    if reason := no_namespaces():
        pytest.skip(reason)
    with pytest.raises(ValueError, match="on purpose"), namespace_machines() as machines:
        name = machines[0].inside[-1]
        assert Path("/run/netns", name).exists()
        raise ValueError("on purpose")
    assert not Path("/run/netns", name).exists()
