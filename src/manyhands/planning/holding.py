"""A device's step walked through on paper: every tensor from when it is made till it is freed.

The walk follows `runtime/worker.py` step by step: what the store holds, what autograd keeps (`Layer.saved`),
gradients, weights and the optimiser's state, what is on its way, and the work space of convolutions.
"""

from __future__ import annotations

from collections import deque

from manyhands.ir.choices import late_convolutions
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Input, Layer
from manyhands.ir.program import (
    Backward,
    Content,
    Correct,
    Drop,
    Expect,
    Finish,
    Fold,
    Forward,
    Keep,
    Loss,
    Measure,
    Message,
    Place,
    Prepare,
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
    postponed,
)
from manyhands.ir.territory import Territory
from manyhands.planning.costs import tile_bytes
from manyhands.planning.footprints import (
    comes_in_place,
)
from manyhands.planning.ledger import Block, Ledger
from manyhands.planning.liveness import Buffer
from manyhands.planning.lowering import Lowered
from manyhands.planning.passes import Passes
from manyhands.planning.tapes import Tape

LOSS_COPIES = 4  # of the outputs, while the loss is evaluated and its gradient taken


class Holding(Passes):
    """What one device holds in memory in the course of a step."""

    def __init__(
        self, lowered: Lowered, device: str, territory: Territory, ledger: Ledger, *, channels_last: bool
    ) -> None:
        program = lowered.program(device)
        super().__init__(lowered.graph, program, territory, ledger, channels_last=channels_last)
        self.device = device
        self.aside: dict[tuple[str, int, Tile], Block] = {}
        self.left: dict[int, Tape] = {}  # for a Slope
        self.arriving: dict[int, tuple[Message, Block]] = {}
        self.sending = {patient: deque[Block]() for patient in (False, True)}
        self.gaps: dict[tuple[str, int, Tile], Block] = {}  # of tiles that travel without zeros
        self.in_flight_bytes = lowered.plan.in_flight_bytes

    def run(self, num_steps: int, optimiser_slots: float, optimiser_copies: float) -> int:
        """Bytes at the worst moment of some steps. One alone is taken to be the second: there is state."""
        self.begin(optimiser_slots, optimiser_copies)
        if num_steps == 1:
            self.slopes.hold_state(optimiser_slots)
        for _ in range(
            max(num_steps, 2 if postponed(self.program) else 1)
        ):  # the second finds some on its way
            self.slopes.clear()
            for step in self.program.steps:
                self.step(step)
            self._clear()
        return self.ledger.peak

    def begin(self, optimiser_slots: float, optimiser_copies: float) -> None:
        """Weights and a batch are there."""
        self.optimiser_slots, self.optimiser_copies = optimiser_slots, optimiser_copies
        self.slopes.hold_weights()
        for layer in self.graph.layers:
            if isinstance(layer.operation, Input):
                tile = self.territory.inputs[layer.operation.position]
                self.batch[layer.name] = self.ledger.new(tile_bytes(layer, tile)), tile

    def _clear(self) -> None:
        """The end of a step: what nobody asked for is let go."""
        for held in (self.gradients, self.read_gradients, self.own_inputs, self.gaps):
            for block in held.values():
                self.ledger.free(block)
            held.clear()
        self.own_reads.clear()
        if not self.arriving:
            self._wait_for_sent(0)

    def step(self, step: Step) -> None:
        match step:
            case Prepare(layer, segment, tile):  # no memory is taken before something is written to it
                self.values[layer, segment] = Block(tile_bytes(self.layers[layer], tile))
            case Place(layer, segment):
                self._write((layer, segment))
            case Forward():
                self.forward(step)
            case Finish(_, layer):  # it is computed apart, and put where it belongs
                self.ledger.touch(tile_bytes(self.layers[layer], self.territory.computed[layer]))
            case Backward(chunk, later):
                self.backward(self._tape(chunk, later))
            case Slope(chunk):
                self.slope(self.left.pop(chunk))
            case Rerun():
                self.rerun(step)
            case Redo():
                self.redo(step)
            case Keep(layer, segment, tile):
                self.aside[layer, segment, tile] = self.ledger.new(tile_bytes(self.layers[layer], tile))
            case Restore(layer, segment, tile):
                self._write((layer, segment))
                self.ledger.free(self.aside.pop((layer, segment, tile)))
            case Measure(layer):
                source = self.layers[layer].inputs[0]
                if (
                    self.territory.home[source] != self.territory.computed[source]
                ):  # with gaps, so it is copied
                    self.ledger.touch(tile_bytes(self.layers[source], self.territory.home[source]))
            case Correct(layer):
                self.correct(self.layers[layer])
            case Send(message):
                self.send(message)
            case Expect(message):
                self.expect(message)
            case Receive(message):
                self.receive(message)
            case Return(layer, segment, tile):
                self.own_reads.discard((layer, segment))
                if (layer, segment) in self.read_gradients:
                    self.add_gradient(layer, tile, self.read_gradients.pop((layer, segment)))
            case Drop(layer, segment):
                block = self.values.pop((layer, segment))
                if block.holders:
                    self.ledger.free(block)
            case Loss():
                self.loss()
            case Fold(bucket):
                self.slopes.fold(self.territory.buckets[bucket], self.device)
            case Square():  # in float64, and that squared
                self.slopes.settle()
                self.ledger.touch(4 * self.slopes.largest_bytes)
            case Update():
                self.slopes.settle()
                self.slopes.hold_state(self.optimiser_slots)
                self.ledger.touch(int(self.optimiser_copies * self.slopes.largest_bytes))
            case _:
                pass

    def _tape(self, chunk: int, later: bool) -> Tape:
        tape = self.tapes.pop(chunk)
        if later:
            tape.late = late_convolutions([node.layer.name for node in tape.nodes], self.layers)
            self.left[chunk] = tape
        return tape

    def _write(self, buffer: Buffer) -> None:
        """Something is put into a prepared tile: from now on its memory is there."""
        if not self.values[buffer].holders:
            self.ledger.hold(self.values[buffer])

    def loss(self) -> None:
        end = 1 + max(self.territory.segment_of.values())
        for name in dict.fromkeys(self.graph.outputs):
            layer, home = self.layers[name], self.territory.home[name]
            part = self.territory.evaluation
            size = layer.num_bytes if part is None else part.tile.numel * layer.item_bytes
            self._write((name, end) if (name, end) in self.territory.needed else (name, None))
            self.ledger.touch(*(size,) * LOSS_COPIES)
            if layer.differentiable and home.numel:
                self.add_gradient(name, home, self.ledger.new(size))

    def correct(self, layer: Layer) -> None:
        self.own_gradient(layer.inputs[0])
        if layer.name in self.own_inputs:
            self.ledger.free(self.own_inputs.pop(layer.name))

    # ---- messages --------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """A copy goes out, and is held until enough came after it. Meanwhile the others' part comes in."""
        of_weights = message.content in (Content.SLOPES, Content.WEIGHTS)
        if of_weights:
            bucket = self.territory.buckets[message.segment]
            owner = message.target if message.content is Content.SLOPES else self.device
            self.ledger.touch(bucket.num_bytes(owner), self.slopes.copied_bytes(bucket.part(owner)))
        self.sending[of_weights].append(self.ledger.new(message.num_bytes))
        self._turn(message)
        for awaited, block in self.arriving.values() if of_weights else ():
            if awaited.content is message.content and not block.holders:
                self.ledger.hold(block)
        self._wait_for_sent(self.in_flight_bytes)

    def _turn(self, message: Message) -> None:
        """What it takes beside a message that is rounded or packed: copies, and bits, which stay."""
        rounded = message.content in (Content.VALUE, Content.GRADIENT) and not self._as_it_is(message)
        if not rounded and not message.packed:
            return
        copies = [message.num_bytes] if rounded and message.packed else []
        self.ledger.touch(tile_bytes(self.layers[message.layer], message.tile), *copies)
        place = message.layer, message.segment, message.tile
        if message.packed and place not in self.gaps:
            self.gaps[place] = self.ledger.new(message.tile.numel // 8)

    def _wait_for_sent(self, limit_bytes: int) -> None:
        for sending in self.sending.values():
            while sending and sum(block.num_bytes for block in sending) >= limit_bytes:
                self.ledger.free(sending.popleft())

    def expect(self, message: Message) -> None:
        """Memory is taken when something comes in: of weights, not before the own part goes out."""
        if message.content is Content.VALUE and not message.packed and self._as_it_is(message):
            whole = self.territory.needed[message.layer, message.segment].shape
            if comes_in_place(message.tile.shape, whole, channels_last=self.channels_last):
                return
        late = message.content in (Content.SLOPES, Content.WEIGHTS)
        block = Block(message.num_bytes) if late else self.ledger.new(message.num_bytes)
        self.arriving[message.tag] = message, block

    def _as_it_is(self, message: Message) -> bool:
        """Is a tile not rounded for its way?"""
        return message.num_bytes == tile_bytes(self.layers[message.layer], message.tile)

    def receive(self, message: Message) -> None:
        if message.content is Content.VALUE:
            self._write((message.layer, message.segment))
        if message.tag not in self.arriving:
            return
        _, block = self.arriving.pop(message.tag)
        if not block.holders:
            self.ledger.hold(block)
        self._turn(message)
        if message.content is Content.GRADIENT:
            if not self._as_it_is(message):
                self.ledger.free(block)
                block = self.ledger.new(tile_bytes(self.layers[message.layer], message.tile))
            self.add_gradient(message.layer, message.tile, block)
        else:
            self.ledger.free(block)
