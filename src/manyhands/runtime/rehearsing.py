"""One device's part of a plan, timed step by step and layer by layer; among the others, or all alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from manyhands.ir.graph import Layer
from manyhands.ir.profile import LayerSample, StepSample, fractions, kind_of
from manyhands.ir.program import Backward, Finish, Redo, Step
from manyhands.ir.sizes import Sizes
from manyhands.runtime.computing import Batch, Run
from manyhands.runtime.late import Job
from manyhands.runtime.transport import Pending
from manyhands.runtime.worker import Worker

Clock = Callable[[], float]


class Silence:
    """A transport to nowhere: what is sent is forgotten, what is expected is zeros and there at once."""

    def __init__(self) -> None:
        self.sent_bytes, self.in_flight_bytes = 0, 0
        self.fresh: list[Tensor] = []  # expected, and not filled yet

    def send(self, tensor: Tensor, target: str, tag: int, *, patient: bool = False) -> None:
        self.sent_bytes += tensor.numel() * tensor.element_size()

    def expect(self, buffer: Tensor, source: str, tag: int, *, patient: bool = False) -> Pending:
        self.fresh.append(buffer)
        return _Here()

    def flush(self) -> None:
        pass

    def fill(self) -> None:
        """Do what the network would do meanwhile, at nobody's expense."""
        for buffer in self.fresh:
            buffer.zero_()
        self.fresh.clear()


class _Here:
    def wait(self) -> None:
        pass


@dataclass
class Round:
    """The times of one training step: of layers by name, of steps by position."""

    begin_s: float = 0.0
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)  # of Forward and Backward, only what no layer took

    @property
    def seconds(self) -> float:
        return self.begin_s + sum((*self.forward.values(), *self.backward.values(), *self.steps))


class Rehearsal(Worker):
    """A worker that notes the seconds of everything it does.

    Its clock should stand still while it waits for others, or its transport be a `Silence`.
    """

    clock: Clock = time.perf_counter

    def rehearse(self, batch: Batch) -> Round:
        """The times of one training step."""
        self.round = Round()
        self.started = self.clock()
        self.step(batch)
        return self.round

    def run(self, step: Step) -> None:
        if isinstance(self.transport, Silence):
            self.transport.fill()
        start = self.clock()
        if not self.round.steps:
            self.round.begin_s = start - self.started
        self.in_layers_s, self.marked, self.mark_s = 0.0, "", start
        super().run(step)
        stop = self.clock()
        assert not isinstance(step, Redo | Finish), "what is computed twice or in parts is not rehearsed"
        if isinstance(step, Backward):
            self._mark("", stop)
        self.round.steps.append(stop - start - self.in_layers_s)

    def _compute(self, layer: Layer, run: Run) -> Tensor:
        start = self.clock()
        result = super()._compute(layer, run)
        self.round.forward[layer.name] = seconds = self.clock() - start
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(self._marker(layer.name))
        self.in_layers_s += seconds
        return result

    def _do(self, layer: str, job: Job) -> None:
        start = self.clock()
        super()._do(layer, job)
        seconds = self.clock() - start
        self.round.backward[layer] = self.round.backward.get(layer, 0.0) + seconds
        self.in_layers_s += seconds

    def _marker(self, layer: str) -> Callable[..., Any]:
        """A hook that notes when the gradient of a layer's result is ready."""

        def hook(*_: Any) -> None:
            self._mark(layer, self.clock())

        return hook

    def _mark(self, layer: str, now: float) -> None:
        """From one mark to the next, autograd works on the layer marked first."""
        if self.marked:
            passed = now - self.mark_s
            self.round.backward[self.marked] = self.round.backward.get(self.marked, 0.0) + passed
            self.in_layers_s += passed
        self.marked, self.mark_s = layer, now

    # ---- what was found ------------------------------------------------------------------------------

    def samples(self, rounds: list[Round]) -> tuple[list[LayerSample], list[StepSample]]:
        """One a layer, and one a step for what no layer took: medians of the rounds.

        Something lasts longer than usual in every round, so medians add up to less than a usual round; they
        are stretched to last as long.
        """
        usual = _usual(rounds)
        stretch = median(r.seconds for r in rounds) / usual.seconds
        layers = []
        for name, forward_s in usual.forward.items():
            layer, tile = self.layers[name], self.territory.computed[name]
            kind, parts = kind_of(layer, name in self.territory.exchanges), fractions(layer.shape, tile.shape)
            layers.append(LayerSample(kind, parts, stretch * forward_s, stretch * usual.backward[name]))
        own = self.territory
        owned = sum(weight.numel() * weight.element_size() for weight in self.weights.parameters())
        part = None if own.evaluation is None else own.evaluation.tile
        regions = own.home, own.computed, own.needed
        sizes = Sizes(self.graph, self.program.device, *regions, owned, own.buckets, part)
        steps = [StepSample("begin", 0, stretch * usual.begin_s)]
        for step, seconds in zip(self.program.steps, usual.steps, strict=True):
            steps.append(StepSample(*sizes.of(step), stretch * seconds))
        return layers, steps


def _usual(rounds: list[Round]) -> Round:
    """The median of everything."""
    names = rounds[0].forward
    return Round(
        median(r.begin_s for r in rounds),
        {name: median(r.forward[name] for r in rounds) for name in names},
        {name: median(r.backward.get(name, 0.0) for r in rounds) for name in names},
        [median(seconds) for seconds in zip(*(r.steps for r in rounds), strict=True)],
    )
