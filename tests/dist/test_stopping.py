"""Being told to end while devices are made or taken down: nothing is left, and nobody's handlers are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.emulation import devices, network
from manyhands.emulation.names import FAMILY
from manyhands.emulation.stopping import WAITING, unstopped
from tests.dist.test_emulation import FAST, PAIR, left_over, needs_root

MAKES = """
import signal, sys
from manyhands.emulation import network
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: sys.exit(number))
print("begun", flush=True)
with network.wired({f"d{i}": 1e6 for i in range(60)}):
    print("whole", flush=True)
"""


@needs_root
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_who_is_ended_while_it_makes_namespaces(how: signal.Signals) -> None:
    """The signal goes to it and to the copies of it that make them, as from a terminal."""
    words = (sys.executable, "-c", MAKES)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    end = time.monotonic() + 30
    while not any(map(os.path.ismount, network.NAMESPACES.glob(f"{FAMILY}{process.pid}-*"))):
        assert time.monotonic() < end
    os.killpg(process.pid, how)
    assert process.communicate(timeout=60)[0] == "" and process.returncode == how
    assert not left_over(process.pid)


@needs_root
def test_who_is_told_to_end_while_it_takes_devices_down_ends_when_all_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: network.Network) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(self)

    remove = network.Network.remove
    monkeypatch.setattr(network.Network, "remove", interrupted)
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt), devices.emulated(PAIR, FAST):
            assert left_over(os.getpid())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)
    assert not left_over(os.getpid())


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """What arrives of signals to end; SIGHUP is ignored, as `nohup` has it. All as before afterwards."""
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in WAITING}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: arrived.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield arrived
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_wait_and_what_is_ignored_hides_nothing(handlers: list[int]) -> None:
    ours = {number: signal.getsignal(number) for number in WAITING}
    with unstopped():
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        with unstopped():
            signal.raise_signal(signal.SIGINT)
        assert not handlers
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # so it is in copies
    assert handlers == [signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in WAITING} == ours


def test_handlers_are_put_back_whatever_a_signal_does(
    handlers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {number: signal.getsignal(number) for number in WAITING}

    def put_back(number: int, handler: Any) -> None:
        install(number, handler)
        if handler is ours[signal.SIGTERM]:
            raise KeyboardInterrupt  # from the terminal at the worst moment

    install = signal.signal
    monkeypatch.setattr(signal, "signal", put_back)
    with pytest.raises(KeyboardInterrupt), unstopped():
        assert signal.getsignal(signal.SIGTERM) is not ours[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in WAITING} == ours


def test_copies_that_are_made_meanwhile_end_at_once() -> None:
    with unstopped():
        copy = os.fork()
        if not copy:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 128 + signal.SIGTERM
