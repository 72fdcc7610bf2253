"""Losses and optimisers by the names that a job gives them, and how good a model is by their kind."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.detection.anchors import Anchors
from manyhands.detection.precision import mean_average_precision
from manyhands.detection.region import RegionLoss, detect
from manyhands.errors import RequestError
from manyhands.ir.geometry import Axis, Tile
from manyhands.loading import load_function, nearest
from manyhands.training.means import Loss, MeanOf

LOSSES: dict[str, tuple[Axis, ...]] = {  # means, each along these axes of the output
    "cross_entropy": (Axis.BATCH, Axis.ROWS, Axis.COLUMNS),
    "mse": tuple(Axis),
    "bce": tuple(Axis),
    "yolov2": (Axis.BATCH,),
}


def make_loss(name: str, anchors: Anchors, num_classes: int) -> Loss:
    """The loss of this name, a function of outputs and targets; of the whole batch, so its mean is right."""
    axes = LOSSES.get(name, ())
    match name:
        case "cross_entropy":
            return MeanOf(F.cross_entropy, axes, _labels_of)
        case "mse":
            return MeanOf(F.mse_loss, axes, _numbers_of)
        case "bce":
            return MeanOf(F.binary_cross_entropy_with_logits, axes, _numbers_of)
        case "yolov2":
            return MeanOf(RegionLoss(anchors, num_classes), axes, _samples_of)
    if ":" in name:
        loss: Loss = load_function(name)
        return loss
    hint = nearest(name, tuple(LOSSES)) or f" There are {', '.join(LOSSES)} and file.py:function."
    raise RequestError(f"no loss is called {name!r}.{hint}")


def _numbers_of(targets: Tensor, output: Tensor, tile: Tile, whole: Tile) -> Tensor:
    """Targets like the output; what would be broadcast is refused."""
    if targets.numel() != whole.numel:
        raise RequestError(
            f"the model gives {whole.shape} and the targets are {tuple(targets.shape)}: "
            "this loss compares number by number."
        )
    return _cropped(targets.to(output.dtype).reshape(whole.shape), tile, whole)


def _labels_of(targets: Tensor, output: Tensor, tile: Tile, whole: Tile) -> Tensor:
    """A label for each place of the output, or the probabilities of all."""
    if not targets.is_floating_point() and targets.numel():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= output.shape[1]:
            wrong = low if low < 0 else high
            raise RequestError(
                f"there is a label {wrong}, and the model has {output.shape[1]} outputs: labels are 0 to "
                f"{output.shape[1] - 1}."
            )
    if targets.is_floating_point():
        return _cropped(targets, tile, whole)
    return _cropped(targets, *(Tile(t.spans[:1] + t.spans[2:]) for t in (tile, whole)))


def _samples_of(targets: Tensor, output: Tensor, tile: Tile, whole: Tile) -> Tensor:
    return _cropped(targets, *(Tile(t.spans[:1]) for t in (tile, whole)))


def _cropped(targets: Tensor, tile: Tile, whole: Tile) -> Tensor:
    """A part of targets that begin with these dimensions. Parts of others would fit by chance."""
    if targets.shape[: len(whole.spans)] != whole.shape:
        raise RequestError(
            f"targets of shape {tuple(targets.shape)} came where {whole.shape} is expected. Let the data "
            "give one for each sample, and for each pixel of an output that is a map."
        )
    return targets[tile.within(whole)]


class Metric(Protocol):
    """Takes outputs and targets batch by batch, then says one number; more is better or less is."""

    name: str
    more_is_better: bool

    def add(self, outputs: Any, targets: Tensor) -> None: ...

    def value(self) -> float: ...


class Accuracy:
    """The share of images whose largest output is that of their label."""

    name, more_is_better = "accuracy", True

    def __init__(self) -> None:
        self.right = self.seen = 0

    def add(self, outputs: Any, targets: Tensor) -> None:
        labels = targets.argmax(1) if targets.is_floating_point() else targets  # probabilities of classes
        self.right += int((outputs.argmax(1) == labels).sum())
        self.seen += labels.numel()

    def value(self) -> float:
        return self.right / max(self.seen, 1)


class Precision:
    """mAP@0.5 of what YOLOv2 detects."""

    name, more_is_better = "mAP@0.5", True

    def __init__(self, anchors: Anchors, num_classes: int, threshold: float) -> None:
        self.anchors, self.num_classes, self.threshold = anchors, num_classes, threshold
        self.found: list[Any] = []
        self.targets: list[Tensor] = []

    def add(self, outputs: Any, targets: Tensor) -> None:
        self.found += detect(outputs, self.anchors, self.num_classes, self.threshold)
        self.targets += list(targets)

    def value(self) -> float:
        return mean_average_precision(self.found, self.targets)


class MeanLoss:
    """The loss itself, averaged over images, where there is no better measure."""

    name, more_is_better = "loss", False

    def __init__(self, loss: Loss) -> None:
        self.loss, self.total, self.seen = loss, 0.0, 0

    def add(self, outputs: Any, targets: Tensor) -> None:
        self.total += float(self.loss(outputs, targets)) * len(targets)
        self.seen += len(targets)

    def value(self) -> float:
        return self.total / max(self.seen, 1)


def make_metric(name: str, loss: Loss, anchors: Anchors, num_classes: int, threshold: float) -> Metric:
    """What tells how good a model with this loss is."""
    if name == "cross_entropy":
        return Accuracy()
    if name == "yolov2":
        return Precision(anchors, num_classes, threshold)
    return MeanLoss(loss)


@dataclass(frozen=True)
class OptimiserChoice:
    """An optimiser of torch.optim with its options, checked."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self.kind(parameters, **self.options)  # type: ignore[call-arg]


def choose_optimiser(name: str, options: dict[str, Any]) -> OptimiserChoice:
    """The optimiser of this name (`sgd`, `adamw`); unknown names and options are refused."""
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    if name.lower() not in kinds:
        raise RequestError(f"no optimizer is called {name!r}.{nearest(name.lower(), tuple(kinds))}")
    choice = OptimiserChoice(kinds[name.lower()], _tuples(options))
    known = [word for word in inspect.signature(choice.kind).parameters if word != "params"]
    for word in options:
        if word not in known:
            raise RequestError(f"optimizer: {name} has no option {word!r}.{nearest(word, known)}")
    try:
        choice.make([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise RequestError(f"optimizer: {error}.") from None
    return choice


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """TOML has lists where torch wants tuples (betas)."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
