"""One device of a training run: steps, predictions and the whole state, above a plan and a transport."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph, Input
from manyhands.ir.plan import Plan
from manyhands.ir.program import Loss as LossStep
from manyhands.planning.feeding import Feed, Feeding, feed_plan
from manyhands.planning.lowering import Lowered
from manyhands.planning.weights import kept_pieces
from manyhands.runtime.computing import Batch, PartFunction
from manyhands.runtime.feeding import Feeder
from manyhands.runtime.formats import faster_format
from manyhands.runtime.state import Keeping, State, Stored, collect, restore
from manyhands.runtime.transport import Transport
from manyhands.runtime.weights import Weights
from manyhands.runtime.worker import Worker
from manyhands.tracing.graphs import trace
from manyhands.training.means import Loss, MeanOf, axes_of

Given = tuple[Sequence[Tensor], Tensor | None]  # inputs and targets


@dataclass(frozen=True)
class Settings:
    """How to train: what does not depend on the plan."""

    loss: Loss
    seed: int = 0
    clip_norm: float | None = None
    mixed: torch.dtype | None = None  # convolutions and linear layers compute in this type
    feed: Feed = Feed.REPLICATED
    channels_last: bool | None = None  # None: whichever is faster here, measured now
    convolving: bool | None = None  # are 1x1 convolutions computed as such? The same


class Whole(dict[str, Tensor]):
    """A model's own tensors, to be read in parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(
            {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
        )

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self[name][index]


class Trainer:
    """This device's part in training one model by one plan.

    Every device makes one from the same model, plan and settings; then all call the same methods in the
    same order. The loss is known on every device that holds outputs, or a part of them.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Sequence[Tensor],
        plan: Plan,
        transport: Transport,
        device: str,
        settings: Settings,
    ) -> None:
        self.plan, self.device, self.settings, self.transport = plan, device, settings, transport
        example = tuple(tensor.to("meta") for tensor in example)
        traced = trace(model.train(), example)
        self.graph = traced.graph
        if not set(plan.loss) <= set(axes_of(settings.loss)):
            raise RequestError(
                "this plan evaluates the loss in parts, which cannot be of this one. Plan it anew."
            )
        self.lowered = api.lower(traced.graph, plan, clip=settings.clip_norm is not None)
        self.worker = api.make_worker(traced, self.lowered, model, device, transport)
        self.channels_last = settings.channels_last
        if self.channels_last is None:
            faster = faster_format(traced.graph, self.worker.territory, _type(traced.graph))
            self.channels_last = faster is torch.channels_last
        order = torch.channels_last if self.channels_last else torch.contiguous_format
        self.worker.use_format(order, settings.convolving)
        self.worker.seed, self.worker.clip_norm = settings.seed, settings.clip_norm
        self.worker.mixed = settings.mixed
        self.feeding = feed_plan(self.lowered, settings.feed)
        self.feeder = _feeder(self.feeding, device, transport, traced.graph)
        self._untrained = _hollow(model), example
        self._aliases, self._still = _never_read(model, traced.graph)
        self._evaluator: Worker | None = None
        self.passes = 0  # batches seen: decides dropout

    @property
    def samples(self) -> int:
        """How many samples of each batch this device brings."""
        return len(self.feeding.samples[self.device])

    @property
    def output_holder(self) -> str:
        """The first device that has the whole outputs in evaluation."""
        return next(p.device for p in self.lowered.programs if LossStep() in p.steps)

    @property
    def holds_outputs(self) -> bool:
        return LossStep() in self.worker.program.steps

    def step(self, *batches: Given | Callable[[], Given], cut: bool = False) -> float | None:
        """One optimiser step over batches of (inputs, targets), their losses averaged; that average.

        A batch may be a function that makes it when its turn comes. `cut`: replicated inputs are given as
        the tile that is read here, not whole.
        """
        return self.worker.step(*(self._batch(given, 1 / len(batches), cut) for given in batches))

    def _batch(self, given: Given | Callable[[], Given], weight: float, cut: bool) -> Callable[[], Batch]:
        def make() -> Batch:
            inputs, targets = given() if callable(given) else given
            tiles, everything = self._bring(inputs, targets, cut)
            self.passes += 1
            given_loss = self.settings.loss, everything, weight
            loss, part = _weighed(*given_loss), _weighed_part(*given_loss)
            return Batch(tiles, loss, self.passes - 1, self.worker.territory.inputs, part)

        return make

    def predict(
        self, inputs: Sequence[Tensor], targets: Tensor | None, *, cut: bool = False
    ) -> tuple[Any, Tensor]:
        """Outputs (None where this device does not hold them) and targets of a batch, in evaluation mode."""
        self.worker.mail.settle()
        evaluator = self._evaluating()
        tiles, everything = self._bring(inputs, targets, cut)
        batch = Batch(tiles, _no_loss, 0, self.worker.territory.inputs)
        outputs = evaluator.predict(batch)
        return (None if outputs is None else _single(outputs)), everything

    def _bring(
        self, inputs: Sequence[Tensor], targets: Tensor | None, cut: bool
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The tiles that are read here, and all targets."""
        if self.feeder is not None:
            return self.feeder.bring(inputs, targets)
        tiles = []
        for layer, tensor, tile in zip(
            _inputs(self.graph), inputs, self.worker.territory.inputs, strict=True
        ):
            expected = tile.shape if cut else layer.shape
            if tuple(tensor.shape) != expected:
                raise RequestError(
                    f"a batch of {_shape(tensor.shape)} came where the plan is for {_shape(expected)}."
                )
            part = tensor if cut else tensor[tuple(slice(s.start, s.stop) for s in tile.spans)]
            tiles.append(part.to(_dtype(layer.dtype)))
        assert targets is not None
        return tuple(tiles), targets

    def _evaluating(self) -> Worker:
        """A worker on the same weights that normalises with running statistics and drops nothing."""
        if self._evaluator is None:
            model, example = self._untrained
            traced = trace(model.eval(), example)
            plan = self.plan.evaluating(graph_digest(traced.graph))
            lowered = api.lower(traced.graph, plan)
            territory = lowered.territory(self.device)
            held = self.worker.weights
            tensors = {name: held.piece(name, tile).detach() for name, tile in territory.weights.items()}
            weights = Weights(territory.weights, tensors, (), ())
            program = lowered.program(self.device)
            self._evaluator = Worker(
                traced.graph, program, territory, weights, traced.functions, traced.inplace, self.transport
            )
            self._evaluator.store.memory_format = self.worker.store.memory_format
            self._evaluator.convolving = self.worker.convolving
            self._evaluator.mixed = self.settings.mixed
            self._cover(lowered)
        return self._evaluator

    def _cover(self, lowered: Lowered) -> None:
        """What evaluation reads of the inputs is what training reads."""
        evaluated = lowered.territory(self.device).inputs
        for tile, trained in zip(evaluated, self.worker.territory.inputs, strict=True):
            assert trained.covers(tile), f"evaluation reads {tile}, training {trained}"

    # ---- the whole state -------------------------------------------------------------------------------

    def keeping(self) -> Keeping:
        graph, lowered, devices = self.graph, self.lowered, self.plan.devices
        return Keeping(
            devices,
            {d: kept_pieces(graph, lowered.holders, d) for d in devices},
            {d: lowered.territory(d).owned for d in devices},
            {d: {n: tiles[d] for n, tiles in lowered.holders.items() if d in tiles} for d in devices},
        )

    def collect(self) -> State | None:
        """The whole model and optimiser, on the first device; all devices have to call this."""
        self.worker.mail.settle()
        state = collect(self.worker, self.keeping())
        if state is not None:
            state.model |= self._still | {name: state.model[of] for name, of in self._aliases.items()}
        return state

    def restore(self, model: Stored | None, optimiser: dict[str, Tensor]) -> None:
        """Go on from a state that the first device has; all devices have to call this."""
        self.worker.mail.settle()
        restore(self.worker, self.keeping(), model, optimiser)


