"""The interpreter of a program: one device's part of a training step, on tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import BatchNorm, Graph, GroupNorm, Input, Layer, Pointwise, Statistic
from manyhands.ir.program import (
    Backward,
    Collect,
    Content,
    Correct,
    Drop,
    Expect,
    Forward,
    Loss,
    Measure,
    Message,
    Place,
    Prepare,
    Program,
    Receive,
    Return,
    Send,
    Step,
    Sum,
    Update,
)
from manyhands.ir.regions import needs, parameter_tiles
from manyhands.ir.territory import Territory
from manyhands.runtime.kernels import Function, Work, compute, count_batch
from manyhands.runtime.norms import Moments, combine, correction, local_sums, measure, normalise
from manyhands.runtime.tape import Box, Root, Source, Tape
from manyhands.runtime.transport import Pending, Transport
from manyhands.runtime.weights import Weights

Buffer = tuple[str, int | None]
LossFunction = Callable[[tuple[Tensor, ...]], Tensor]


@dataclass
class Batch:
    """One step's data: the model's inputs (whole), and the loss of its outputs (whole)."""

    inputs: Sequence[Tensor]
    loss: LossFunction
    step: int = 0


@dataclass
class State:
    """What is alive on this device in the middle of a step."""

    values: dict[Buffer, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of results, on the computed tile
    borrowed: set[str] = field(default_factory=set)  # gradients that somebody else may hold too
    read_gradients: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # of tiles put together
    tapes: dict[int, Tape] = field(default_factory=dict)
    parts: defaultdict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    sums: defaultdict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    moments: dict[str, Moments] = field(default_factory=dict)
    own_inputs: dict[str, Tensor] = field(default_factory=dict)  # a norm's input, on this device's home tile
    arriving: dict[int, tuple[Pending, Tensor]] = field(default_factory=dict)
    adding: dict[int, tuple[Pending, Tensor, Sum]] = field(default_factory=dict)
    loss: float | None = None


class Worker:
    """Runs the steps of one device; `update` is called at the end of each training step."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        territory: Territory,
        weights: Weights,
        functions: dict[str, Function],
        inplace: dict[str, Function],
        transport: Transport,
        *,
        update: Callable[[], None] = lambda: None,
        seed: int = 0,
    ) -> None:
        self.graph, self.layers, self.program, self.territory = graph, graph.by_name(), program, territory
        self.weights, self.functions, self.inplace, self.transport = weights, functions, inplace, transport
        self.update, self.seed = update, seed
        self.last_uses = {s.chunk: self._last_uses(s) for s in program.steps if isinstance(s, Forward)}
        self.anchor = torch.zeros((), requires_grad=True)
        self.state = State()

    def step(self, batch: Batch) -> float | None:
        """One training step; the loss, on a device that evaluates it."""
        self.state, self.batch = State(), batch
        for parameter in self.weights.parameters().values():
            parameter.grad = None
        for step in self.program.steps:
            self.run(step)
        self.transport.flush()
        return self.state.loss

    def run(self, step: Step) -> None:
        state = self.state
        match step:
            case Prepare(layer, segment, tile):
                state.values[layer, segment] = torch.empty(tile.shape, dtype=self._dtype(layer))
            case Place(layer, segment, tile):
                whole = self.territory.needed[layer, segment]
                state.values[layer, segment][tile.within(whole)] = self._own(layer, tile)
            case Forward(chunk, layers):
                self.forward(chunk, layers)
            case Backward(chunk):
                self.backward(chunk)
            case Measure(layer):
                source = self.layers[layer].inputs[0]
                own = self._own(source, self.territory.home[source])
                state.parts[layer][self.program.device] = measure(self.layers[layer], own)
            case Correct(layer):
                self.correct(self.layers[layer])
            case Send(message):
                self.transport.send(self._outgoing(message), message.target, message.tag)
            case Expect(message):
                self._expect(message)
            case Receive(message):
                self._receive(message)
            case Return(layer, segment, tile):
                self._return(layer, segment, tile)
            case Drop(layer, segment):
                state.values.pop((layer, segment), None)
            case Loss():
                self.loss()
            case Sum():
                pieces = [self.weights.gradient(p.parameter, p.tile).reshape(-1) for p in step.pieces]
                total = torch.cat(pieces)
                state.adding[step.bucket] = self.transport.sum(total, step.among), total, step
                for piece in step.pieces:  # the sum takes their place
                    if self.weights.tiles[piece.parameter] == piece.tile:
                        self.weights.tensors[piece.parameter].grad = None
            case Collect(bucket):
                self._collect(bucket)
            case Update():
                self.update()
            case _:
                raise TypeError(f"this worker cannot run {step}")

    # ---- values --------------------------------------------------------------------------------------

    def _dtype(self, layer: str) -> torch.dtype:
        dtype = getattr(torch, self.layers[layer].dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _own(self, layer: str, tile: Tile) -> Tensor:
        """A tile of what this device itself computed."""
        return self.state.values[layer, None][tile.within(self.territory.computed[layer])]

    def _buffer(self, source: str, segment: int) -> Buffer:
        return source, segment if (source, segment) in self.territory.needed else None

    def _tile_of(self, buffer: Buffer) -> Tile:
        layer, segment = buffer
        return self.territory.computed[layer] if segment is None else self.territory.needed[layer, segment]

    # ---- forward -------------------------------------------------------------------------------------

    def _last_uses(self, step: Forward) -> dict[str, set[str]]:
        """After which layer of a chunk each tensor is no longer read in it."""
        last: dict[str, str] = {}
        for name in step.layers:
            last |= {source: name for source in self.layers[name].inputs}
            last.setdefault(name, name)
        frees: dict[str, set[str]] = {name: set() for name in step.layers}
        for tensor, name in last.items():
            frees[name].add(tensor)
        return frees

    def forward(self, chunk: int, layers: tuple[str, ...]) -> None:
        tape = self.state.tapes[chunk] = Tape()
        here: dict[str, tuple[Tensor, Tile]] = {}
        exports = self.territory.exports[chunk]
        for name in layers:
            layer = self.layers[name]
            result = self._compute(layer, here, tape)
            here[name] = result, self.territory.computed[name]
            if name in exports:
                self.state.values[name, None] = result.detach()
                if result.requires_grad:
                    box = Box()
                    tape.roots[name] = Root.apply(result, box), box
            del result
            for done in self.last_uses[chunk][name]:
                here.pop(done, None)

    def _compute(self, layer: Layer, here: dict[str, tuple[Tensor, Tile]], tape: Tape) -> Tensor:
        tile, shapes = self.territory.computed[layer.name], tuple(self.layers[n].shape for n in layer.inputs)
        pieces = parameter_tiles(layer, tile)
        weights = {p.role: self.weights.piece(p.name, t) for p, t in pieces}
        if layer.name in self.territory.exchanges:
            return self._statistic(layer, here, tape, weights)
        wanted = needs(layer, tile, shapes)
        inputs = tuple(
            self._read(source, need, layer, here, tape)
            for source, need in zip(layer.inputs, wanted, strict=True)
        )
        function = self.functions.get(layer.name)
        if isinstance(layer.operation, Pointwise) and layer.operation.inplace and layer.name in self.inplace:
            source = layer.inputs[0]
            if not isinstance(self.layers[source].operation, Input):
                function = self.inplace[layer.name]
        work = Work(
            layer, tile, inputs, wanted, shapes, weights, function, self.seed, self.batch.step
        )
        return compute(work)

    def _read(
        self, source: str, need: Tile, reader: Layer, here: dict[str, tuple[Tensor, Tile]], tape: Tape
    ) -> Tensor:
        """A tile of an input: from this chunk, or as a source of its tape, or of the batch or a weight."""
        if source not in here:
            here[source] = self._bring(source, reader, tape)
        tensor, tile = here[source]
        if tile == need:
            return tensor
        if not need.numel:
            return tensor.new_empty(need.shape)
        return tensor[need.within(tile)]

    def _bring(self, source: str, reader: Layer, tape: Tape) -> tuple[Tensor, Tile]:
        layer = self.layers[source]
        match layer.operation:
            case Input(position):
                return self.batch.inputs[position], Tile.whole(layer.shape)
            case _ if layer.parameters and not layer.inputs:
                name = layer.parameters[0].name
                return self.weights.tensors[name], self.weights.tiles[name]
        buffer = self._buffer(source, self.territory.segment_of[reader.name])
        tile = self._tile_of(buffer)
        if not tile.numel:
            return torch.empty(tile.shape, dtype=self._dtype(source)), tile
        value = self.state.values[buffer]
        if not layer.differentiable:
            return value, tile
        box = tape.sources.setdefault(buffer, Box())
        return Source.apply(self.anchor, value, box), tile

    def _statistic(
        self, layer: Layer, here: dict[str, tuple[Tensor, Tile]], tape: Tape, weights: dict[str, Tensor]
    ) -> Tensor:
        """A norm or mean whose statistics were exchanged."""
        tile, exchange = self.territory.computed[layer.name], self.territory.exchanges[layer.name]
        moments = self._moments(layer)
        box = tape.sums[layer.name] = Box()
        if layer.statistic is Statistic.MEAN:
            mean = moments.mean[Tile(tile.spans[:2]).within(moments.tile)].reshape(tile.shape)
            return Source.apply(self.anchor, mean, box) if layer.differentiable else mean
        operation = layer.operation
        assert isinstance(operation, BatchNorm | GroupNorm)
        x = self._read(layer.inputs[0], tile, layer, here, tape)
        home = self.territory.home[layer.inputs[0]]
        if layer.name in self.territory.tape_holds_input and home.numel:
            self.state.own_inputs[layer.name] = x.detach()[home.within(tile)]
        if isinstance(operation, BatchNorm):
            self._follow(layer, operation, moments, tile, weights)
        return normalise(layer, x, tile, moments, weights, operation.eps, box)

    def _moments(self, layer: Layer) -> Moments:
        """The whole statistics of a layer, put together when first asked for."""
        if layer.name not in self.state.moments:
            exchange, parts = self.territory.exchanges[layer.name], self.state.parts.pop(layer.name)
            mine = self.program.device
            for share in exchange.shares:
                if share.device == mine and exchange.own is not None:
                    parts[mine] = parts[mine][(slice(None), *share.tile.within(exchange.own.tile))]
            self.state.moments[layer.name] = combine(layer, exchange, parts, next(iter(parts.values())))
        return self.state.moments[layer.name]

    def _follow(
        self, layer: Layer, operation: BatchNorm, moments: Moments, tile: Tile, weights: dict[str, Tensor]
    ) -> None:
        """Running statistics follow those of this batch."""
        momentum = count_batch(weights, operation)
        if "running_mean" not in weights:
            return
        mean, variance = moments.at(Tile((moments.tile.spans[0], tile.spans[1])))
        total = self.territory.exchanges[layer.name].total
        weights["running_mean"].lerp_(mean[0], momentum)
        weights["running_var"].lerp_(variance[0] * (total / max(total - 1, 1)), momentum)

    def loss(self) -> None:
        """Evaluate the loss on the whole outputs; of the gradient, keep this device's own tiles."""
        end = 1 + max(self.territory.segment_of.values())
        names = dict.fromkeys(self.graph.outputs)
        leaves = {}
        for name in names:
            value = self.state.values[self._buffer(name, end)].detach()
            leaves[name] = value.requires_grad_(self.layers[name].differentiable)
        with torch.enable_grad():
            loss = self.batch.loss(tuple(leaves[name] for name in self.graph.outputs))
        self.state.loss = float(loss.detach())
        if loss.requires_grad:
            loss.backward()
        for name, leaf in leaves.items():
            home = self.territory.home[name]
            if leaf.grad is not None and home.numel:
                self._add_gradient(name, home, leaf.grad[home.within(Tile.whole(self.layers[name].shape))])

    # ---- backward ------------------------------------------------------------------------------------

    def _add_gradient(self, layer: str, tile: Tile, value: Tensor) -> None:
        """Add to the gradient of what this device computed of a layer."""
        computed = self.territory.computed[layer]
        held = self.state.gradients.get(layer)
        if held is None and tile == computed:
            self.state.gradients[layer] = value
            self.state.borrowed.add(layer)
            return
        if held is None:
            held = value.new_zeros(computed.shape)
        elif layer in self.state.borrowed:
            held = held.clone()
        self.state.borrowed.discard(layer)
        held[tile.within(computed)] += value
        self.state.gradients[layer] = held

    def backward(self, chunk: int) -> None:
        tape = self.state.tapes.pop(chunk)
        tape.backward(self.state.gradients)
        for buffer, box in tape.sources.items():
            gradient = box.take()
            if gradient is None:
                continue
            layer, segment = buffer
            if segment is None:
                self._add_gradient(layer, self.territory.computed[layer], gradient)
            elif (layer, segment) in self.state.read_gradients:
                self.state.read_gradients[layer, segment] = self.state.read_gradients[layer, segment] + gradient
            else:
                self.state.read_gradients[layer, segment] = gradient
        for name, box in tape.sums.items():
            self._keep_sums(name, box)

    def _keep_sums(self, name: str, box: Box) -> None:
        layer, exchange = self.layers[name], self.territory.exchanges[name]
        moments = self.state.moments[name]
        tile = self.territory.computed[name]
        self.state.sums[name][self.program.device] = local_sums(layer, exchange, tile, box, moments.mean)

    def correct(self, layer: Layer) -> None:
        name, source = layer.name, layer.inputs[0]
        exchange, home = self.territory.exchanges[name], self.territory.home[source]
        parts = self.state.sums.pop(name, {})
        if self.program.device in parts:
            own = next((s.tile for s in exchange.readers if s.device == self.program.device), None)
            assert exchange.known is not None
            mine = parts.pop(self.program.device)
            if own is not None:
                parts[self.program.device] = mine[(slice(None), *own.within(exchange.known))]
        if not parts:
            return
        x, moments = None, None
        if layer.statistic is not Statistic.MEAN:
            x = self.state.own_inputs.pop(name, None)
            x = self._own(source, home) if x is None else x
            moments = self._moments(layer)
        eps = layer.operation.eps if isinstance(layer.operation, BatchNorm | GroupNorm) else 0.0
        value = correction(layer, exchange, parts, x, moments, eps)
        self._add_gradient(source, home, value.expand(home.shape))

    def _return(self, layer: str, segment: int, tile: Tile) -> None:
        gradient = self.state.read_gradients.pop((layer, segment), None)
        if gradient is not None:
            self._add_gradient(layer, tile, gradient[tile.within(self.territory.needed[layer, segment])])

    # ---- messages ------------------------------------------------------------------------------------

    def _outgoing(self, message: Message) -> Tensor:
        """What to send: a copy of its own, so that what it was taken from may change or go."""
        state, layer = self.state, message.layer
        match message.content:
            case Content.VALUE:
                return self._own(layer, message.tile).clone(memory_format=torch.contiguous_format)
            case Content.GRADIENT:
                gradient = state.read_gradients.get((layer, message.segment))
                if gradient is None:
                    return torch.zeros(message.tile.shape, dtype=self._dtype(layer))
                part = message.tile.within(self.territory.needed[layer, message.segment])
                return gradient[part].clone(memory_format=torch.contiguous_format)
            case Content.MOMENTS:
                own = self.territory.exchanges[layer].own
                assert own is not None
                part = (slice(None), *message.tile.within(own.tile))
                return state.parts[layer][self.program.device][part].clone()
            case Content.SUMS:
                known = self.territory.exchanges[layer].known
                assert known is not None
                part = (slice(None), *message.tile.within(known))
                return state.sums[layer][self.program.device][part].clone()

    def _expect(self, message: Message) -> None:
        dtype = self._dtype(message.layer)
        if message.content in (Content.VALUE, Content.GRADIENT):
            shape: tuple[int, ...] = message.tile.shape
        else:
            rows = 1 if self.layers[message.layer].statistic is Statistic.MEAN else 2
            shape = (rows, *message.tile.shape)
        buffer = None
        if message.content is Content.VALUE:  # straight into the margin, where its memory is in one piece
            whole = self.territory.needed[message.layer, message.segment]
            margin = self.state.values[message.layer, message.segment][message.tile.within(whole)]
            buffer = margin if margin.is_contiguous() else None
        if buffer is None:
            buffer = torch.empty(shape, dtype=dtype)
        self.state.arriving[message.tag] = self.transport.expect(buffer, message.source, message.tag), buffer

    def _receive(self, message: Message) -> None:
        pending, buffer = self.state.arriving.pop(message.tag)
        pending.wait()
        layer, segment, tile = message.layer, message.segment, message.tile
        match message.content:
            case Content.VALUE:
                whole = self.territory.needed[layer, segment]
                margin = self.state.values[layer, segment][tile.within(whole)]
                if margin.data_ptr() != buffer.data_ptr():
                    margin.copy_(buffer)
            case Content.GRADIENT:
                self._add_gradient(layer, tile, buffer)
            case Content.MOMENTS:
                self.state.parts[layer][message.source] = buffer
            case Content.SUMS:
                self.state.sums[layer][message.source] = buffer

    def _collect(self, bucket: int) -> None:
        pending, total, step = self.state.adding.pop(bucket)
        pending.wait()
        sizes = [piece.tile.numel for piece in step.pieces]
        for piece, value in zip(step.pieces, total.split(sizes), strict=True):
            self.weights.set_gradient(piece.parameter, piece.tile, value.view(piece.tile.shape))
