"""Run programs on paper: when each step would start and stop, on every device and on the links."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from manyhands.ir.choices import late_convolutions, unread_convolutions
from manyhands.ir.cluster import Cluster
from manyhands.ir.geometry import Tile, samples_at_a_time
from manyhands.ir.plan import Cost, Kept
from manyhands.ir.portions import portions
from manyhands.ir.program import (
    Backward,
    Finish,
    Forward,
    Message,
    Program,
    Receive,
    Redo,
    Rerun,
    Send,
    Slope,
    Step,
    postponed,
    sent_bytes,
)
from manyhands.ir.sizes import Sizes
from manyhands.planning.chunks import leaving
from manyhands.planning.costs import Costs
from manyhands.planning.lowering import Lowered
from manyhands.planning.memory import peak
from manyhands.planning.weights import owned_bytes

Interval = tuple[float, float]
Arrivals = dict[int, Interval]  # by tag
SGD_WITH_MOMENTUM = Kept()


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one device, from its start to its end."""

    device: str
    step: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a step is expected to cost, and when each of its steps begins and ends."""

    cost: Cost
    events: tuple[Event, ...]


class Deadlock(Exception):
    """Every unfinished device waits for something that never comes."""


def simulate(
    lowered: Lowered,
    cluster: Cluster,
    *,
    memory: bool = True,
    kept: Kept = SGD_WITH_MOMENTUM,
    costs: Costs | None = None,
) -> Timeline:
    """The timeline of one training step and the peak of each device.

    If `memory` is not asked for, nothing but seconds and traffic. `costs`: of that cluster, to be used again.

    A device computes and sends at once; its messages leave one by one, and come in no faster than one by one.
    Where devices share a medium, so do all messages. Where they share the cores of one machine, whatever
    computes or carries messages at a time gets an equal part of them, so the timeline is stretched by as much
    as cores are short.
    """
    costs, medium = costs or Costs(cluster), _Medium(cluster.shared_bytes_per_s)
    owned = owned_bytes(lowered.graph, lowered.holders, lowered.buckets)
    devices = [
        _Clock(
            program,
            _step_seconds(lowered, program, owned.get(program.device, 0), costs),
            costs,
            medium,
            lowered.plan.in_flight_bytes,
        )
        for program in lowered.programs
    ]
    arrivals = _run(devices, medium.shared, {})
    began = 0.0
    if any(device.late for device in devices):  # the second of two steps has to wait for what the first left
        began = max(device.now for device in devices)
        for device in devices:
            device.begin_again()
        _run(devices, medium.shared, arrivals)
    warp = _Warp([i for device in devices for i in (*device.busy, *device.carried)], cluster.cores)
    events = tuple(
        Event(device.name, index, warp(start) - warp(began), warp(stop) - warp(began))
        for device in devices
        for index, (start, stop) in enumerate(device.events if memory else ())
    )
    cost = Cost(
        seconds=warp(max(device.now for device in devices)) - warp(began),
        traffic_bytes=sum(sent_bytes(program) for program in lowered.programs),
        peak_bytes=tuple((name, foreseen_peak(lowered, name, costs, kept)) for name in lowered.plan.devices)
        if memory
        else (),
    )
    return Timeline(cost, events)


def _run(devices: list[_Clock], in_order: bool, before: Arrivals) -> Arrivals:
    """When each message comes in, and after the first step when those did that it left on their way.

    Let every device go on until it waits for a message that was not sent yet; who sends it wakes it.

    In order: the device that is furthest behind goes next, from one message to the next.
    """
    arrivals: Arrivals = {}
    waiting: dict[int, int] = {}  # tag -> position of the device
    ready = [(device.now, position) for position, device in enumerate(devices)]
    heapify(ready)
    while ready:
        _, position = heappop(ready)
        device = devices[position]
        launched = device.advance(arrivals, before, in_order)
        if device.position < len(device.steps):
            step = device.steps[device.position]
            tag = step.message.tag if isinstance(step, Receive) else None
            if tag is not None and tag not in arrivals and tag not in device.late:
                waiting[tag] = position
            else:
                heappush(ready, (device.now, position))
        for tag in launched:
            if tag in waiting:
                woken = waiting.pop(tag)
                heappush(ready, (max(devices[woken].now, arrivals[tag][1]), woken))
    if unfinished := [device for device in devices if device.position < len(device.steps)]:
        raise Deadlock("; ".join(f"{d.name} waits at {d.steps[d.position]}" for d in unfinished))
    return arrivals


class _Medium:
    """What all messages have to share, if they do: one after another, at its rate."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s, self.free_s = bytes_per_s, 0.0

    @property
    def shared(self) -> bool:
        return self.bytes_per_s is not None

    def begin(self, ready_s: float, num_bytes: int) -> tuple[float, float]:
        """When a message can begin to leave, and the seconds that the medium needs for it."""
        if self.bytes_per_s is None:
            return ready_s, 0.0
        begin, seconds = max(ready_s, self.free_s), num_bytes / self.bytes_per_s
        self.free_s = begin + seconds
        return begin, seconds


