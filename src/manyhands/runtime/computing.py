"""Chunks of layers on one device: forward, backward, and a second time where nothing was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyhands.ir.choices import unread_convolutions, unshared_gradients
from manyhands.ir.geometry import Shape, Tile, rest_of
from manyhands.ir.graph import (
    BatchNorm,
    Convolve,
    Deconvolve,
    Graph,
    GroupNorm,
    Input,
    Layer,
    Linear,
    Parameter,
    Pointwise,
    Statistic,
)
from manyhands.ir.portions import Portion, portions
from manyhands.ir.program import (
    Forward,
    Program,
    Redo,
    Rerun,
    Slope,
)
from manyhands.ir.regions import needs, parameter_tiles, with_ends
from manyhands.ir.territory import Territory
from manyhands.runtime.formats import arranged
from manyhands.runtime.kernels import Function, Work, compute
from manyhands.runtime.late import Job, Later, Parting
from manyhands.runtime.norms import normalise
from manyhands.runtime.parts import part
from manyhands.runtime.statistics import follow, keep_sums, moments_of
from manyhands.runtime.store import Buffer, Store
from manyhands.runtime.tape import Box, Root, Source, Tape, last_uses
from manyhands.runtime.weights import Weights

LossFunction = Callable[[tuple[Tensor, ...]], Tensor]
Geometry = tuple[Tile, tuple[Shape, ...], tuple[tuple[Parameter, Tile], ...], tuple[Tile, ...]]
PartFunction = Callable[[Tensor, Tile, Tile], Tensor]  # of a part of the output, where it lies, and the whole


@dataclass
class Batch:
    """One step's data: the model's inputs, whole or what is read here of them; the loss of whole outputs.

    `part`: where the loss is a sum of parts, one of them. The parts of a whole output add up to its loss.
    """

    inputs: Sequence[Tensor]
    loss: LossFunction
    step: int = 0
    tiles: Sequence[Tile] | None = None  # which part of each input is given; None: all of it
    part: PartFunction | None = None


@dataclass
class Run:
    """One pass through the layers of a chunk.

    `keep`: it is on tape. `again`: for the second time, so statistics do not follow the batch once more.
    """

    tape: Tape
    chunk: int
    keep: bool = True
    again: bool = False
    leaves: bool = True  # are results left for later steps?
    portion: Portion | None = None  # only this; None: all
    unread: frozenset[str] = frozenset()  # whose results nobody asks for
    ahead: tuple[Tile, ...] = ()  # of the last layer's result: the rest is left for later
    here: dict[str, tuple[Tensor, Tile]] = field(default_factory=dict)
    borrowed: set[int] = field(default_factory=set)  # memory that has to stay as it is

    def region(self, name: str, whole: Tile) -> Tile:
        """What this run computes or reads of a layer; a mean that is exchanged reads nothing."""
        return whole if self.portion is None else self.portion.regions[name] & whole

    def own(self, name: str, whole: Tile) -> Tile:
        """What of it leaves this run."""
        return whole if self.portion is None else self.portion.own[name]

    def may_overwrite(self, tensor: Tensor) -> bool:
        """Will nobody else read it?"""
        return tensor.untyped_storage().data_ptr() not in self.borrowed


class Computing:
    """The layers of one device's program."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        territory: Territory,
        weights: Weights,
        functions: dict[str, Function],
        inplace: dict[str, Function],
    ) -> None:
        self.graph, self.layers, self.program, self.territory = graph, graph.by_name(), program, territory
        self.weights, self.functions, self.inplace = weights, functions, inplace
        self.seed = 0
        self.mixed: torch.dtype | None = None  # the type in which convolutions and linear layers compute
        self.batch: Batch
        self.store = Store(graph, territory)
        forwards = [step for step in program.steps if isinstance(step, Forward)]
        self.last_layer = {step.chunk: step.layers[-1] for step in forwards}
        self.last_uses = {step.chunk: last_uses(step, self.layers) for step in forwards}
        self.unshared = {step.chunk: unshared_gradients(step, self.layers) for step in forwards}
        self.late = {step.chunk for step in program.steps if isinstance(step, Slope)}
        self.read_again = territory.read_again(program, self.layers)
        self.convolving = False  # are 1x1 convolutions computed as such, and not as products of matrices?
        self.anchor = torch.zeros((), requires_grad=True)
        self.geometry: dict[str, Geometry] = {}
        self.portions: dict[Forward | Rerun | Redo, tuple[Portion, ...]] = {}

    # ---- forward -------------------------------------------------------------------------------------

    def forward(self, step: Forward) -> None:
        with torch.set_grad_enabled(step.keep and torch.is_grad_enabled()):
            for portion in self._portions(step) or (None,):
                run = Run(Tape(), step.chunk, step.keep, portion=portion, ahead=step.ahead)
                self._run(step.layers, run)
        if step.keep:
            self.store.tapes[step.chunk] = run.tape

    @torch.no_grad()
    def rerun(self, step: Rerun) -> None:
        for portion in self._portions(step) or (None,):
            self._run(step.layers, Run(Tape(), step.chunk, keep=False, again=True, portion=portion))

    def _portions(self, step: Forward | Rerun | Redo) -> tuple[Portion, ...]:
        if step not in self.portions:
            samples = step.samples if isinstance(step, Redo) else 0
            exports, computed = self.territory.exports[step.chunk], self.territory.computed
            self.portions[step] = portions(step.layers, exports, computed, self.layers, samples, step.bands)
        return self.portions[step]

    def _run(self, layers: tuple[str, ...], run: Run) -> None:
        exports = self.territory.exports[run.chunk]
        for name in layers:
            result = self._compute(self.layers[name], run)
            region = run.region(name, self.territory.computed[name])
            run.here[name] = result, region
            if name in exports:
                own = run.own(name, region)
                result = part(result, own.within(region))
                if run.leaves:
                    self._leave(name, result.detach(), own)
                if result.requires_grad:
                    box = Box()
                    run.tape.roots[name] = Root.apply(result, box), box
            del result
            for done in self.last_uses[run.chunk][name]:
                run.here.pop(done, None)

    def _leave(self, name: str, result: Tensor, tile: Tile) -> None:
        """A result, or a part of one, for later steps."""
        key, whole = (name, None), self.territory.computed[name]
        if tile == whole:
            self.store.values[key] = result
            return
        if key not in self.store.values:
            self.store.values[key] = self.store.empty(name, whole)
        self.store.values[key][tile.within(whole)] = result

    def _compute(self, layer: Layer, run: Run) -> Tensor:
        tile, shapes, pieces, wanted = self._geometry(layer, run)
        weights = {p.role: self.weights.piece(p.name, t) for p, t in pieces}
        if layer.name in self.territory.exchanges:
            return self._statistic(layer, run, weights)
        pairs = zip(layer.inputs, wanted, strict=True)
        read = [self._read(source, need, layer, run) for source, need in pairs]
        inputs, wanted = tuple(tensor for tensor, _ in read), tuple(need for _, need in read)
        function = self.functions.get(layer.name)
        if isinstance(layer.operation, Pointwise) and layer.operation.inplace and layer.name in self.inplace:
            source = layer.inputs[0]
            if not isinstance(self.layers[source].operation, Input) and run.may_overwrite(inputs[0]):
                function = self.inplace[layer.name]
        if mixed := self.mixed is not None and isinstance(layer.operation, Convolve | Deconvolve | Linear):
            inputs = tuple(tensor.to(self.mixed) for tensor in inputs)
            weights = {role: tensor.to(self.mixed) for role, tensor in weights.items()}
        work = Work(
            layer, tile, inputs, wanted, shapes, weights, function, self.seed, self.batch.step,
            again=run.again, unread=layer.name in run.unread and not mixed, later=self._later(layer, run),
            parting=None if mixed else self._parting(layer, run),
            convolving=self.convolving and not mixed,
        )  # fmt: skip
        return compute(work).to(self.store.dtype(layer.name)) if mixed else compute(work)

    def _geometry(self, layer: Layer, run: Run) -> Geometry:
        """What is computed of a layer, its inputs' shapes, and what that takes of its weights and inputs.

        It is the same in every step.
        """
        known = self.geometry.get(layer.name) if run.portion is None else None
        if known is None:
            tile = run.region(layer.name, self.territory.computed[layer.name])
            shapes = tuple(self.layers[name].shape for name in layer.inputs)
            known = tile, shapes, parameter_tiles(layer, tile), needs(layer, tile, shapes)
            if run.portion is None:
                self.geometry[layer.name] = known
        return known

    def _later(self, layer: Layer, run: Run) -> Later | None:
        """Where the gradients of a convolution's weights are left, if they are."""
        if run.chunk not in self.late or not run.keep or run.again:
            return None
        left = self.store.left[run.chunk]
        return lambda job: left.append((layer.name, job))

    def _parting(self, layer: Layer, run: Run) -> Parting | None:
        """What is computed first of a layer for whose result others wait; the rest is left to a Finish."""
        if not run.ahead or layer.name != self.last_layer[run.chunk]:
            return None
        tile = self.territory.computed[layer.name]

        def place(box: Tile) -> tuple[slice, slice]:
            samples, _, rows, _ = box.within(tile)
            return samples, rows

        def leave(job: Job) -> None:
            self.store.unfinished[run.chunk] = job

        return Parting(tuple(map(place, run.ahead)), place(rest_of(tile, run.ahead)), leave)

    def finish(self, chunk: int) -> None:
        """What forward left. Layers that compute in another type are computed all at once."""
        job = self.store.unfinished.pop(chunk, None)
        assert job is not None or self.mixed is not None, f"nothing is left of chunk {chunk}"
        if job is not None:
            job()

    def _read(self, source: str, need: Tile, reader: Layer, run: Run) -> tuple[Tensor, Tile]:
        """A tile of an input: from this chunk, or as a source of its tape, or of the batch or a weight."""
        if source not in run.here:
            run.here[source] = self._bring(source, reader, run)
        tensor, tile = run.here[source]
        if not need.numel:
            return tensor.new_empty(need.shape), need
        if isinstance(self.layers[source].operation, Input):
            return arranged(part(tensor, need.within(tile)), self.store.memory_format), need
        need = with_ends(reader, need, tile)
        return part(tensor, need.within(tile)), need

    def _bring(self, source: str, reader: Layer, run: Run) -> tuple[Tensor, Tile]:
        layer = self.layers[source]
        match layer.operation:
            case Input(position):
                tiles = self.batch.tiles
                return self.batch.inputs[position], tiles[position] if tiles else Tile.whole(layer.shape)
            case _ if layer.parameters and not layer.inputs:
                name = layer.parameters[0].name
                return self.weights.tensors[name], self.weights.tiles[name]
        buffer = self.store.buffer(source, self.territory.segment_of[reader.name])
        whole = self.store.tile_of(buffer)
        tile = run.region(source, whole)
        if not tile.numel:
            return torch.empty(tile.shape, dtype=self.store.dtype(source)), tile
        value = self.store.values[buffer][tile.within(whole)]
        if run.again or run.portion is not None or buffer in self.read_again:
            run.borrowed.add(value.untyped_storage().data_ptr())
        if not layer.differentiable:
            return value, tile
        box = run.tape.sources.setdefault(buffer, Box())
        return Source.apply(self.anchor, value, box), tile

    def _statistic(self, layer: Layer, run: Run, weights: dict[str, Tensor]) -> Tensor:
        """A norm or mean whose statistics were exchanged."""
        tile = run.region(layer.name, self.territory.computed[layer.name])
        moments = moments_of(self.store, layer)
        box = run.tape.sums[layer.name] = Box()
        if layer.statistic is Statistic.MEAN:
            mean = moments.mean[Tile(tile.spans[:2]).within(moments.tile)].reshape(tile.shape)
            return Source.apply(self.anchor, mean, box) if layer.differentiable else mean
        operation = layer.operation
        assert isinstance(operation, BatchNorm | GroupNorm)
        x, _ = self._read(layer.inputs[0], tile, layer, run)
        home = self.territory.home[layer.inputs[0]]
        kept = layer.name in self.territory.tape_holds_input and home.numel
        if kept and run.keep and not run.again:
            self.store.own_inputs[layer.name] = x.detach()[home.within(tile)]
        if isinstance(operation, BatchNorm) and not run.again:
            follow(self.store, layer, operation, moments, weights)
        return normalise(layer, x, tile, moments, weights, operation.eps, box)

    # ---- backward ------------------------------------------------------------------------------------

    def backward(self, chunk: int) -> None:
        tape, store = self.store.tapes.pop(chunk), self.store
        tape.backward({name: store.gradients.pop(name) for name in tape.roots if name in store.gradients})
        self._hand_on(chunk, tape)

    def slope(self, chunk: int) -> None:
        """What backward left for later."""
        left = self.store.left.pop(chunk, [])
        while left:  # what a job holds is free before the next begins
            self._do(*left.pop(0))

    def _do(self, layer: str, job: Job) -> None:
        job()

    def _hand_on(self, chunk: int, tape: Tape) -> None:
        """What flowed back into earlier chunks and into statistics."""
        for buffer, box in tape.sources.items():
            gradient = box.take()
            if gradient is None:
                continue
            layer, segment = buffer
            if segment is None:
                alone = layer in self.unshared[chunk]
                self.store.add_gradient(layer, self.territory.computed[layer], gradient, unshared=alone)
            elif (layer, segment) in self.store.read_gradients:
                self._own_read(layer, segment).add_(gradient)
            else:
                self.store.read_gradients[layer, segment] = gradient
        for name, box in tape.sums.items():
            keep_sums(self.store, self.layers[name], self.territory.computed[name], box)

    def redo(self, step: Redo) -> None:
        """Compute a chunk once more and take its gradients back at once, one portion after another."""
        self._keep_own_inputs(step)
        store, unread = self.store, frozenset(unread_convolutions(step, self.layers))
        names = [name for name in self.territory.exports[step.chunk] if name in store.gradients]
        gradients = {name: store.gradients.pop(name) for name in names}
        for portion in self._portions(step) or (None,):
            run = Run(Tape(), step.chunk, again=True, leaves=False, portion=portion, unread=unread)
            self._run(step.layers, run)
            run.here.clear()
            if portion is None:
                run.tape.backward(gradients)
                self._hand_on(step.chunk, run.tape)
                return
            run.tape.backward({name: self._some(name, whole, run) for name, whole in gradients.items()})
            self._add_some(run)

    def _some(self, name: str, whole: Tensor, run: Run) -> Tensor:
        tile = self.territory.computed[name]
        return whole[run.own(name, tile).within(tile)]

    def _add_some(self, run: Run) -> None:
        """What flowed back from one portion."""
        for buffer, box in run.tape.sources.items():
            gradient = box.take()
            if gradient is not None:
                self._add(buffer, run.region(buffer[0], self.store.tile_of(buffer)), gradient)
        for name, box in run.tape.sums.items():
            keep_sums(self.store, self.layers[name], run.region(name, self.territory.computed[name]), box)

    def _add(self, buffer: Buffer, tile: Tile, gradient: Tensor) -> None:
        layer, segment = buffer
        if segment is None:
            self.store.add_gradient(layer, tile, gradient)
            return
        self._own_read(layer, segment)[tile.within(self.store.tile_of(buffer))] += gradient

    def _own_read(self, layer: str, segment: int) -> Tensor:
        """The gradient of a tile that was put together, to be added to in place."""
        store, key = self.store, (layer, segment)
        held = store.read_gradients.get(key)
        if held is None:
            held = store.zeros(layer, store.tile_of(key))
        elif key not in store.own_reads:
            held = held.clone()
        store.own_reads.add(key)
        store.read_gradients[key] = held
        return held

    def _keep_own_inputs(self, step: Redo) -> None:
        """Gradients of norms are corrected after this chunk, when what it read has been dropped."""
        for name in step.layers:
            layer = self.layers[name]
            if name not in self.territory.exchanges or layer.statistic is Statistic.MEAN:
                continue
            source = layer.inputs[0]
            home = self.territory.home[source]
            if name in self.territory.tape_holds_input and home.numel:
                buffer = self.store.buffer(source, self.territory.segment_of[name])
                value = self.store.values[buffer]
                self.store.own_inputs[name] = value[home.within(self.store.tile_of(buffer))]