def _feeder(feeding: Feeding, device: str, transport: Transport, graph: Graph) -> Feeder | None:
    if feeding.feed is Feed.REPLICATED:
        return None
    shapes = tuple(layer.shape for layer in _inputs(graph))
    dtypes = tuple(_dtype(layer.dtype) for layer in _inputs(graph))
    return Feeder(transport, device, feeding.samples, feeding.reads[device], feeding.ways, shapes, dtypes)


def _never_read(model: nn.Module, graph: Graph) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Of a model's tensors those that no layer reads: other names of read ones, and such as never change."""
    state, known = model.state_dict(keep_vars=True), graph.parameters()
    names = {id(state[name]): name for name in known if name in state}
    others = {name: tensor for name, tensor in state.items() if name not in known}
    aliases = {name: names[id(tensor)] for name, tensor in others.items() if id(tensor) in names}
    still = {name: t.detach().clone() for name, t in others.items() if name not in aliases}
    return aliases, still


def _hollow(model: nn.Module) -> nn.Module:
    """The same model without its numbers."""
    known = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, known | {id(b): b.to("meta") for b in model.buffers()})  # type: ignore[dict-item]


def _inputs(graph: Graph) -> list[Any]:
    found = [layer for layer in graph.layers if isinstance(layer.operation, Input)]
    return sorted(found, key=lambda layer: layer.operation.position)  # type: ignore[union-attr]


def _type(graph: Graph) -> torch.dtype:
    return _dtype(_inputs(graph)[0].dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def _single(outputs: tuple[Tensor, ...]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


def _weighed(loss: Loss, targets: Tensor, weight: float) -> Callable[[tuple[Tensor, ...]], Tensor]:
    def evaluate(outputs: tuple[Tensor, ...]) -> Tensor:
        value = loss(_single(outputs), targets)
        return value if weight == 1 else value * weight

    return evaluate


def _weighed_part(loss: Loss, targets: Tensor, weight: float) -> PartFunction | None:
    if not isinstance(loss, MeanOf):
        return None

    def evaluate(output: Tensor, tile: Tile, whole: Tile) -> Tensor:
        return loss.part(output, targets, tile, whole) * weight

    return evaluate


def _no_loss(outputs: tuple[Tensor, ...]) -> Tensor:
    raise AssertionError("nothing is learned here")
