"""Does a plan train like one device? Three steps with momentum both ways, in float64, and the differences."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Dropout, Graph
from manyhands.runtime.computing import Batch
from manyhands.runtime.dropout import mask
from manyhands.runtime.weights import Weights, find_tensor
from manyhands.runtime.worker import Worker

TOLERANCE = 1e-9
MOMENTUM = 0.9
LARGEST_CHANGE = 1e-6  # of any weight in the first step: large steps blow rounding up in deep networks


@dataclass(frozen=True)
class Trial:
    """The data of a comparison: inputs for every step, and a fixed weighting of the outputs as the loss."""

    batches: tuple[tuple[Tensor, ...], ...]
    weightings: tuple[Tensor, ...]
    seed: int
    learning_rate: float = 1e-3
    optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None  # None: momentum
    clip_norm: float | None = None

    def make_optimiser(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimiser is not None:
            return self.optimiser(parameters)
        return torch.optim.SGD(parameters, self.learning_rate, MOMENTUM)

    def loss(self, outputs: Sequence[Tensor]) -> Tensor:
        parts = [
            (o * w).sum() for o, w in zip(outputs, self.weightings, strict=True) if o.is_floating_point()
        ]
        return torch.stack(parts).sum()

    def part(self, output: Tensor, tile: Tile, whole: Tile) -> Tensor:
        """The loss of a part of the only output."""
        return (output * self.weightings[0][tile.within(whole)]).sum()


@dataclass(frozen=True)
class Held:
    """A box of a weight, buffer or gradient."""

    name: str
    tile: Tile
    tensor: Tensor


@dataclass
class Outcome:
    """What one device (or the reference) has after the steps."""

    losses: list[float | None]
    gradients: list[Held] = field(default_factory=list)
    parameters: list[Held] = field(default_factory=list)
    buffers: list[Held] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)  # digests of pieces that another device owns
    sent_bytes: int = 0
    largest_change: float = 0.0  # of any weight, in the reference

    def without_copies(self, weights: Weights) -> Outcome:
        """The same with digests in place of those weights that every device has alike."""
        trained = {piece.parameter for piece in weights.pieces}
        shared = [piece for piece in weights.shared if piece not in weights.owned]
        return replace(
            self,
            parameters=[held for held in self.parameters if held.name not in trained | weights.shared_names]
            + [Held(piece.parameter, piece.tile, own.detach()) for piece, own in weights.owned.items()],
            copies={
                str(piece): _bytes_digest(weights.piece(piece.parameter, piece.tile)) for piece in shared
            },
        )


@dataclass(frozen=True)
class Difference:
    """Largest differences. Gradients and buffers are relative to the largest entry of their tensor (gradients
    count as at least a thousandth of the largest of all, buffers and losses as at least 1); parameters are
    relative to the largest change that training made to any of them.
    """

    loss: float
    gradients: float
    parameters: float
    buffers: float
    first_layer: str | None  # in the order of computation, the first whose weights differ

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradients, self.parameters, self.buffers)

    @property
    def exact(self) -> bool:
        return self.worst <= TOLERANCE


def make_trial(graph: Graph, example: Sequence[Tensor], *, steps: int = 3, seed: int = 0) -> Trial:
    """Random inputs shaped like the example, and random weights for the outputs, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    layers = graph.by_name()
    batches = tuple(tuple(_like(t, generator) for t in example) for _ in range(steps))
    shapes = [layers[name].shape for name in graph.outputs]
    scale = sum(torch.Size(shape).numel() for shape in shapes) ** 0.5
    weightings = tuple(torch.randn(s, generator=generator, dtype=torch.float64) / scale for s in shapes)
    return Trial(batches, weightings, seed)


