"""Plan -> Programs: one list of steps for each device, and everything that has to travel between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count, groupby

from manyhands.ir.choices import late_convolutions
from manyhands.ir.geometry import Tile, Transfer, transfers
from manyhands.ir.graph import Graph, Layer, Statistic
from manyhands.ir.plan import LEAST_IN_FLIGHT, Plan
from manyhands.ir.program import (
    Backward,
    Content,
    Correct,
    Expect,
    Fold,
    Forward,
    Keep,
    Loss,
    Measure,
    Message,
    Place,
    Prepare,
    Program,
    Receive,
    Redo,
    Rerun,
    Restore,
    Return,
    Send,
    Slope,
    Square,
    Step,
    Update,
)
from manyhands.ir.territory import Bucket, Territory
from manyhands.planning.ahead import Ahead, Boxes
from manyhands.planning.assignment import Assignment, assign, is_source
from manyhands.planning.chunks import Chunk, chunks, is_per_sample, leaving, num_bands
from manyhands.planning.liveness import Liveness, reads
from manyhands.planning.packing import is_packed, item_bytes
from manyhands.planning.refilling import Refill, Refills
from manyhands.planning.territories import statistic_domains, territory
from manyhands.planning.weights import BucketMail, all_held, buckets_after, first_chunk_using

IN_FLIGHT = 2  # times the room of a plan: gradients on their way before the oldest is waited for


@dataclass(frozen=True)
class Lowered:
    """A plan spelled out: the programs of all devices for one training step, and the regions behind them."""

    graph: Graph
    plan: Plan
    regions: Assignment
    holders: dict[str, dict[str, Tile]]  # of each weight: who holds which piece
    buckets: tuple[Bucket, ...]
    programs: tuple[Program, ...]

    def territory(self, device: str) -> Territory:
        program = self.program(device)
        return territory(program, self.graph, self.regions, self.holders, self.buckets, self.plan)

    def program(self, device: str) -> Program:
        return next(program for program in self.programs if program.device == device)


def lower(graph: Graph, plan: Plan, *, clip: bool = False) -> Lowered:
    """Spell a plan out; with `clip`, the devices also tell each other the norms of their gradients."""
    lowering = Lowering(graph, plan, clip=clip)
    buckets = tuple(bucket for ready in lowering.buckets.values() for bucket in ready)
    return Lowered(graph, plan, lowering.regions, lowering.holders, buckets, lowering.programs())


class Lowering:
    """The state of one lowering: the steps written so far, and the numbers of messages."""

    def __init__(self, graph: Graph, plan: Plan, *, clip: bool) -> None:
        self.graph, self.plan, self.layers, self.clip = graph, plan, graph.by_name(), clip
        self.regions: Assignment = assign(graph, plan)
        self.holders = all_held(graph, self.regions, plan.devices)
        self.chunks = chunks(graph, plan, self.regions)
        self.loss = Chunk(len(self.chunks), len(plan.segments), ())
        self.chunk_of = {name: chunk.index for chunk in self.chunks for name in chunk.layers}
        self.steps: dict[str, list[Step]] = {device: [] for device in plan.devices}
        self.tags = count()
        self.refills = Refills(graph, plan, self.chunks, self.regions)
        self.buckets = buckets_after(graph, self.holders, self.chunks)
        self.first_use = first_chunk_using(graph, self.chunks)
        self.computed = {d: [c.index for c in self.chunks if self.active(c, d)] for d in plan.devices}
        self.late: dict[str, dict[int, list[Step]]] = {d: {} for d in plan.devices}  # by chunk; -1: at first
        self.mail = BucketMail(plan, self.tags)
        self.given: list[Bucket] = []  # whose gradients are on their way
        self.collected: list[Bucket] = []  # whose gradients have come
        self.values = {c.index: self._value_messages(c) for c in (*self.chunks, self.loss)}
        self.ahead = Ahead(plan, self.layers, self.regions, self.chunks, self.values, self._part)
        self.moments = {c.index: self._moment_messages(c) for c in (*self.chunks, self.loss)}

    def programs(self) -> tuple[Program, ...]:
        for chunk in (*self.chunks, self.loss):
            self._before(chunk)
            if chunk.index:
                self._compute(self.chunks[chunk.index - 1], self.ahead.boxes[chunk.index])
                self._send(m for m in self.ahead.brought[chunk.index] if self.ahead.is_first(m, chunk))
                for device, rest in self.ahead.rest(chunk).items():
                    self.steps[device].append(rest)
            self._after(chunk)
        holders = self._holders()
        for device in holders:
            self.steps[device].append(Loss())
        told = self._tell(Content.LOSS, self.regions.tellers, holders)
        for chunk in reversed(self.chunks):
            self._backward(chunk)
            for bucket in self.buckets[chunk.index]:
                self._give(bucket)
                self.given.append(bucket)
                self._collect(IN_FLIGHT * self.plan.in_flight_bytes, but_newest=True)
        self._receive(told)
        self._collect(0)
        if self.clip:
            self._square()
        for device in self.plan.devices:
            self.steps[device].append(Update())
        first_needed_first = self.collected[::-1]
        self._share(first_needed_first)
        for bucket in first_needed_first:
            if self.plan.in_flight_bytes > LEAST_IN_FLIGHT:
                self._postpone(bucket)
            else:
                self._receive(self.mail.of(bucket, Content.WEIGHTS))
        return tuple(
            Program(device, Liveness(self.graph, self.regions, device).with_drops(self._whole(device)))
            for device in self.steps
        )

    def _whole(self, device: str) -> list[Step]:
        """The steps of a device, with waits for what the step before left on its way."""
        late = self.late[device]
        steps: list[Step] = [*late.get(-1, ())]
        for step in self.steps[device]:
            steps += [*late.get(step.chunk, ()), step] if isinstance(step, Forward) else [step]
        return steps

    def _holders(self) -> list[str]:
        end = len(self.plan.segments)
        return [
            d for d in self.plan.devices if any(d in self.regions.needed[n, end] for n in self.graph.outputs)
        ]

    def active(self, chunk: Chunk, device: str) -> tuple[str, ...]:
        """The layers of a chunk of which this device computes anything."""
        return tuple(name for name in chunk.layers if self.regions.computed[name][device].numel)

    # ---- what a chunk reads from others ---------------------------------------------------------------

    def _inputs(self, chunk: Chunk) -> list[str]:
        """Results of earlier segments that this chunk is the first of its segment to read."""
        if chunk is self.loss:
            return list(dict.fromkeys(self.graph.outputs))
        earlier = [c for c in self.chunks if c.segment == chunk.segment and c.index < chunk.index]
        seen = {name for c in earlier for name in self._reads(c)}
        found = dict.fromkeys(self._reads(chunk))
        return [name for name in found if name not in seen and (name, chunk.segment) in self.regions.needed]

    def _reads(self, chunk: Chunk) -> list[str]:
        return [name for layer in chunk.layers for name in reads(self.layers[layer], self.regions)]

    def _value_messages(self, chunk: Chunk) -> list[Message]:
        messages = []
        for name in self._inputs(chunk):
            wanted = self.regions.needed[name, chunk.segment]
            wanted = {d: t for d, t in wanted.items() if self.regions.assembled(name, chunk.segment, d)}
            for transfer in transfers(self.regions.home[name], wanted):
                messages.append(self._message(Content.VALUE, name, chunk.segment, transfer, 1))
        return messages

    def _statistics(self, chunk: Chunk) -> list[Layer]:
        return [self.layers[name] for name in chunk.layers if name in self.regions.exchanged]

    def _moment_messages(self, chunk: Chunk) -> list[Message]:
        messages = []
        for layer in self._statistics(chunk):
            have, need = statistic_domains(layer, self.layers[layer.inputs[0]], self.regions)
            factor = 1 if layer.statistic is Statistic.MEAN else 2
            for transfer in transfers(have, need):
                messages.append(self._message(Content.MOMENTS, layer.name, chunk.segment, transfer, factor))
        return messages

    def _message(self, content: Content, name: str, segment: int, way: Transfer, factor: int) -> Message:
        size = way.tile.numel * factor * item_bytes(self.plan, content, self.layers[name].dtype)
        packed, tag = is_packed(self.plan, self.layers[name], content, size), next(self.tags)
        return Message(content, name, segment, way.tile, way.source, way.target, tag, size, packed)

    def _part(self, m: Message, tile: Tile) -> Message:
        return self._message(m.content, m.layer, m.segment, Transfer(m.source, m.target, tile), 1)

    def _reverse(self, message: Message, content: Content) -> Message:
        source, target = message.target, message.source
        return replace(message, content=content, source=source, target=target, tag=next(self.tags))

    # ---- forward ---------------------------------------------------------------------------------------

    def _ready_before(self, message: Message, chunk: Chunk) -> bool:
        """Was what this message carries computed earlier than the chunk just before this one?"""
        name = message.layer
        if message.content is Content.MOMENTS:
            (name,) = self.layers[name].inputs
        return self.chunk_of.get(name, -1) < chunk.index - 1

    def _before(self, chunk: Chunk) -> None:
        """Post what can be posted before the previous chunk computes."""
        for name in self._inputs(chunk):
            self._prepare(name, chunk.segment)
        messages = self.ahead.brought[chunk.index] + self.moments[chunk.index]
        for message in messages:
            self.steps[message.target].append(Expect(message))
        self._measure(chunk, early=True)
        self._send(m for m in messages if self._ready_before(m, chunk))

    def _after(self, chunk: Chunk) -> None:
        """The previous chunk is computed: send what it made, and wait for what the others made."""
        self._measure(chunk, early=False)
        messages = self.ahead.brought[chunk.index] + self.moments[chunk.index]
        sent = (m for m in messages if not self._ready_before(m, chunk))
        self._send(m for m in sent if not self.ahead.is_first(m, chunk))
        for name in self._inputs(chunk):
            self._place(name, chunk.segment)
        for message in messages:
            self._receive([message])
            if message.content is Content.VALUE and message.layer in self.refills.names.get(chunk.index, ()):
                self.steps[message.target].append(Keep(message.layer, message.segment, message.tile))

    def _prepare(self, name: str, segment: int) -> None:
        for device in self.plan.devices:
            if self.regions.assembled(name, segment, device):
                self.steps[device].append(Prepare(name, segment, self.regions.needed[name, segment][device]))

    def _place(self, name: str, segment: int) -> None:
        for device in self.plan.devices:
            if self.regions.assembled(name, segment, device):
                own = self.regions.home[name][device] & self.regions.needed[name, segment][device]
                if own.numel:
                    self.steps[device].append(Place(name, segment, own))

    def _measure(self, chunk: Chunk, *, early: bool) -> None:
        for layer in self._statistics(chunk):
            (source,) = layer.inputs
            if (self.chunk_of.get(source, -1) < chunk.index - 1) == early:
                for device, tile in self.regions.home[source].items():
                    if tile.numel:
                        self.steps[device].append(Measure(layer.name))

    def _send(self, messages: Iterable[Message]) -> None:
        """Of what many send, everybody begins with the device after itself: else all send to the same one."""
        place = {device: index for index, device in enumerate(self.plan.devices)}
        for _, alike in groupby(messages, lambda m: (m.content, m.layer, m.segment)):
            for m in sorted(alike, key=lambda m: (place[m.target] - place[m.source]) % len(place)):
                self.steps[m.source].append(Send(m))

    def _goes_back(self, names: tuple[str, ...]) -> bool:
        return any(self.layers[name].differentiable for name in names)

    def _compute(self, chunk: Chunk, ahead: Boxes) -> None:
        for device in self.plan.devices:
            if active := self.active(chunk, device):
                keep, bands = not self.plan.segments[chunk.segment].redo, self._bands(chunk, active, device)
                first = ahead.get(device, ())
                self.steps[device].append(Forward(chunk.index, active, keep, bands, first))

    # ---- backward --------------------------------------------------------------------------------------

    def _backward(self, chunk: Chunk) -> None:
        """Backward of a chunk, then the gradients of what it read go home and the norms are corrected."""
        values = [m for m in self.values[chunk.index] if self.layers[m.layer].differentiable]
        norms = [layer for layer in self._statistics(chunk) if self.layers[layer.inputs[0]].differentiable]
        gradients = [self._reverse(m, Content.GRADIENT) for m in values]
        kept = {layer.name for layer in norms}
        moments = [m for m in self.moments[chunk.index] if m.layer in kept]
        computed = self.regions.computed
        sums = [self._reverse(m, Content.SUMS) for m in moments if computed[m.layer][m.target].numel]
        for message in (*sums, *gradients):
            self.steps[message.target].append(Expect(message))
        for refill in self.refills.before(chunk):
            self._refill(refill)
        awaited = {device for m in (*sums, *gradients) for device in (m.source, m.target)}
        left = []
        for device in self.plan.devices:
            active = self.active(chunk, device)
            if self._goes_back(active):
                self.steps[device].append(self._go_back(chunk, active, device, later=device in awaited))
                if self.steps[device][-1] == Backward(chunk.index, later=True):
                    left.append(device)
        self._send((*sums, *gradients))
        for name in self._inputs(chunk):
            for device in self.plan.devices:
                if self.layers[name].differentiable and self.regions.assembled(name, chunk.segment, device):
                    own = self.regions.home[name][device] & self.regions.needed[name, chunk.segment][device]
                    if own.numel:
                        self.steps[device].append(Return(name, chunk.segment, own))
        for device in left:
            self.steps[device].append(Slope(chunk.index))
        for message in (*sums, *gradients):
            self.steps[message.target].append(Receive(message))
        for layer in norms:
            for device, tile in self.regions.home[layer.inputs[0]].items():
                if tile.numel and not is_source(self.layers[layer.inputs[0]]):
                    self.steps[device].append(Correct(layer.name))

    def _refill(self, refill: Refill) -> None:
        """Have what a chunk will read computed again, and put together with what others sent of it."""
        maker, segment = refill.maker, refill.reader.segment
        for device in self.plan.devices:
            if active := self.active(maker, device):
                self.steps[device].append(Rerun(maker.index, active, self._bands(maker, active, device)))
        for name in refill.names:
            self._prepare(name, segment)
            self._place(name, segment)
        for message in self.values[refill.reader.index]:
            if message.layer in refill.names:
                self.steps[message.target].append(Restore(message.layer, segment, message.tile))

    def _go_back(self, chunk: Chunk, active: tuple[str, ...], device: str, *, later: bool) -> Step:
        samples = self.plan.segments[chunk.segment].redo
        if not samples:
            return Backward(chunk.index, later and bool(late_convolutions(active, self.layers)))
        apart = is_per_sample(active, self.layers, self.regions, device)
        return Redo(chunk.index, active, samples if apart else 0, self._bands(chunk, active, device))

    def _bands(self, chunk: Chunk, active: tuple[str, ...], device: str) -> int:
        segment = self.plan.segments[chunk.segment]
        if not segment.redo or segment.bands == 1:
            return 1
        tiles = {name: self.regions.computed[name][device] for name in active}
        return num_bands(segment.bands, tiles, self.layers, leaving(active, self.graph))

    # ---- weights ---------------------------------------------------------------------------------------

    def _give(self, bucket: Bucket) -> None:
        """Send the gradients of a bucket to their owners."""
        messages = self.mail.of(bucket, Content.SLOPES)
        for message in messages:
            self.steps[message.target].append(Expect(message))
        self._send(messages)
        for device, _ in bucket.parts:
            self.steps[device].append(Fold(bucket.index))

    def _collect(self, most_bytes: int, *, but_newest: bool = False) -> None:
        """Wait for the oldest gradients while more than this is on its way."""
        while _total_bytes(self.given[:-1] if but_newest else self.given) > most_bytes:
            bucket = self.given.pop(0)
            self._receive(self.mail.of(bucket, Content.SLOPES))
            self.collected.append(bucket)

    def _square(self) -> None:
        """Everybody learns the norm of all gradients, from everybody's own."""
        for device in self.plan.devices:
            self.steps[device].append(Square())
        self._receive(self._tell(Content.SQUARES, self.plan.devices, self.plan.devices))

    def _tell(self, content: Content, tellers: Iterable[str], listeners: Iterable[str]) -> list[Message]:
        """A number from each of some devices to each of others."""
        ways = [(a, b) for a in tellers for b in listeners if a != b]
        messages = [Message(content, content.value, 0, Tile(()), a, b, next(self.tags), 8) for a, b in ways]
        for message in messages:
            self.steps[message.target].append(Expect(message))
        self._send(messages)
        return messages

    def _share(self, buckets: list[Bucket]) -> None:
        """Send what the owners made of their weights to everybody who holds them."""
        messages = [m for bucket in buckets for m in self.mail.of(bucket, Content.WEIGHTS)]
        for message in messages:
            self.steps[message.target].append(Expect(message))
        self._send(messages)

    def _postpone(self, bucket: Bucket) -> None:
        """Let the next step wait for weights on their way, before the first layer that needs them."""
        chunk = min(self.first_use[piece.parameter] for _, part in bucket.parts for piece in part)
        for message in self.mail.of(bucket, Content.WEIGHTS):
            computed = self.computed[message.target]
            place = bisect_left(computed, chunk)
            first = computed[place] if place < len(computed) else -1
            self.late[message.target].setdefault(first, []).append(Receive(message))

    def _receive(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.steps[message.target].append(Receive(message))


def _total_bytes(buckets: list[Bucket]) -> int:
    return sum(bucket.num_bytes(owner) for bucket in buckets for owner, _ in bucket.parts)
