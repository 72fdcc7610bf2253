"""Links are measured as they are, and a shared medium is told from a switch."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
from torch import Tensor

from manyhands.ir.cluster import Link
from manyhands.ir.survey import Survey
from manyhands.profiling.links import (
    EVERY_PAIR_UP_TO,
    Circle,
    Pending,
    is_shared,
    measure_links,
    measure_together,
    pairs_to_measure,
)
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Transport

NAMES = ("a", "b", "c")
RATE = 20e6
Found = TypeVar("Found")


class Slow:
    """A transport whose messages take their time, one after another as far as they share a lock."""

    def __init__(self, inner: Transport, medium: threading.Lock, bytes_per_s: float) -> None:
        self.inner, self.medium, self.bytes_per_s = inner, medium, bytes_per_s

    def send(self, tensor: Tensor, target: str, tag: int) -> None:
        with self.medium:
            time.sleep(tensor.nbytes / self.bytes_per_s)
        self.inner.send(tensor, target, tag)

    def expect(self, buffer: Tensor, source: str, tag: int) -> Pending:
        return self.inner.expect(buffer, source, tag)

    def flush(self) -> None:
        self.inner.flush()


def devices_at(
    rates: dict[str, float], work: Callable[[Circle], Found], *, one_medium: bool
) -> dict[str, Found]:
    """What each device finds, sending at its rate, on a medium of its own or on one for all."""
    air = threading.Lock()

    def run(device: str, transport: Transport) -> Found:
        slow = Slow(transport, air if one_medium else threading.Lock(), rates[device])
        return work(Circle(device, tuple(rates), slow))

    return dict(run_in_process(tuple(rates), run))


@pytest.mark.parametrize("one_medium", [True, False], ids=["radio", "switch"])
def test_a_radio_is_told_from_a_switch(one_medium: bool) -> None:
    """Both give one pair alone the same rate; together, all on the radio have what one pair has."""
    links = tuple(Link(a, b, RATE, 1e-4) for a in NAMES for b in NAMES if a != b)
    work = partial(measure_together, links=links)
    found = devices_at(dict.fromkeys(NAMES, RATE), work, one_medium=one_medium)
    together = found["a"]
    assert found["b"] == found["c"] == together, "everybody learns the same"
    assert together.shared == one_medium
    # Threads of a busy machine are late, never early.
    assert RATE / 2 < together.bytes_per_s < 1.1 * RATE * (1 if one_medium else len(NAMES))


def test_one_device_has_no_links() -> None:
    assert devices_at({"a": RATE}, measure_links, one_medium=False) == {"a": ((), None)}


def test_each_way_of_a_link_has_its_own_rate() -> None:
    found = devices_at({"a": 8 * RATE, "b": 2 * RATE}, measure_links, one_medium=False)
    assert found["a"] == found["b"], "everybody learns the same"
    (there, back), together = found["a"]
    assert (there.source, there.target, back.source, back.target) == ("a", "b", "b", "a")
    assert 3 * RATE < there.bytes_per_s < 8.8 * RATE
    assert RATE < back.bytes_per_s < 2.2 * RATE
    assert together is not None


@pytest.mark.parametrize("num_devices", [1, 2, 8, 9, 40])
def test_of_many_devices_a_ring_and_some_pairs_are_measured(num_devices: int) -> None:
    devices = tuple(f"d{i}" for i in range(num_devices))
    pairs = pairs_to_measure(devices)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    every = num_devices * (num_devices - 1) // 2
    assert len(pairs) == every if num_devices <= 8 else num_devices <= len(pairs) <= 2 * num_devices
    for one, other in zip(devices, devices[1:] + devices[:1], strict=True):
        assert num_devices == 1 or frozenset((one, other)) in {frozenset(pair) for pair in pairs}


def test_links_of_many_devices_are_measured_round_the_ring() -> None:
    """As fast as threads are: here it counts that nobody waits for a message that is never sent."""
    names = tuple(f"d{i}" for i in range(EVERY_PAIR_UP_TO + 1))
    found = run_in_process(names, lambda name, transport: measure_links(Circle(name, names, transport)))
    links, together = found[names[0]]
    assert len(links) == 2 * len(pairs_to_measure(names)) and together is not None
    assert all(other == found[names[0]] for other in found.values())


def every_pair(rates: dict[str, float]) -> dict[tuple[str, str], float]:
    return {(a, b): min(rates[a], rates[b]) for a in rates for b in rates if a != b}


SIZE = 10_000_000
FOUR = every_pair(dict.fromkeys("abcd", 10e6))
ONE_SLOW = every_pair({"a": 10e6, "b": 10e6, "c": 10e6, "d": 1e6})


@pytest.mark.parametrize(
    ("rates", "seconds", "shared"),
    [
        (every_pair({"a": 10e6, "b": 10e6}), 1.0, False),  # full duplex
        (every_pair({"a": 10e6, "b": 10e6}), 2.0, True),  # one after the other
        (FOUR, 3.0, False),  # each sends three messages, all at the same time
        (FOUR, 3.6, False),
        (FOUR, 12.0, True),
        (FOUR, 10.5, True),
        (ONE_SLOW, 30.0, False),  # d's three messages take that long by themselves
        (ONE_SLOW, 66.0, True),
    ],
)
def test_pairs_that_wait_for_one_another_share_a_medium(
    rates: dict[tuple[str, str], float], seconds: float, shared: bool
) -> None:
    assert is_shared(rates, SIZE, seconds) == shared


def test_links_that_differ_are_those_by_more_than_a_fifth() -> None:
    usual = [Link("a", "b", 10e6, 1e-3), Link("b", "a", 10e6, 1e-3), Link("a", "c", 11.5e6, 1.1e-3)]
    slow, late = Link("c", "a", 8e6, 1e-3), Link("b", "c", 10e6, 2e-3)
    assert Survey((), (*usual, slow, late)).differing == (slow, late)
    near = [Link(a, b, 1e9, 50e-6) for a, b in ("ab", "ba", "ac")]
    assert Survey((), (*near, Link("c", "a", 1e9, 90e-6))).differing == (), "40 us are noise"
