"""Latency and rate of the links between devices: each pair alone, one at a time, then all at once.

All devices run `measure_links` together. Of a pair, the first leads: it holds the clock, the other answers.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.ir.cluster import Link
from manyhands.ir.survey import Together

EVERY_PAIR_UP_TO = 8  # devices; of more, a ring and some other pairs are measured
TRIPS, WARM_TRIPS = 20, 3
SIZES = tuple(2**power for power in (14, 16, 18, 20, 22, 23))  # bytes of a message: 16 kB to 8 MB
LONG_S = 0.15  # a message that takes so long says the rate; larger ones are not tried
ROUNDS = 3
WAY_S = 0.9  # for one way of a pair: on a very slow link there are fewer rounds
BUSY_S = 0.3  # of sending by each device while all are busy
NOTE, TRIP, ORDER, DATA = range(1, 5)  # tags


class Pending(Protocol):
    def wait(self) -> None: ...


class Transport(Protocol):
    """Messages by tag between named devices; those of one tag arrive in the order they were sent."""

    def send(self, tensor: Tensor, target: str, tag: int) -> None: ...

    def expect(self, buffer: Tensor, source: str, tag: int) -> Pending: ...

    def flush(self) -> None: ...


@dataclass(frozen=True)
class Circle:
    """The devices as one of them sees them: notes to and from the first, and waiting for all."""

    device: str
    devices: tuple[str, ...]
    transport: Transport

    @property
    def is_first(self) -> bool:
        return self.device == self.devices[0]

    def gather(self, note: Any) -> list[Any]:
        """The first gets everybody's note, in the order of the devices; the others nothing."""
        if not self.is_first:
            self._write(note, self.devices[0])
            return []
        return [note, *(self._read(device) for device in self.devices[1:])]

    def share(self, note: Any) -> Any:
        """Everybody gets the first one's note."""
        if not self.is_first:
            return self._read(self.devices[0])
        for device in self.devices[1:]:
            self._write(note, device)
        return note

    def meet(self) -> None:
        """Go on when all are here."""
        self.gather(None)
        self.share(None)

    def _write(self, note: Any, target: str) -> None:
        text = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
        self.transport.send(torch.tensor([len(text)]), target, NOTE)
        self.transport.send(text, target, NOTE)
        self.transport.flush()

    def _read(self, source: str) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self.transport.expect(size, source, NOTE).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self.transport.expect(text, source, NOTE).wait()
        return json.loads(bytes(text.tolist()))