def calibrated(trial: Trial, model: nn.Module, graph: Graph) -> Trial:
    """The same trial with a learning rate that moves no weight by more than a little in the first step."""
    first = reference(model, graph, replace(trial, batches=trial.batches[:1]))
    steepest = max((float(g.tensor.abs().max()) for g in first.gradients if g.tensor.numel()), default=0.0)
    return replace(trial, learning_rate=LARGEST_CHANGE / steepest) if steepest else trial


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def train(worker: Worker, trial: Trial) -> Outcome:
    """Run one device through the trial."""
    worker.use_optimiser(trial.make_optimiser)
    worker.clip_norm = trial.clip_norm
    worker.seed = trial.seed
    tiles = worker.territory.inputs  # a device sees no more of the batch than it reads
    losses = [
        worker.step(Batch(cropped(inputs, tiles), trial.loss, step, tiles, trial.part))
        for step, inputs in enumerate(trial.batches)
    ]
    worker.mail.settle()
    outcome = Outcome(losses, sent_bytes=worker.transport.sent_bytes)
    for name, tensor in worker.weights.tensors.items():
        tile = worker.weights.tiles[name]
        kept = outcome.parameters if isinstance(tensor, nn.Parameter) else outcome.buffers
        kept.append(Held(name, tile, tensor.detach()))
    for piece, own in worker.weights.owned.items():
        if own.grad is not None:
            outcome.gradients.append(Held(piece.parameter, piece.tile, own.grad))
    return outcome


def cropped(inputs: Sequence[Tensor], tiles: Sequence[Tile]) -> tuple[Tensor, ...]:
    """Copies of these parts of whole inputs."""
    pairs = zip(inputs, tiles, strict=True)
    return tuple(tensor[tile.within(Tile.whole(tensor.shape))].clone() for tensor, tile in pairs)


def reference(model: nn.Module, graph: Graph, trial: Trial) -> Outcome:
    """The same steps by plain PyTorch on the whole model; dropout draws the masks that a plan draws."""
    model = copy.deepcopy(model)
    names = {name for name, p in graph.parameters().items() if p.trainable}
    trained = {name: p for name, p in model.named_parameters() if name in names}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimiser = trial.make_optimiser(list(trained.values())) if trained else None
    losses: list[float | None] = []
    for step, inputs in enumerate(trial.batches):
        with same_dropout(graph, trial.seed, step):
            outputs = flatten(model(*(tensor.clone() for tensor in inputs)))
        loss = trial.loss(outputs)
        losses.append(float(loss.detach()))
        model.zero_grad()
        if optimiser is not None:
            loss.backward()
            if trial.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained.values(), trial.clip_norm)
            optimiser.step()
    outcome = Outcome(losses)
    changes = [float((p.detach() - before[name]).abs().max()) for name, p in trained.items() if p.numel()]
    outcome.largest_change = max(changes, default=0.0)
    for name, parameter in graph.parameters().items():
        tensor = find_tensor(model, name)
        tile = Tile.whole(tensor.shape)
        (outcome.buffers if parameter.buffer else outcome.parameters).append(
            Held(name, tile, tensor.detach())
        )
        if tensor.grad is not None:
            outcome.gradients.append(Held(name, tile, tensor.grad))
    return outcome


