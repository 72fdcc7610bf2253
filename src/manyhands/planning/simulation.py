"""Run programs on paper: when each step would start and stop, and how many bytes are alive."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.ir.cluster import Cluster
from manyhands.ir.plan import Cost
from manyhands.ir.program import (
    Backward,
    Correct,
    Drop,
    Forward,
    Measure,
    Message,
    Prepare,
    Program,
    Receive,
    Send,
    Step,
    sent_bytes,
)
from manyhands.planning.costs import forward_flops, tile_bytes, weight_bytes
from manyhands.planning.liveness import Buffer, Liveness
from manyhands.planning.lowering import Lowered


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one device, from its start to its end."""

    device: str
    step: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a step is expected to cost. Memory is an estimate: every result of a chunk is taken to be kept."""

    cost: Cost
    events: tuple[Event, ...]


class Deadlock(Exception):
    """Every unfinished device waits for something that never comes."""


def simulate(lowered: Lowered, cluster: Cluster) -> Timeline:
    """The timeline of one training step. A device computes and sends at once; its sends leave one by one."""
    devices = [_Clock(lowered, program, cluster) for program in lowered.programs]
    arrivals: dict[Message, float] = {}
    while unfinished := [device for device in devices if device.position < len(device.steps)]:
        if not any([device.advance(arrivals) for device in unfinished]):
            raise Deadlock("; ".join(f"{d.name} waits at {d.steps[d.position]}" for d in unfinished))
    cost = Cost(
        seconds=max(device.now for device in devices),
        traffic_bytes=sum(sent_bytes(program) for program in lowered.programs),
        peak_bytes=tuple((device.name, device.peak) for device in devices),
    )
    return Timeline(cost, tuple(event for device in devices for event in device.events))


class _Clock:
    """One device's time and memory."""

    def __init__(self, lowered: Lowered, program: Program, cluster: Cluster) -> None:
        self.name, self.steps, self.position = program.device, program.steps, 0
        self.layers, self.cluster, self.regions = lowered.graph.by_name(), cluster, lowered.regions
        self.speed = next(d.flops_per_s for d in cluster.devices if d.name == program.device)
        self.liveness = Liveness(lowered.graph, lowered.regions, program.device)
        self.chunks = {s.chunk: s for s in program.steps if isinstance(s, Forward)}
        self.now = self.link_free = 0.0
        self.events: list[Event] = []
        held = {name: tiles[self.name] for name, tiles in lowered.holders.items() if self.name in tiles}
        owned = sum(piece.tile.numel for piece in lowered.territory(self.name).owned)
        self.alive = self.peak = 2 * weight_bytes(lowered.graph, held) + 4 * owned  # gradients, momentum
        self.buffers: dict[Buffer, int] = {}
        self.tapes: dict[int, int] = {}

    def advance(self, arrivals: dict[Message, float]) -> bool:
        start = self.position
        while self.position < len(self.steps):
            step = self.steps[self.position]
            ready = self._ready(step, arrivals)
            if ready is None:
                break
            begin = max(self.now, ready)
            self.now = begin + self._seconds(step)
            self._launch(step, arrivals)
            self._account(step)
            self.events.append(Event(self.name, self.position, begin, self.now))
            self.position += 1
        return self.position > start

    def _ready(self, step: Step, arrivals: dict[Message, float]) -> float | None:
        """When a step can start, as far as others are concerned; None: not known yet."""
        match step:
            case Receive(message):
                return arrivals.get(message)
            case _:
                return 0.0

    def _seconds(self, step: Step) -> float:
        match step:
            case Forward():
                return self._flops(step) / self.speed
            case Backward(chunk):
                return 2 * self._flops(self.chunks[chunk]) / self.speed
            case Measure(layer) | Correct(layer):
                source = self.layers[layer].inputs[0]
                return 5 * self.regions.home[source][self.name].numel / self.speed
            case _:
                return 0.0

    def _flops(self, step: Forward) -> int:
        return sum(forward_flops(self.layers[n], self.regions.computed[n][self.name]) for n in step.layers)

    def _launch(self, step: Step, arrivals: dict[Message, float]) -> None:
        match step:
            case Send(message):
                link = self.cluster.link(message.source, message.target)
                begin = max(self.now, self.link_free)
                self.link_free = begin + message.num_bytes / link.bytes_per_s
                arrivals[message] = self.link_free + link.latency_s
            case _:
                pass

    def _account(self, step: Step) -> None:
        """Bytes alive after a step."""
        match step:
            case Prepare(layer, segment, tile):
                self._hold((layer, segment), tile_bytes(self.layers[layer], tile))
            case Forward(chunk, names):
                sizes = {n: tile_bytes(self.layers[n], self.regions.computed[n][self.name]) for n in names}
                for buffer in self.liveness.made(step):
                    self._hold(buffer, sizes[buffer[0]])
                kept = sum(sizes.values()) - sum(sizes[b[0]] for b in self.liveness.made(step))
                self.tapes[chunk] = kept
                self.alive += kept
            case Backward(chunk):
                self.alive -= self.tapes.pop(chunk)
            case Drop(layer, segment):
                self.alive -= self.buffers.pop((layer, segment))
            case _:
                pass
        self.peak = max(self.peak, self.alive)

    def _hold(self, buffer: Buffer, num_bytes: int) -> None:
        self.buffers[buffer] = num_bytes
        self.alive += num_bytes