class _Port:
    """Where messages come in at a device that has a link of its own, all together no faster than its rate.

    For each moment at which a message began to come: when all that began since would be through.
    """

    def __init__(self) -> None:
        self.num, self.began, self.through = 0, np.empty(64), np.empty(64)

    def take(self, began: float, seconds: float) -> float:
        """When this message, which takes so long at the port's rate, and all taken before it are through."""
        if self.num == len(self.began):
            self.began, self.through = (np.resize(a, 2 * self.num) for a in (self.began, self.through))
        num = self.num
        place = int(self.began[:num].searchsorted(began, side="right"))
        since = self.through[place] - self.began[place] if place < num else 0.0
        for values, value in ((self.began, began), (self.through, began + since)):
            values[place + 1 : num + 1] = values[place:num].copy()
            values[place] = value
        self.through[: place + 1] += seconds
        self.num += 1
        return float(self.through[: self.num].max())


class _Clock:
    """One device's time."""

    def __init__(
        self, program: Program, seconds: list[float], costs: Costs, medium: _Medium, in_flight_bytes: int
    ) -> None:
        self.name, self.steps, self.position = program.device, program.steps, 0
        self.late = {message.tag for message in postponed(program)}
        self.seconds, self.costs, self.medium = seconds, costs, medium
        self.in_flight_bytes = in_flight_bytes
        self.now = costs.begin(self.name)
        self.began_s = 0.0
        self.link_free_s, self.aside_free_s = 0.0, 0.0
        shares_cores = costs.cluster.cores is not None
        self.ports = None if shares_cores else {patient: _Port() for patient in (False, True)}
        self.sending = {p: deque[tuple[float, int]]() for p in (False, True)}  # when each leaves, its bytes
        self.sending_bytes = {False: 0, True: 0}
        self.events: list[Interval] = []
        self.busy: list[Interval] = []  # from the end of one wait to the beginning of the next
        self.carried: list[Interval] = []  # when messages of this device kept a core busy

    def begin_again(self) -> None:
        """The next step, with all that is still on its way."""
        self.position, self.events, self.began_s = 0, [], self.now
        self.now += self.costs.begin(self.name)

    def advance(self, arrivals: Arrivals, before: Arrivals, in_order: bool) -> list[int]:
        """Go on until a message is missing (or, in order, until one was sent); the tags of what was sent."""
        launched: list[int] = []
        steps, seconds = self.steps, self.seconds
        while self.position < len(steps):
            step = steps[self.position]
            if isinstance(step, Receive):
                late = step.message.tag in self.late
                arrival = (before if late else arrivals).get(step.message.tag)
                if arrival is not None:
                    self._wait(self._through(step.message, *arrival))
                elif not late:
                    break
            start = self.now
            self.now = start + seconds[self.position]
            if isinstance(step, Send):
                arrivals[step.message.tag] = self._launch(step.message)
                launched.append(step.message.tag)
            self.events.append((start, self.now))
            self.position += 1
            if in_order and launched:
                break
        if self.position == len(steps):
            if not self.late:
                self._wait(max(self.link_free_s, self.aside_free_s))
            self.busy.append((self.began_s, self.now))
        return launched

    def _through(self, message: Message, began_s: float, arrived_s: float) -> float:
        """When a message is in, which alone would have been from the one time to the other."""
        if self.ports is None:
            return arrived_s
        seconds = message.expected_bytes / self.costs.port_bytes_per_s(self.name)
        return max(arrived_s, self.ports[message.patient].take(began_s, seconds))

    def _wait(self, until_s: float) -> None:
        if until_s > self.now:
            self.busy.append((self.began_s, self.now))
            self.now = self.began_s = until_s

    def _launch(self, message: Message) -> Interval:
        """Hand a message over; from when to when it comes in. Too much on its way out holds the device up.

        Patient messages wait for the others. Those share the wire with patient ones already on their way.
        """
        link = self.costs.link(message.source, message.target)
        num_bytes = message.expected_bytes
        handed = self.now - self.costs.post(self.name, num_bytes)
        free_s = max(self.link_free_s, self.aside_free_s) if message.patient else self.link_free_s
        begin, shared_s = self.medium.begin(max(handed, free_s), num_bytes)
        num_seconds = num_bytes / link.bytes_per_s
        beside_s = 0.0 if message.patient else min(max(self.aside_free_s - begin, 0.0), num_seconds)
        leaves = begin + max(num_seconds + beside_s, shared_s)
        self.carried.append((max(begin, leaves - self.costs.carry(self.name, num_bytes)), leaves))
        if message.patient:
            self.aside_free_s = leaves
        else:
            self.link_free_s = leaves
            self.aside_free_s += num_seconds if self.aside_free_s > begin else 0.0
        sending = self.sending[message.patient]
        sending.append((leaves, num_bytes))
        self.sending_bytes[message.patient] += num_bytes
        while sending and self.sending_bytes[message.patient] >= self.in_flight_bytes:
            oldest, oldest_bytes = sending.popleft()
            self.sending_bytes[message.patient] -= oldest_bytes
            self._wait(oldest)
        return leaves - num_seconds + link.latency_s, leaves + link.latency_s