def sensitivity(model: nn.Module, graph: Graph, trial: Trial) -> float:
    """How far plain training moves from itself when weights and inputs move in their last digits.

    A norm over nearly equal values, or a kink exactly at zero, blows rounding up: then nothing can be proved.
    """
    generator = torch.Generator().manual_seed(trial.seed)

    def moved(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor * (1 + 1e-15 * noise) if tensor.is_floating_point() else tensor

    shaken = copy.deepcopy(model)
    for parameter in shaken.parameters():
        parameter.data = moved(parameter.data)
    batches = tuple(tuple(moved(tensor) for tensor in inputs) for inputs in trial.batches)
    other = reference(shaken, graph, replace(trial, batches=batches))
    moved_by = compare(graph, reference(model, graph, trial), (other,))
    return max(moved_by.loss, moved_by.gradients, moved_by.buffers)  # the weights were moved to begin with


def flatten(outputs: Any) -> tuple[Tensor, ...]:
    """All tensors a model returns, in order."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return tuple(tensor for value in values for tensor in flatten(value))


@contextmanager
def same_dropout(graph: Graph, seed: int, step: int) -> Iterator[None]:
    """Within this, torch's dropout functions draw, layer by layer, the masks that a plan draws."""
    layers = iter([layer for layer in graph.layers if isinstance(layer.operation, Dropout)])
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d")
    originals: dict[str, Callable[..., Tensor]] = {name: getattr(F, name) for name in names}

    def replaced(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return input
        layer = next(layers)
        assert isinstance(layer.operation, Dropout)
        shape = layer.shape
        kept = mask(seed, step, layer.name, shape, Tile.whole(shape), p, layer.operation.channels)
        scaled = kept.to(input.dtype) / (1 - p) if p < 1 else kept.to(input.dtype)
        return input.mul_(scaled) if inplace else input * scaled

    for name in names:
        setattr(F, name, replaced)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def compare(graph: Graph, one: Outcome, many: Sequence[Outcome]) -> Difference:
    """The largest differences between one device and the pieces of many."""
    told = [outcome.losses for outcome in many if outcome.losses[0] is not None]
    assert told, "no device evaluated the loss"
    losses = max(
        _relative(_scalar(a), _scalar(b), max(1.0, abs(a or 0.0)))
        for losses in told
        for a, b in zip(one.losses, losses, strict=True)
    )
    differing: dict[str, float] = {}
    worst = {}
    if torn := _torn_copies(many):
        differing[torn] = float("inf")
    steepest = max((float(g.tensor.abs().max()) for g in one.gradients if g.tensor.numel()), default=0.0)
    for kind, floor in (("gradients", 1e-3 * steepest), ("parameters", 0.0), ("buffers", 1.0)):
        worst[kind] = 0.0
        change = one.largest_change or 1.0 if kind == "parameters" else None
        parts = [getattr(m, kind) for m in many]
        for name, difference in _differences(getattr(one, kind), parts, floor, change):
            worst[kind] = max(worst[kind], difference)
            differing[name] = max(differing.get(name, 0.0), difference)
    first = next(
        (
            layer.name
            for layer in graph.layers
            if any(not differing.get(p.name, 0.0) <= TOLERANCE for p in layer.parameters)
        ),
        None,
    )
    parameters = float("inf") if torn else worst["parameters"]
    return Difference(losses, worst["gradients"], parameters, worst["buffers"], first)


def _torn_copies(many: Sequence[Outcome]) -> str | None:
    """A weight of which a device has other bits than its owner."""
    copies = [copied for outcome in many for copied in outcome.copies.items()]
    originals: dict[str, str] = {}
    if copies:
        for held in (held for outcome in many for held in outcome.parameters):
            originals[f"{held.name}[{held.tile}]"] = _bytes_digest(held.tensor)
    return next((piece.partition("[")[0] for piece, found in copies if originals.get(piece) != found), None)


def _bytes_digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.detach().contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def _differences(
    whole: list[Held], parts: list[list[Held]], floor: float, scale: float | None
) -> Iterator[tuple[str, float]]:
    pieces: dict[str, list[Held]] = {}
    for piece in (piece for part in parts for piece in part):
        pieces.setdefault(piece.name, []).append(piece)
    for full in whole:
        seen = torch.zeros(full.tensor.shape, dtype=torch.bool)
        largest = max(floor, float(full.tensor.abs().max())) if full.tensor.numel() else floor
        for piece in pieces.get(full.name, ()):
            where = piece.tile.within(full.tile)
            seen[where] = True
            yield full.name, _relative(full.tensor[where], piece.tensor, scale or largest)
        if not bool(seen.all()) and bool(
            (full.tensor[~seen] != 0).any()
        ):  # nobody has this gradient or weight
            yield full.name, float("inf")


def _scalar(value: float | None) -> Tensor:
    return torch.tensor(float("nan") if value is None else value, dtype=torch.float64)


def _relative(expected: Tensor, found: Tensor, scale: float) -> float:
    if not expected.numel():
        return 0.0
    difference = (expected.double() - found.double()).abs().max() / (scale or 1.0)
    return float(difference) if torch.isfinite(difference) else float("inf")
