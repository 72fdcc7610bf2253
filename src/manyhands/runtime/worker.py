"""The interpreter of a program: one device's part of a training step, on tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.errors import RequestError
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import (
    BatchNorm,
    Convolve,
    Deconvolve,
    Graph,
    GroupNorm,
    Input,
    Layer,
    Linear,
    Pointwise,
    Statistic,
)
from manyhands.ir.program import (
    Backward,
    Correct,
    Drop,
    Expect,
    Fold,
    Forward,
    Loss,
    Measure,
    Place,
    Prepare,
    Program,
    Receive,
    Return,
    Send,
    Square,
    Step,
    Update,
    forward_steps,
    gradient_steps,
    unshared_gradients,
)
from manyhands.ir.regions import needs, parameter_tiles
from manyhands.ir.territory import Territory
from manyhands.runtime.formats import arranged
from manyhands.runtime.kernels import Function, Work, compute
from manyhands.runtime.mail import Mail
from manyhands.runtime.norms import measure, normalise
from manyhands.runtime.parts import part
from manyhands.runtime.statistics import correct, follow, keep_sums, moments_of
from manyhands.runtime.store import Store
from manyhands.runtime.tape import Box, Root, Source, Tape, last_uses
from manyhands.runtime.transport import Transport
from manyhands.runtime.weights import Weights, refuse_split_weights

LossFunction = Callable[[tuple[Tensor, ...]], Tensor]


@dataclass
class Batch:
    """One step's data: the model's inputs, whole or what is read here of them; the loss of whole outputs."""

    inputs: Sequence[Tensor]
    loss: LossFunction
    step: int = 0
    tiles: Sequence[Tile] | None = None  # which part of each input is given; None: all of it


class Worker:
    """Runs the steps of one device.

    Weights, optimiser, `mixed` and `clip_norm` are the caller's to set before the first step; `seed` decides
    dropout.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        territory: Territory,
        weights: Weights,
        functions: dict[str, Function],
        inplace: dict[str, Function],
        transport: Transport,
    ) -> None:
        self.graph, self.layers, self.program, self.territory = graph, graph.by_name(), program, territory
        self.weights, self.functions, self.inplace, self.transport = weights, functions, inplace, transport
        self.seed = 0
        self.clip_norm: float | None = None
        self.mixed: torch.dtype | None = None  # the type in which convolutions and linear layers compute
        self.optimiser: torch.optim.Optimizer | None = None
        self.store = Store(graph, territory)
        self.mail = Mail(program, self.store, weights, transport)
        forwards = [step for step in program.steps if isinstance(step, Forward)]
        self.last_uses = {step.chunk: last_uses(step, self.layers) for step in forwards}
        self.unshared = {step.chunk: unshared_gradients(step, self.layers) for step in forwards}
        self.anchor = torch.zeros((), requires_grad=True)
        self.spent_s = [0.0] * len(program.steps)  # in each step of the program, waiting included
        used = (layer for layer in graph.layers if territory.computed[layer.name].numel or not layer.inputs)
        self.unread = {p.parameter for p in weights.pieces} - {
            p.name for layer in used for p in layer.parameters
        }

    def use_format(self, memory_format: torch.memory_format) -> None:
        """Compute with tensors that lie in this order; to be called before an optimiser takes the weights."""
        assert self.optimiser is None, "choose the format before the optimiser takes the weights"
        self.store.memory_format = memory_format
        self.weights.arrange(memory_format)

    def step(self, *batches: Batch | Callable[[], Batch]) -> float | None:
        """One training step over the sum of these batches' losses; that sum, on a device that evaluates it.

        Gradients of all but the last stay on their device and are added up there, so they travel once.
        """
        self.weights.clear_gradients(self.unread)
        alone = gradient_steps(self.program) if batches[1:] else ()
        losses = []
        for number, given in enumerate(batches, 1):
            batch = given if isinstance(given, Batch) else given()  # made in its turn: it takes memory
            self._run_all(alone if number < len(batches) else self.program.steps, batch)
            losses.append(self.store.loss)
            self.store.clear()
        return None if None in losses else sum(loss for loss in losses if loss is not None)

    @torch.no_grad()
    def predict(self, batch: Batch) -> tuple[Tensor, ...] | None:
        """The whole outputs of one batch, on a device that would evaluate the loss. Nothing is learned."""
        self.mail.settle()
        self._run_all(forward_steps(self.program), batch)
        outputs = self._outputs() if Loss() in self.program.steps else None
        self.store.clear()
        return outputs

    def _run_all(self, steps: Sequence[Step], batch: Batch) -> None:
        self.store.clear()
        self.batch, self.transport.in_flight_bytes = batch, self.territory.in_flight_bytes
        for position, step in enumerate(steps):
            start = time.perf_counter()
            self.run(step)
            if steps is self.program.steps:
                self.spent_s[position] += time.perf_counter() - start
        self.mail.end_step()

    def _outputs(self) -> tuple[Tensor, ...]:
        end = 1 + max(self.territory.segment_of.values())
        return tuple(self.store.values[self.store.buffer(name, end)].detach() for name in self.graph.outputs)

    def run(self, step: Step) -> None:
        store = self.store
        match step:
            case Prepare(layer, segment, tile):
                store.values[layer, segment] = store.empty(layer, tile)
            case Place(layer, segment, tile):
                store.margin(layer, segment, tile).copy_(store.own(layer, tile))
            case Forward(chunk, layers):
                self.forward(chunk, layers)
            case Backward(chunk):
                self.backward(chunk)
            case Measure(layer):
                source = self.layers[layer].inputs[0]
                own = store.own(source, self.territory.home[source])
                store.parts[layer][self.program.device] = measure(self.layers[layer], own)
            case Correct(layer):
                correct(store, self.layers[layer])
            case Send(message):
                self.mail.send(message)
            case Expect(message):
                self.mail.expect(message)
            case Receive(message):
                self.mail.receive(message)
            case Return(layer, segment, tile):
                self._return(layer, segment, tile)
            case Drop(layer, segment):
                store.values.pop((layer, segment))
            case Loss():
                self.loss()
            case Fold(bucket):
                self.weights.fold(self.territory.buckets[bucket], self.program.device)
            case Square():
                self.weights.settle_gradients()
                store.squares[self.program.device] = self.weights.squares()
            case Update():
                self.weights.settle_gradients()
                if self.clip_norm is not None:
                    self.weights.clip(self.clip_norm, store.squares)
                if self.optimiser is not None:
                    self.optimiser.step()
            case _:
                raise TypeError(f"this worker cannot run {step}")

    def use_optimiser(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Let `make` make an optimiser of the weights that this device owns, if it owns any."""
        parameters = self.weights.parameters()
        if not parameters:
            return
        self.optimiser = make(parameters)
        refuse_split_weights(self.optimiser, self.weights, self.graph)

    # ---- forward -------------------------------------------------------------------------------------

    def forward(self, chunk: int, layers: tuple[str, ...]) -> None:
        tape = self.store.tapes[chunk] = Tape()
        here: dict[str, tuple[Tensor, Tile]] = {}
        exports = self.territory.exports[chunk]
        for name in layers:
            layer = self.layers[name]
            result = self._compute(layer, here, tape)
            here[name] = result, self.territory.computed[name]
            if name in exports:
                self.store.values[name, None] = result.detach()
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
        if mixed := self.mixed is not None and isinstance(layer.operation, Convolve | Deconvolve | Linear):
            inputs = tuple(tensor.to(self.mixed) for tensor in inputs)
            weights = {role: tensor.to(self.mixed) for role, tensor in weights.items()}
        work = Work(layer, tile, inputs, wanted, shapes, weights, function, self.seed, self.batch.step)
        return compute(work).to(self.store.dtype(layer.name)) if mixed else compute(work)

    def _read(
        self, source: str, need: Tile, reader: Layer, here: dict[str, tuple[Tensor, Tile]], tape: Tape
    ) -> Tensor:
        """A tile of an input: from this chunk, or as a source of its tape, or of the batch or a weight."""
        if source not in here:
            here[source] = self._bring(source, reader, tape)
        tensor, tile = here[source]
        if not need.numel:
            return tensor.new_empty(need.shape)
        wanted = part(tensor, need.within(tile))
        from_batch = isinstance(self.layers[source].operation, Input)
        return arranged(wanted, self.store.memory_format) if from_batch else wanted

    def _bring(self, source: str, reader: Layer, tape: Tape) -> tuple[Tensor, Tile]:
        layer = self.layers[source]
        match layer.operation:
            case Input(position):
                tiles = self.batch.tiles
                return self.batch.inputs[position], tiles[position] if tiles else Tile.whole(layer.shape)
            case _ if layer.parameters and not layer.inputs:
                name = layer.parameters[0].name
                return self.weights.tensors[name], self.weights.tiles[name]
        buffer = self.store.buffer(source, self.territory.segment_of[reader.name])
        tile = self.store.tile_of(buffer)
        if not tile.numel:
            return torch.empty(tile.shape, dtype=self.store.dtype(source)), tile
        value = self.store.values[buffer]
        if not layer.differentiable:
            return value, tile
        box = tape.sources.setdefault(buffer, Box())
        return Source.apply(self.anchor, value, box), tile

    def _statistic(
        self, layer: Layer, here: dict[str, tuple[Tensor, Tile]], tape: Tape, weights: dict[str, Tensor]
    ) -> Tensor:
        """A norm or mean whose statistics were exchanged."""
        tile = self.territory.computed[layer.name]
        moments = moments_of(self.store, layer)
        box = tape.sums[layer.name] = Box()
        if layer.statistic is Statistic.MEAN:
            mean = moments.mean[Tile(tile.spans[:2]).within(moments.tile)].reshape(tile.shape)
            return Source.apply(self.anchor, mean, box) if layer.differentiable else mean
        operation = layer.operation
        assert isinstance(operation, BatchNorm | GroupNorm)
        x = self._read(layer.inputs[0], tile, layer, here, tape)
        home = self.territory.home[layer.inputs[0]]
        if layer.name in self.territory.tape_holds_input and home.numel:
            self.store.own_inputs[layer.name] = x.detach()[home.within(tile)]
        if isinstance(operation, BatchNorm):
            follow(self.store, layer, operation, moments, weights)
        return normalise(layer, x, tile, moments, weights, operation.eps, box)

    def loss(self) -> None:
        """Evaluate the loss on the whole outputs; of the gradient, keep this device's own tiles."""
        leaves = {
            name: value.requires_grad_(self.layers[name].differentiable)
            for name, value in dict(zip(self.graph.outputs, self._outputs(), strict=True)).items()
        }
        with torch.enable_grad():
            loss = self.batch.loss(tuple(leaves[name] for name in self.graph.outputs))
        self.store.loss = float(loss.detach())
        if loss.requires_grad:
            loss.backward()
            self._refuse_unread(leaves)
        for name, leaf in leaves.items():
            home = self.territory.home[name]
            if leaf.grad is not None and home.numel:
                self.store.add_gradient(
                    name, home, leaf.grad[home.within(Tile.whole(self.layers[name].shape))]
                )

    def _refuse_unread(self, leaves: dict[str, Tensor]) -> None:
        """On one device the weights behind an output that the loss ignores get no gradient; here, zeros."""
        if unread := [name for name, leaf in leaves.items() if leaf.requires_grad and leaf.grad is None]:
            raise RequestError(
                f"the loss does not read the output {unread[0]}. Return only what it reads, or add 0 * it."
            )

    # ---- backward ------------------------------------------------------------------------------------

    def backward(self, chunk: int) -> None:
        tape = self.store.tapes.pop(chunk)
        tape.backward(self.store.gradients)
        for buffer, box in tape.sources.items():
            gradient = box.take()
            if gradient is None:
                continue
            layer, segment = buffer
            if segment is None:
                alone = layer in self.unshared[chunk]
                self.store.add_gradient(layer, self.territory.computed[layer], gradient, unshared=alone)
            elif (layer, segment) in self.store.read_gradients:
                self.store.read_gradients[layer, segment] = (
                    self.store.read_gradients[layer, segment] + gradient
                )
            else:
                self.store.read_gradients[layer, segment] = gradient
        for name, box in tape.sums.items():
            keep_sums(self.store, self.layers[name], box)

    def _return(self, layer: str, segment: int, tile: Tile) -> None:
        gradient = self.store.read_gradients.pop((layer, segment), None)
        if gradient is not None:
            self.store.add_gradient(layer, tile, gradient[tile.within(self.territory.needed[layer, segment])])
