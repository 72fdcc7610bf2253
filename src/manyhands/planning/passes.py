"""Chunks of layers walked through on paper, as `runtime/computing.py` computes them."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.ir.choices import unread_convolutions, unshared_gradients
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Constant, Convolve, Deconvolve, Graph, Input, Layer, Pointwise, Statistic
from manyhands.ir.portions import Portion, portions
from manyhands.ir.program import Forward, Program, Redo, Rerun
from manyhands.ir.regions import needs, parameter_tiles, with_ends
from manyhands.ir.territory import Territory
from manyhands.planning.costs import tile_bytes
from manyhands.planning.footprints import backward_workspace, forward_workspace, padded_elements, saved_of
from manyhands.planning.ledger import Block, Ledger
from manyhands.planning.liveness import Buffer
from manyhands.planning.slopes import Slopes
from manyhands.planning.tapes import Node, Read, Tape

NODE_BYTES = 1 << 10  # of autograd's own for each layer: too small to count, but it parts a heap


class Passes:
    """What the layers of one device hold in memory, forward and backward."""

    def __init__(
        self, graph: Graph, program: Program, territory: Territory, ledger: Ledger, *, channels_last: bool
    ) -> None:
        self.graph, self.layers, self.territory = graph, graph.by_name(), territory
        self.program, self.ledger, self.channels_last = program, ledger, channels_last
        self.read_again = territory.read_again(program, self.layers)
        self.values: dict[Buffer, Block] = {}
        self.batch: dict[str, tuple[Block, Tile]] = {}
        self.tapes: dict[int, Tape] = {}
        self.gradients: dict[str, Block] = {}
        self.borrowed: set[str] = set()
        self.read_gradients: dict[Buffer, Block] = {}
        self.own_reads: set[tuple[str, int]] = set()
        self.own_inputs: dict[str, Block] = {}
        self.slopes = Slopes(ledger, territory, graph.parameters(), channels_last=channels_last)

    # ---- forward ---------------------------------------------------------------------------------------

    def forward(self, step: Forward) -> None:
        for portion in self._portions(step) or (None,):
            tape = Tape(unshared=unshared_gradients(step, self.layers), keep=step.keep, portion=portion)
            self._walk(step.chunk, step.layers, tape)
        last = self.layers[step.layers[-1]]
        self.ledger.touch(*(2 * tile_bytes(last, tile) for tile in step.ahead))  # apart, with what it reads
        if step.keep:
            self.tapes[step.chunk] = tape

    def rerun(self, step: Rerun) -> None:
        for portion in self._portions(step) or (None,):
            self._walk(step.chunk, step.layers, Tape(keep=False, again=True, portion=portion))

    def _portions(self, step: Forward | Rerun | Redo) -> tuple[Portion, ...]:
        """Of all portions, those that stand for the others: the first two, and each of another size."""
        samples = step.samples if isinstance(step, Redo) else 0
        exports, computed = self.territory.exports[step.chunk], self.territory.computed
        found = portions(step.layers, exports, computed, self.layers, samples, step.bands)
        sizes = [tuple(tile.shape for tile in portion.regions.values()) for portion in found]
        return tuple(p for n, p in enumerate(found) if n < 2 or sizes[n] not in sizes[:n])

    def _walk(self, chunk: int, names: tuple[str, ...], tape: Tape) -> None:
        last = {source: name for name in names for source in (name, *self.layers[name].inputs)}
        for name in names:
            result = self._compute(self.layers[name], tape)
            tape.here[name] = result, tape.region(name, self.territory.computed[name])
            if name in self.territory.exports[chunk]:
                if tape.leaves:
                    self._leave(name, result, tape)
                if self.layers[name].differentiable:
                    tape.results.append(name)
            for done in [source for source in tape.here if last[source] == name]:
                self.ledger.free(tape.here.pop(done)[0])

    def _leave(self, name: str, result: Block, tape: Tape) -> None:
        """The result itself, or that into which those of all portions are copied."""
        if tape.portion is None:
            self.values[name, None] = self.ledger.hold(result)
        elif (name, None) not in self.values:
            size = tile_bytes(self.layers[name], self.territory.computed[name])
            self.values[name, None] = self.ledger.new(size)

    def _compute(self, layer: Layer, tape: Tape) -> Block:
        """The result of a layer, held once; what it keeps goes onto the tape."""
        tile, saved = tape.region(layer.name, self.territory.computed[layer.name]), saved_of(layer)
        size = tile_bytes(layer, tile)
        if layer.name in self.territory.exchanges and layer.statistic is Statistic.MEAN:
            tape.nodes.append(Node(layer, [], [], size, 0, 0))
            return self.ledger.new(size)
        shapes = tuple(self.layers[name].shape for name in layer.inputs)
        wanted = zip(layer.inputs, needs(layer, tile, shapes), strict=True)
        node = Node(layer, [], [], size, self._filter_bytes(layer, tile), 0)
        inputs = [self._read(name, need, node, tape) for name, need in wanted]
        unread = layer.name in tape.unread
        result = self._result(layer, inputs, 0 if unread else size, tape)
        if padded := padded_elements(layer, tile, shapes[0]) if shapes else 0:
            self.ledger.free(inputs[0])
            inputs[0] = self.ledger.new(padded * layer.item_bytes)
        workspace = () if unread else self._workspace(forward_workspace, node)
        self.ledger.touch(node.copied_bytes, *workspace)
        extra = int(tile.numel * (saved.extra_items * layer.item_bytes + saved.extra_bytes))
        if not tape.keep:
            self.ledger.touch(extra)  # it is made all the same
        elif layer.differentiable:
            kept = [block for block, keep in zip(inputs, saved.inputs, strict=False) if keep]
            node.kept = [self.ledger.hold(block) for block in (*kept, *([result] if saved.result else ()))]
            node.kept.append(self.ledger.new(extra))
        if tape.keep:
            if not tape.again:
                self._keep_own_input(layer, inputs)
            tape.nodes.append(node)
            tape.small.append(self.ledger.new(NODE_BYTES))
        for block in inputs:
            self.ledger.free(block)
        return result

    def _result(self, layer: Layer, inputs: list[Block], size: int, tape: Tape) -> Block:
        """The memory of a layer's result: of its own, or that of its input."""
        overwrites = isinstance(layer.operation, Pointwise)
        if saved_of(layer).view and inputs and not (overwrites and inputs[0] in tape.borrowed):
            return self.ledger.hold(inputs[0])
        return self.ledger.new(size)

    def _filter_bytes(self, layer: Layer, tile: Tile) -> int:
        pieces = [t for p, t in parameter_tiles(layer, tile) if p.role == "weight"]
        return sum(piece.numel for piece in pieces) * layer.item_bytes

    def _workspace(self, of: Callable[..., tuple[int, ...]], node: Node) -> tuple[int, ...]:
        read = node.reads[0][1] if node.reads else 0
        return of(node.layer, read, node.filter_bytes, node.result_bytes, channels_last=self.channels_last)

    def _keep_own_inputs(self, step: Redo) -> None:
        """The same where it is computed a second time."""
        for name in step.layers:
            if name in self.territory.exchanges and self.layers[name].statistic is not Statistic.MEAN:
                buffer = self.territory.buffer(self.layers[name].inputs[0], self.territory.segment_of[name])
                self._keep_own_input(self.layers[name], [self.values[buffer]])

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
        need = with_ends(node.layer, need, tile)
        size = tile_bytes(layer, need)
        node.reads.append((source, size, tile_bytes(layer, tile)))
        convolves = isinstance(node.layer.operation, Convolve | Deconvolve)
        if convolves and (need != tile or source in tape.gapped):
            node.copied_bytes += size
        return self.ledger.hold(block)

    def _bring(self, source: str, reader: Layer, tape: Tape) -> tuple[Block, Tile]:
        """A result of an earlier chunk: as it was put together for this segment, or as it was computed."""
        buffer = self.territory.buffer(source, self.territory.segment_of[reader.name])
        tile = (
            self.territory.computed[source] if buffer[1] is None else self.territory.needed[source, buffer[1]]
        )
        if self.layers[source].differentiable:
            tape.sources[source] = buffer
        block = self.ledger.hold(self.values[buffer])
        if tape.again or tape.portion is not None or buffer in self.read_again:
            tape.borrowed.add(block)
        region = tape.region(source, tile)
        if tape.portion is not None and tape.portion.banded and region != tile:
            tape.gapped.add(source)
        return block, region

    # ---- backward --------------------------------------------------------------------------------------

    def backward(self, tape: Tape) -> None:
        given = {name: self.gradients.pop(name) for name in tape.results if name in self.gradients}
        flowing = self._flow(tape, given)
        for source, buffer in tape.sources.items():
            if source in flowing:
                self._hand_on(buffer, flowing.pop(source), unshared=source in tape.unshared)
        for block in flowing.values():
            self.ledger.free(block)

    def redo(self, step: Redo) -> None:
        """Portion by portion: after the first, the gradients of what was read are there."""
        self._keep_own_inputs(step)
        results = [name for name in self.territory.exports[step.chunk] if name in self.gradients]
        given = {name: self.gradients.pop(name) for name in results}
        unshared = unshared_gradients(step, self.layers)
        unread = frozenset(unread_convolutions(step, self.layers))
        for portion in self._portions(step) or (None,):
            tape = Tape(unshared=unshared, again=True, leaves=False, portion=portion, unread=unread)
            self._walk(step.chunk, step.layers, tape)
            if portion is None:
                self.gradients |= given
                self.backward(tape)
                return
            flowing = self._flow(tape, {name: self.ledger.hold(block) for name, block in given.items()})
            for source, buffer in tape.sources.items():
                if source in flowing:
                    self._add_some(buffer)
            for block in flowing.values():
                self.ledger.free(block)
        for block in given.values():
            self.ledger.free(block)

    def _add_some(self, buffer: Buffer) -> None:
        """What flowed back from one portion is added to the gradient of all."""
        name, segment = buffer
        if segment is None:
            self.own_gradient(name)
        else:
            self._own_read(name, segment)

    def _own_read(self, name: str, segment: int) -> None:
        held = self.read_gradients.get((name, segment))
        if held is None or (name, segment) not in self.own_reads:
            size = tile_bytes(self.layers[name], self.territory.needed[name, segment])
            self.read_gradients[name, segment] = self.ledger.new(size)
            if held is not None:
                self.ledger.free(held)
        self.own_reads.add((name, segment))

    def _flow(self, tape: Tape, flowing: dict[str, Block]) -> dict[str, Block]:
        """From gradients of a chunk's results to those of what it read; what it kept is freed."""
        for node in reversed(tape.nodes):
            gradient = flowing.pop(node.layer.name, None)
            late = gradient is not None and node.layer.name in tape.late
            if gradient is not None and late:
                tape.left.append((node, self.ledger.hold(gradient)))
            made = [] if gradient is None else self._flow_back(node, gradient, tape)
            for block in () if late else node.kept:
                self.ledger.free(block)
            for (source, _, whole), block in made:
                if block.num_bytes < whole:  # a part of what was at hand: zeros for the rest
                    part, block = block, self.ledger.new(whole)
                    self.ledger.free(part)
                self._accumulate(flowing, source, block)
        for block in tape.small:
            self.ledger.free(block)
        return flowing

    def _flow_back(self, node: Node, gradient: Block, tape: Tape) -> list[tuple[Read, Block]]:
        """The gradients of a layer's inputs and weights, from that of its result."""
        layer, saved = node.layer, saved_of(node.layer)
        passes = saved.passes or (False,) * len(node.reads)
        made = [
            (read, self.ledger.hold(gradient) if passed else self.ledger.new(read[1]))
            for read, passed in zip(node.reads, passes, strict=False)
            if self.layers[read[0]].differentiable
        ]
        for_a_moment = [self.ledger.new(size) for size in self._needed(node, gradient, tape)]
        if layer.name not in tape.late:
            self._add_slopes(layer)
        for block in for_a_moment:
            self.ledger.free(block)
        self.ledger.free(gradient)
        return made

    def _needed(self, node: Node, gradient: Block, tape: Tape) -> tuple[int, ...]:
        """Copies and work space while a layer goes back."""
        convolves = isinstance(node.layer.operation, Convolve | Deconvolve)
        in_part = convolves and not tape.of_samples and gradient.num_bytes > node.result_bytes
        copies = (node.copied_bytes, node.result_bytes if in_part else 0, self._gapped_bytes(node))
        return *copies, *self._workspace(backward_workspace, node)

    def _add_slopes(self, layer: Layer) -> None:
        for parameter, tile in parameter_tiles(layer, self.territory.computed[layer.name]):
            if parameter.trainable:
                self.slopes.add(parameter.name, tile)

    def slope(self, tape: Tape) -> None:
        """Gradients of weights, from what was held for them."""
        for node, gradient in tape.left:
            for_a_moment = [self.ledger.new(size) for size in self._needed(node, gradient, tape)]
            self._add_slopes(node.layer)
            for block in (*for_a_moment, *node.kept, gradient):
                self.ledger.free(block)

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
            self._own_read(name, segment)
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