def _step_seconds(lowered: Lowered, program: Program, owned: int, costs: Costs) -> list[float]:
    """Of every step of a program, without waiting for anybody."""
    device, regions, layers = program.device, lowered.regions, lowered.graph.by_name()
    sizes = Sizes(
        lowered.graph,
        device,
        {name: tiles[device] for name, tiles in regions.home.items()},
        {name: tiles[device] for name, tiles in regions.computed.items()},
        {key: tiles[device] for key, tiles in regions.needed.items() if device in tiles},
        owned,
        {bucket.index: bucket for bucket in lowered.buckets if device in dict(bucket.parts)},
        regions.evaluated(lowered.graph, device),
    )
    chunks: dict[int, tuple[float, float]] = {}
    slopes: dict[int, float] = {}  # of the backward, what may be done later
    known: dict[tuple[str, int], float] = {}
    unfinished: dict[int, float] = {}

    def seconds(step: Step) -> float:
        kind, num_bytes = sizes.of(step)
        if (kind, num_bytes) not in known:
            known[kind, num_bytes] = costs.step(device, kind, num_bytes)
        own = known[kind, num_bytes]
        match step:
            case Forward(chunk):
                tiles = list(_computed(step, lowered, device))
                each = [costs.layer(device, layers[n], t, n in regions.exchanged) for n, t in tiles]
                chunks[chunk] = sum(f for f, _ in each), sum(b for _, b in each)
                slopes[chunk] = sum(
                    costs.slope(device, layers, name, regions.computed[name][device])
                    for name in late_convolutions(step.layers, layers)
                )
                if not step.ahead:
                    return own + chunks[chunk][0]
                name, before = step.layers[-1], each[-1][0]
                first, unfinished[chunk] = costs.parted(device, layers[name], dict(tiles)[name], step.ahead)
                return own + chunks[chunk][0] - before + first
            case Finish(chunk):
                return own + unfinished[chunk]
            case Backward(chunk, later):
                return own + chunks[chunk][1] - (slopes[chunk] if later else 0.0)
            case Slope(chunk):
                return own + slopes[chunk]
            case Rerun(chunk):
                return own + chunks[chunk][0]
            case Redo():
                return own + _redo_seconds(step, lowered, device, costs)
            case Send(message) | Receive(message) if message.packed:
                return own + costs.pack(device, message.tile.numel)
            case _:
                return own

    return [seconds(step) for step in program.steps]


def _redo_seconds(step: Redo, lowered: Lowered, device: str, costs: Costs) -> float:
    """Of computing a chunk a second time and of its backward, one portion after another."""
    regions, layers, total = lowered.regions, lowered.graph.by_name(), 0.0
    unread = unread_convolutions(step, layers)
    for name, tile in _computed(step, lowered, device):
        for some in samples_at_a_time(tile, step.samples):
            forward, backward = costs.layer(device, layers[name], some, name in regions.exchanged)
            total += backward if name in unread else forward + backward
    return total


def _computed(step: Forward | Redo, lowered: Lowered, device: str) -> Iterator[tuple[str, Tile]]:
    """The layers of a step with what is computed of them, in each of its bands."""
    computed = {name: lowered.regions.computed[name][device] for name in step.layers}
    if step.bands == 1:
        yield from computed.items()
        return
    ends, layers = leaving(step.layers, lowered.graph), lowered.graph.by_name()
    for portion in portions(step.layers, ends, computed, layers, bands=step.bands):
        yield from ((name, portion.regions[name]) for name in step.layers)


class _Warp:
    """From the time of a machine with cores enough to that of one that must share them."""

    def __init__(self, intervals: Iterable[Interval], cores: int | None) -> None:
        self.given, self.real, self.slowness = [0.0], [0.0], [1.0]
        if cores is None:
            return
        changes: list[tuple[float, int]] = []
        for start, stop in intervals:
            if stop > start:
                changes += [(start, 1), (stop, -1)]
        active = 0
        for time_s, change in sorted(changes):
            if time_s > self.given[-1]:
                self.real.append(self(time_s))
                self.given.append(time_s)
                self.slowness.append(1.0)
            active += change
            self.slowness[-1] = max(1.0, active / cores)

    def __call__(self, time_s: float) -> float:
        place = bisect_right(self.given, time_s) - 1
        return self.real[place] + (time_s - self.given[place]) * self.slowness[place]


def foreseen_peak(lowered: Lowered, name: str, costs: Costs, kept: Kept) -> int:
    """The most memory of a device; where it is limited, freed memory goes back at once."""
    return peak(
        lowered,
        name,
        optimiser_slots=kept.slots,
        optimiser_copies=kept.copies,
        bare_bytes=costs.bare_bytes(name),
        thrifty=bool(costs.devices[name].memory_bytes),
    )
