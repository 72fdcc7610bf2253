"""A device's step walked through on paper: every tensor from when it is made till it is freed.

The walk follows `runtime/worker.py` step by step: what the store holds, what autograd keeps (`Layer.saved`),
gradients, weights and the optimiser's state, what is on its way, and the work space of convolutions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Constant, Convolve, Deconvolve, Input, Layer, Statistic
from manyhands.ir.program import (
    Backward,
    Content,
    Correct,
    Drop,
    Expect,
    Fold,
    Forward,
    Loss,
    Measure,
    Message,
    Place,
    Prepare,
    Receive,
    Return,
    Send,
    Square,
    Step,
    Update,
    postponed,
    unshared_gradients,
)
from manyhands.ir.regions import needs, parameter_tiles
from manyhands.ir.territory import Territory
from manyhands.planning.costs import tile_bytes
from manyhands.planning.footprints import (
    backward_workspace,
    comes_in_place,
    forward_workspace,
    padded_elements,
    saved_of,
)
from manyhands.planning.ledger import Block, Ledger
from manyhands.planning.liveness import Buffer
from manyhands.planning.lowering import Lowered
from manyhands.planning.slopes import Slopes
from manyhands.planning.tapes import Node, Tape

NODE_BYTES = 1 << 10  # of autograd's own for each layer: too small to count, but it parts a heap
LOSS_COPIES = 4  # of the outputs, while the loss is evaluated and its gradient taken


class Holding:
    """What one device holds in memory in the course of a step."""

    def __init__(
        self, lowered: Lowered, device: str, territory: Territory, ledger: Ledger, *, channels_last: bool
    ) -> None:
        self.graph, self.device, self.channels_last = lowered.graph, device, channels_last
        self.layers, self.program = lowered.graph.by_name(), lowered.program(device)
        self.territory, self.ledger = territory, ledger
        self.values: dict[Buffer, Block] = {}
        self.tapes: dict[int, Tape] = {}
        self.gradients: dict[str, Block] = {}
        self.borrowed: set[str] = set()
        self.read_gradients: dict[Buffer, Block] = {}
        self.own_inputs: dict[str, Block] = {}
        self.slopes = Slopes(
            self.ledger, self.territory, lowered.graph.parameters(), channels_last=channels_last
        )
        self.arriving: dict[int, tuple[Message, Block]] = {}
        self.sending = {patient: deque[Block]() for patient in (False, True)}
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
        self.batch: dict[str, tuple[Block, Tile]] = {}
        for layer in self.graph.layers:
            if isinstance(layer.operation, Input):
                tile = self.territory.inputs[layer.operation.position]
                self.batch[layer.name] = self.ledger.new(tile_bytes(layer, tile)), tile

    def _clear(self) -> None:
        """The end of a step: what nobody asked for is let go."""
        for held in (self.gradients, self.read_gradients, self.own_inputs):
            for block in held.values():
                self.ledger.free(block)
            held.clear()
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
            case Backward(chunk):
                self.backward(self.tapes.pop(chunk))
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

    def _write(self, buffer: Buffer) -> None:
        """Something is put into a prepared tile: from now on its memory is there."""
        if not self.values[buffer].holders:
            self.ledger.hold(self.values[buffer])

    # ---- forward ---------------------------------------------------------------------------------------

    def forward(self, step: Forward) -> None:
        chunk, names = step.chunk, step.layers
        tape = self.tapes[chunk] = Tape(unshared=unshared_gradients(step, self.layers))
        last = {source: name for name in names for source in (name, *self.layers[name].inputs)}
        for name in names:
            result = self._compute(self.layers[name], tape)
            tape.here[name] = result, self.territory.computed[name]
            if name in self.territory.exports[chunk]:
                self.values[name, None] = self.ledger.hold(result)
                if self.layers[name].differentiable:
                    tape.results.append(name)
            for done in [source for source in tape.here if last[source] == name]:
                self.ledger.free(tape.here.pop(done)[0])

    def _compute(self, layer: Layer, tape: Tape) -> Block:
        """The result of a layer, held once; what it keeps goes onto the tape."""
        tile, saved = self.territory.computed[layer.name], saved_of(layer)
        size = tile_bytes(layer, tile)
        if layer.name in self.territory.exchanges and layer.statistic is Statistic.MEAN:
            tape.nodes.append(Node(layer, [], [], size, 0, 0))
            return self.ledger.new(size)
        shapes = tuple(self.layers[name].shape for name in layer.inputs)
        wanted = zip(layer.inputs, needs(layer, tile, shapes), strict=True)
        node = Node(layer, [], [], size, self._filter_bytes(layer, tile), 0)
        inputs = [self._read(name, need, node, tape) for name, need in wanted]
        result = self.ledger.hold(inputs[0]) if saved.view and inputs else self.ledger.new(size)
        if padded := padded_elements(layer, tile, shapes[0]) if shapes else 0:
            self.ledger.free(inputs[0])
            inputs[0] = self.ledger.new(padded * layer.item_bytes)
        self.ledger.touch(node.copied_bytes, *self._workspace(forward_workspace, node))
        if layer.differentiable:
            kept = [block for block, keep in zip(inputs, saved.inputs, strict=False) if keep]
            node.kept = [self.ledger.hold(block) for block in (*kept, *([result] if saved.result else ()))]
            extra = int(tile.numel * (saved.extra_items * layer.item_bytes + saved.extra_bytes))
            node.kept.append(self.ledger.new(extra))
        self._keep_own_input(layer, inputs)
        tape.nodes.append(node)
        tape.small.append(self.ledger.new(NODE_BYTES))
        for block in inputs:
            self.ledger.free(block)
        return result

    def _filter_bytes(self, layer: Layer, tile: Tile) -> int:
        pieces = [t for p, t in parameter_tiles(layer, tile) if p.role == "weight"]
        return sum(piece.numel for piece in pieces) * layer.item_bytes

    def _workspace(self, of: Callable[..., tuple[int, ...]], node: Node) -> tuple[int, ...]:
        read = node.reads[0][1] if node.reads else 0
        return of(node.layer, read, node.filter_bytes, node.result_bytes, channels_last=self.channels_last)

    def _keep_own_input(self, layer: Layer, inputs: list[Block]) -> None:
        """A norm whose statistics are exchanged keeps its input until its gradient is corrected."""
        if layer.name in self.territory.tape_holds_input and self.territory.home[layer.inputs[0]].numel:
            self.own_inputs[layer.name] = self.ledger.hold(inputs[0])

    def _read(self, source: str, need: Tile, node: Node, tape: Tape) -> Block:
        """The memory in which an input lies, held once more."""
        layer = self.layers[source]
        size = tile_bytes(layer, need)
        if isinstance(layer.operation, Input):  # put in order when it is read
            node.reads.append((source, size, size))
            block, tile = self.batch[source]
            return self.ledger.new(size) if self.channels_last or need != tile else self.ledger.hold(block)
        if isinstance(layer.operation, Constant) or not need.numel:
            node.reads.append((source, size, size))
            return self.ledger.new(0)
        if source not in tape.here:
            tape.here[source] = self._bring(source, node.layer, tape)
        block, tile = tape.here[source]
        node.reads.append((source, size, tile_bytes(layer, tile)))
        if need != tile and isinstance(node.layer.operation, Convolve | Deconvolve):
            node.copied_bytes += size
        return self.ledger.hold(block)

    def _bring(self, source: str, reader: Layer, tape: Tape) -> tuple[Block, Tile]:
        """A result of an earlier chunk: as it was put together for this segment, or as it was computed."""
        segment = self.territory.segment_of[reader.name]
        tile = self.territory.needed.get((source, segment))
        buffer: Buffer = (source, None if tile is None else segment)
        if self.layers[source].differentiable:
            tape.sources[source] = buffer
        return self.ledger.hold(self.values[buffer]), tile or self.territory.computed[source]

    def loss(self) -> None:
        end = 1 + max(self.territory.segment_of.values())
        for name in dict.fromkeys(self.graph.outputs):
            layer, home = self.layers[name], self.territory.home[name]
            size = prod(layer.shape) * layer.item_bytes
            self._write((name, end) if (name, end) in self.territory.needed else (name, None))
            self.ledger.touch(*(size,) * LOSS_COPIES)
            if layer.differentiable and home.numel:
                self.add_gradient(name, home, self.ledger.new(size))

    # ---- backward --------------------------------------------------------------------------------------

    def backward(self, tape: Tape) -> None:
        flowing = {name: self.gradients.pop(name) for name in tape.results if name in self.gradients}
        for node in reversed(tape.nodes):
            gradient = flowing.pop(node.layer.name, None)
            made = [] if gradient is None else self._flow_back(node, gradient)
            for block in node.kept:
                self.ledger.free(block)
            for (source, _, whole), block in made:
                if block.num_bytes < whole:  # a part of what was at hand: zeros for the rest
                    part, block = block, self.ledger.new(whole)
                    self.ledger.free(part)
                self._accumulate(flowing, source, block)
        for source, buffer in tape.sources.items():
            if source in flowing:
                self._hand_on(buffer, flowing.pop(source), unshared=source in tape.unshared)
        for block in (*flowing.values(), *tape.small):
            self.ledger.free(block)

    def _flow_back(self, node: Node, gradient: Block) -> list[tuple[tuple[str, int, int], Block]]:
        """The gradients of a layer's inputs and weights, from that of its result."""
        layer, saved = node.layer, saved_of(node.layer)
        passes = saved.passes or (False,) * len(node.reads)
        made = [
            (read, self.ledger.hold(gradient) if passed else self.ledger.new(read[1]))
            for read, passed in zip(node.reads, passes, strict=False)
            if self.layers[read[0]].differentiable
        ]
        convolves = isinstance(layer.operation, Convolve | Deconvolve)
        in_part = convolves and gradient.num_bytes > node.result_bytes
        needed = (node.copied_bytes, node.result_bytes if in_part else 0, self._gapped_bytes(node))
        for_a_moment = [
            self.ledger.new(size) for size in (*needed, *self._workspace(backward_workspace, node))
        ]
        for parameter, tile in parameter_tiles(layer, self.territory.computed[layer.name]):
            if parameter.trainable:
                self.slopes.add(parameter.name, tile)
        for block in for_a_moment:
            self.ledger.free(block)
        self.ledger.free(gradient)
        return made

    def _gapped_bytes(self, node: Node) -> int:
        """Of what a norm reads out of a larger tile, if its statistics are exchanged: it takes a copy."""
        if node.layer.name not in self.territory.exchanges or not node.reads:
            return 0
        _, read, whole = node.reads[0]
        return read if read < whole else 0

    def _accumulate(self, flowing: dict[str, Block], name: str, block: Block) -> None:
        """Autograd adds in place where nobody else holds what is there."""
        if name not in flowing:
            flowing[name] = block
            return
        if flowing[name].holders > 1:
            old, flowing[name] = flowing[name], self.ledger.new(flowing[name].num_bytes)
            self.ledger.free(old)
        self.ledger.free(block)

    def _hand_on(self, buffer: Buffer, block: Block, *, unshared: bool) -> None:
        """What flowed back into a result of an earlier chunk."""
        name, segment = buffer
        if segment is None:
            self.add_gradient(name, self.territory.computed[name], block, unshared=unshared)
        elif buffer in self.read_gradients:
            old, self.read_gradients[buffer] = self.read_gradients[buffer], self.ledger.new(block.num_bytes)
            self.ledger.free(old)
            self.ledger.free(block)
        else:
            self.read_gradients[buffer] = block

    def add_gradient(self, name: str, tile: Tile, block: Block, *, unshared: bool = False) -> None:
        """Add to the gradient of a result; the first that covers it all is taken as it is."""
        if name not in self.gradients and tile == self.territory.computed[name]:
            self.gradients[name] = block
            if not unshared:
                self.borrowed.add(name)
            return
        self.own_gradient(name)
        self.ledger.free(block)

    def own_gradient(self, name: str) -> None:
        held = self.gradients.get(name)
        if held is None or name in self.borrowed:
            size = tile_bytes(self.layers[name], self.territory.computed[name])
            self.gradients[name] = self.ledger.new(size)
            if held is not None:
                self.ledger.free(held)
        self.borrowed.discard(name)

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
            part = bucket.part(message.target if message.content is Content.SLOPES else self.device)
            self.ledger.touch(message.num_bytes, self.slopes.copied_bytes(part))
        self.sending[of_weights].append(self.ledger.new(message.num_bytes))
        for awaited, block in self.arriving.values() if of_weights else ():
            if awaited.content is message.content and not block.holders:
                self.ledger.hold(block)
        self._wait_for_sent(self.in_flight_bytes)

    def _wait_for_sent(self, limit_bytes: int) -> None:
        for sending in self.sending.values():
            while sending and sum(block.num_bytes for block in sending) >= limit_bytes:
                self.ledger.free(sending.popleft())

    def expect(self, message: Message) -> None:
        """Memory is taken when something comes in: of weights, not before the own part goes out."""
        if message.content is Content.VALUE:
            whole = self.territory.needed[message.layer, message.segment].shape
            if comes_in_place(message.tile.shape, whole, channels_last=self.channels_last):
                return
        late = message.content in (Content.SLOPES, Content.WEIGHTS)
        block = Block(message.num_bytes) if late else self.ledger.new(message.num_bytes)
        self.arriving[message.tag] = message, block

    def receive(self, message: Message) -> None:
        if message.content is Content.VALUE:
            self._write((message.layer, message.segment))
        if message.tag not in self.arriving:
            return
        _, block = self.arriving.pop(message.tag)
        if not block.holders:
            self.ledger.hold(block)
        if message.content is Content.GRADIENT:
            self.add_gradient(message.layer, message.tile, block)
        else:
            self.ledger.free(block)
