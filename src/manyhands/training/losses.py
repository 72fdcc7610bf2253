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
from manyhands.loading import load_function, nearest
from manyhands.training.trainer import Loss

LOSSES = ("cross_entropy", "mse", "bce", "yolov2")


def make_loss(name: str, anchors: Anchors, num_classes: int) -> Loss:
    """The loss of this name, a function of outputs and targets; of the whole batch, so its mean is right."""
    match name:
        case "cross_entropy":
            return _cross_entropy
        case "mse":
            return lambda outputs, targets: F.mse_loss(outputs, _shaped(targets, outputs))
        case "bce":
            return lambda outputs, targets: F.binary_cross_entropy_with_logits(
                outputs, _shaped(targets, outputs)
            )
        case "yolov2":
            return RegionLoss(anchors, num_classes)
    if ":" in name:
        loss: Loss = load_function(name)
        return loss
    hint = nearest(name, LOSSES) or f" There are {', '.join(LOSSES)} and file.py:function."
    raise RequestError(f"no loss is called {name!r}.{hint}")


def _shaped(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets like the outputs; what would be broadcast is refused."""
    if targets.numel() != outputs.numel():
        raise RequestError(
            f"the model gives {tuple(outputs.shape)} and the targets are {tuple(targets.shape)}: "
            "this loss compares number by number."
        )
    return targets.to(outputs.dtype).reshape(outputs.shape)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    if not targets.is_floating_point() and targets.numel():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= outputs.shape[1]:
            wrong = low if low < 0 else high
            raise RequestError(
                f"there is a label {wrong}, and the model has {outputs.shape[1]} outputs: labels are 0 to "
                f"{outputs.shape[1] - 1}."
            )
    return F.cross_entropy(outputs, targets)


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