def pairs_to_measure(devices: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Every pair once; of more than a few devices, a ring and half as many others, always the same."""
    every = [(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    if len(devices) <= EVERY_PAIR_UP_TO:
        return tuple(every)
    ring = [*zip(devices, devices[1:], strict=False), (devices[0], devices[-1])]
    others = [pair for pair in every if pair not in ring]
    return tuple(ring + random.Random(0).sample(others, len(devices) // 2))


def measure_links(
    circle: Circle, tell: Callable[[str], None] = lambda what: None
) -> tuple[tuple[Link, ...], Together | None]:
    """Every measured link, each way, and what all together carry. Everybody gets the same.

    `tell` hears which pair it is the turn of.
    """
    pairs, found = pairs_to_measure(circle.devices), []
    for lead, other in pairs:
        circle.meet()
        tell(f"{lead} - {other}")
        if circle.device == lead:
            found += _lead(circle, other)
        elif circle.device == other:
            _follow(circle, lead)
    gathered = circle.gather([[k.source, k.target, k.bytes_per_s, k.latency_s] for k in found])
    notes = circle.share([note for notes in gathered for note in notes])
    links = tuple(Link(*note) for note in notes)
    return links, measure_together(circle, links) if links else None


# ---- one pair alone -----------------------------------------------------------------------------------


def _lead(circle: Circle, other: str) -> list[Link]:
    """The link to the other and back; the bytes tried grow until a message takes long enough."""
    transport, me = circle.transport, circle.device
    latency = _round_trip(transport, other) / 2
    links = []
    for source, target in ((me, other), (other, me)):
        outward, end = source == me, time.perf_counter() + WAY_S
        for size in SIZES:
            took = _transfer(transport, other, size, outward, latency)
            if took >= LONG_S:
                break
        # What else goes on makes it slower, and little makes it faster than it is: the best round counts.
        rounds = [took]
        while len(rounds) < ROUNDS and time.perf_counter() < end:
            rounds.append(_transfer(transport, other, size, outward, latency))
        links.append(Link(source, target, size / min(rounds), latency))
    transport.send(_order(0, True), other, ORDER)
    transport.flush()
    return links


def _order(num_bytes: int, outward: bool) -> Tensor:
    return torch.tensor([num_bytes, int(outward)])


def _small() -> Tensor:
    return torch.zeros(8, dtype=torch.uint8)


def _round_trip(transport: Transport, other: str) -> float:
    """The median seconds of a small message and its answer."""
    times, answer = [], _small()
    for _ in range(WARM_TRIPS + TRIPS):
        pending = transport.expect(answer, other, TRIP)
        start = time.perf_counter()
        transport.send(_small(), other, TRIP)
        pending.wait()
        times.append(time.perf_counter() - start)
    transport.flush()
    return median(times[WARM_TRIPS:])


def _transfer(transport: Transport, other: str, size: int, outward: bool, latency_s: float) -> float:
    """Seconds in which so many bytes go through, without the two ways of the clock's own messages."""
    buffer, answer = torch.zeros(size, dtype=torch.uint8), _small()
    ready = transport.expect(answer, other, TRIP)
    transport.send(_order(size, outward), other, ORDER)
    ready.wait()
    arriving = transport.expect(answer if outward else buffer, other, TRIP if outward else DATA)
    start = time.perf_counter()
    transport.send(buffer if outward else _small(), other, DATA if outward else TRIP)
    arriving.wait()
    elapsed = time.perf_counter() - start
    transport.flush()
    return max(elapsed - 2 * latency_s, elapsed / 10)  # a message as short as a trip says little


def _follow(circle: Circle, lead: str) -> None:
    """Answer the small messages, then take or give the bytes that are ordered, until none are."""
    transport, came = circle.transport, _small()
    pending = transport.expect(came, lead, TRIP)
    for trip in range(WARM_TRIPS + TRIPS):
        pending.wait()
        if trip + 1 < WARM_TRIPS + TRIPS:
            pending = transport.expect(came, lead, TRIP)
        transport.send(_small(), lead, TRIP)
    transport.flush()
    order = _order(0, True)
    while True:
        transport.expect(order, lead, ORDER).wait()
        size, outward = order.tolist()
        if not size:
            return
        buffer = torch.zeros(size, dtype=torch.uint8)
        arriving = transport.expect(buffer if outward else came, lead, DATA if outward else TRIP)
        transport.send(_small(), lead, TRIP)
        arriving.wait()
        transport.send(_small() if outward else buffer, lead, TRIP if outward else DATA)
        transport.flush()


# ---- all at once --------------------------------------------------------------------------------------


def measure_together(circle: Circle, links: tuple[Link, ...]) -> Together:
    """Everybody sends to everybody it was measured with, or of many devices to the next in the ring."""
    rates = {(link.source, link.target): link.bytes_per_s for link in links}
    if len(circle.devices) > EVERY_PAIR_UP_TO:
        ring = dict(zip(circle.devices, (*circle.devices[1:], circle.devices[0]), strict=True))
        rates = {pair: rate for pair, rate in rates.items() if ring[pair[0]] == pair[1]}
    busiest = max(sum(source == device for source, _ in rates) for device in circle.devices)
    size = int(min(max(min(rates.values()) * BUSY_S / busiest, SIZES[0]), SIZES[-1]))
    # Here too the best round counts.
    seconds = circle.share(min(_all_at_once(circle, tuple(rates), size) for _ in range(ROUNDS)))
    return Together(size * len(rates) / seconds, is_shared(rates, size, seconds))


def _all_at_once(circle: Circle, pairs: tuple[tuple[str, str], ...], size: int) -> float:
    """Seconds until everybody has everything, known to the first."""
    transport, position = circle.transport, circle.devices.index(circle.device)
    arriving = [
        transport.expect(torch.empty(size, dtype=torch.uint8), source, DATA)
        for source, target in pairs
        if target == circle.device
    ]
    # Everybody begins with the next one, so that they do not all call on the same device first.
    targets = [
        d for d in circle.devices[position:] + circle.devices[:position] if (circle.device, d) in pairs
    ]
    message = torch.zeros(size, dtype=torch.uint8)
    circle.meet()
    start = time.perf_counter()
    for target in targets:
        transport.send(message, target, DATA)
    for pending in arriving:
        pending.wait()
    transport.flush()
    circle.meet()  # so that who began first counts until the last has everything: nobody begins at once
    elapsed = time.perf_counter() - start
    return max(circle.gather(elapsed), default=0.0)


def is_shared(rates: dict[tuple[str, str], float], size: int, seconds: float) -> bool:
    """Did the pairs wait for one another? `seconds`: of messages of that size between all of them at once.

    Behind a switch only the messages of one device wait for each other; on one medium, such as a radio, all
    do. What was measured is held against both, and the nearer one is taken.
    """
    each = {pair: size / rate for pair, rate in rates.items()}
    ends = {end for pair in each for end in pair}
    switched = max(
        max(sum(s for (source, _), s in each.items() if source == end) for end in ends),
        max(sum(s for (_, target), s in each.items() if target == end) for end in ends),
    )
    return seconds > (switched * sum(each.values())) ** 0.5
