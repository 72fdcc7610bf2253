"""The interpreter of a program: one device's part of a training step, on tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from manyhands.errors import RequestError
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import (
    Graph,
)
from manyhands.ir.program import (
    Backward,
    Correct,
    Drop,
    Expect,
    Finish,
    Fold,
    Forward,
    Keep,
    Loss,
    Measure,
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
    forward_steps,
    gradient_steps,
)
from manyhands.ir.territory import Territory
from manyhands.runtime.computing import Batch, Computing
from manyhands.runtime.kernels import Function
from manyhands.runtime.mail import Mail
from manyhands.runtime.norms import measure
from manyhands.runtime.products import convolutions_are_faster
from manyhands.runtime.statistics import correct
from manyhands.runtime.transport import Transport
from manyhands.runtime.weights import Weights, refuse_split_weights


class Worker(Computing):
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
        super().__init__(graph, program, territory, weights, functions, inplace)
        self.transport = transport
        self.clip_norm: float | None = None
        self.optimiser: torch.optim.Optimizer | None = None
        self.mail = Mail(program, self.store, weights, transport)
        self.spent_s = [0.0] * len(program.steps)  # in each step of the program, waiting included
        used = (layer for layer in graph.layers if territory.computed[layer.name].numel or not layer.inputs)
        self.unread = {p.parameter for p in weights.pieces} - {
            p.name for layer in used for p in layer.parameters
        }

    def use_format(self, memory_format: torch.memory_format, convolving: bool | None = None) -> None:
        """Compute with tensors that lie in this order; to be called before an optimiser takes the weights.

        `convolving`: 1x1 convolutions with the channels last are computed as such; None: if that is faster.
        """
        assert self.optimiser is None, "choose the format before the optimiser takes the weights"
        self.store.memory_format = memory_format
        if convolving is None and memory_format is torch.channels_last:
            convolving = convolutions_are_faster(self.graph, self.territory)
        self.convolving = bool(convolving)
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
            losses.append(self._total_loss())
            self.store.clear()
        return None if None in losses else sum(loss for loss in losses if loss is not None)

    @torch.no_grad()
    def predict(self, batch: Batch) -> tuple[Tensor, ...] | None:
        """The whole outputs of one batch, on a device that would evaluate the loss. Nothing is learned."""
        assert self.territory.evaluation is None, "of a plan whose loss has parts nobody holds whole outputs"
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
        """The whole outputs, or the part on which this device evaluates its part of the loss."""
        end, part = 1 + max(self.territory.segment_of.values()), self.territory.evaluation
        buffers = [self.store.buffer(name, end) for name in self.graph.outputs]
        found = tuple(self.store.values[buffer].detach() for buffer in buffers)
        return found if part is None else (found[0][part.tile.within(self.store.tile_of(buffers[0]))],)

    def _total_loss(self) -> float | None:
        """The loss, on a device that evaluates it or a part of it: parts are added up in device order."""
        part, told = self.territory.evaluation, self.store.losses
        tellers = (self.program.device,) if part is None else part.tellers
        return sum(float(told[device]) for device in tellers) if told else None

    def run(self, step: Step) -> None:
        store = self.store
        match step:
            case Prepare(layer, segment, tile):
                store.values[layer, segment] = store.empty(layer, tile)
            case Place(layer, segment, tile):
                store.margin(layer, segment, tile).copy_(store.own(layer, tile))
            case Forward():
                self.forward(step)
            case Finish(chunk):
                self.finish(chunk)
            case Backward(chunk):
                self.backward(chunk)
            case Slope(chunk):
                self.slope(chunk)
            case Rerun():
                self.rerun(step)
            case Redo():
                self.redo(step)
            case Keep(layer, segment, tile):
                store.aside[layer, segment, tile] = store.margin(layer, segment, tile).clone()
            case Restore(layer, segment, tile):
                store.margin(layer, segment, tile).copy_(store.aside.pop((layer, segment, tile)))
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

    def loss(self) -> None:
        """Evaluate the loss, or this device's part of it; of the gradient, keep this device's own tiles."""
        part = self.territory.evaluation
        leaves = {
            name: value.requires_grad_(self.layers[name].differentiable)
            for name, value in dict(zip(self.graph.outputs, self._outputs(), strict=True)).items()
        }
        with torch.enable_grad():
            if part is None:
                loss = self.batch.loss(tuple(leaves[name] for name in self.graph.outputs))
            else:
                loss = self._part_of_loss(part.tile, *leaves.values())
        if part is None or self.program.device in part.tellers:
            self.store.losses[self.program.device] = loss.detach().double()
        if loss.requires_grad:
            loss.backward()
            self._refuse_unread(leaves)
        for name, leaf in leaves.items():
            home, seen = self.territory.home[name], Tile.whole(self.layers[name].shape)
            if leaf.grad is not None and home.numel:
                seen = seen if part is None else part.tile
                self.store.add_gradient(name, home, leaf.grad[home.within(seen)])

    def _part_of_loss(self, tile: Tile, output: Tensor) -> Tensor:
        if self.batch.part is None:
            raise RequestError("this plan evaluates the loss in parts, and this loss has none. Plan it anew.")
        return self.batch.part(output, tile, Tile.whole(self.layers[self.graph.outputs[0]].shape))

    def _refuse_unread(self, leaves: dict[str, Tensor]) -> None:
        """On one device the weights behind an output that the loss ignores get no gradient; here, zeros."""
        if unread := [name for name, leaf in leaves.items() if leaf.requires_grad and leaf.grad is None]:
            raise RequestError(
                f"the loss does not read the output {unread[0]}. Return only what it reads, or add 0 * it."
            )

    def _return(self, layer: str, segment: int, tile: Tile) -> None:
        self.store.own_reads.discard((layer, segment))
        gradient = self.store.read_gradients.pop((layer, segment), None)
        if gradient is not None:
            self.store.add_gradient(layer, tile, gradient[tile.within(self.territory.needed[layer, segment])])
