"""The model zoo: networks by name, built only when asked for, so that listing them needs no torch.

    >>> ZOO["resnet18-cifar"].input_shape
    (3, 32, 32)

Read aloud: the CIFAR form of ResNet-18 takes images of three channels, 32 rows and 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ZOO", "Entry", "build", "names"]

Shape = tuple[int, int, int]

IMAGENET: Shape = (3, 224, 224)
CIFAR: Shape = (3, 32, 32)


@dataclass(frozen=True, slots=True)
class Entry:
    """One network of the zoo: where its building function lives and what one image it takes looks like."""

    name: str
    module: str
    function: str
    input_shape: Shape
    description: str


def _entry(name: str, file: str, input_shape: Shape, description: str) -> Entry:
    """The entry whose function is spelt like the name, with underscores for dashes."""
    return Entry(name, f"manyhands.models.{file}", name.replace("-", "_"), input_shape, description)


_ENTRIES = (
    _entry("demo", "small", (1, 28, 28), "a small CNN with one residual block, for Fashion-MNIST"),
    _entry("resnet18", "resnet", IMAGENET, "ResNet-18, 8 basic blocks"),
    _entry("resnet34", "resnet", IMAGENET, "ResNet-34, 16 basic blocks"),
    _entry("resnet50", "resnet", IMAGENET, "ResNet-50, 16 bottlenecks"),
    _entry("resnet101", "resnet", IMAGENET, "ResNet-101, 33 bottlenecks"),
    _entry("resnet152", "resnet", IMAGENET, "ResNet-152, 50 bottlenecks"),
    _entry("resnet18-cifar", "resnet", CIFAR, "ResNet-18 with a 3x3 stem and no max pool, 10 classes"),
    _entry("resnet34-cifar", "resnet", CIFAR, "ResNet-34 with a 3x3 stem and no max pool, 10 classes"),
    _entry("resnet50-cifar", "resnet", CIFAR, "ResNet-50 with a 3x3 stem and no max pool, 10 classes"),
    _entry("resnet101-cifar", "resnet", CIFAR, "ResNet-101 with a 3x3 stem and no max pool, 10 classes"),
    _entry("resnet152-cifar", "resnet", CIFAR, "ResNet-152 with a 3x3 stem and no max pool, 10 classes"),
    _entry("vgg11", "vgg", IMAGENET, "VGG-11 without batch norm"),
    _entry("vgg11-bn", "vgg", IMAGENET, "VGG-11 with batch norm"),
    _entry("vgg16", "vgg", IMAGENET, "VGG-16 without batch norm"),
    _entry("vgg16-bn", "vgg", IMAGENET, "VGG-16 with batch norm"),
    _entry("mobilenetv2", "mobilenet", IMAGENET, "MobileNetV2, 17 inverted residuals"),
    _entry("unet", "unet", (3, 256, 256), "U-Net, 64 to 1024 channels, one output channel"),
    _entry("unet-small", "unet", (3, 256, 256), "U-Net, 16 to 256 channels, one output channel"),
    _entry("yolov2", "yolo", (3, 416, 416), "YOLOv2 whole, with passthrough, 5 anchors, 80 classes"),
    _entry("yolov2-16", "yolo", (3, 608, 608), "the first 16 layers of YOLOv2, with batch norm"),
    _entry("yolov2-16-nobn", "yolo", (3, 608, 608), "the first 16 layers of YOLOv2, without batch norm"),
    _entry("paper4-8", "paper4", CIFAR, "six convolutions and two linear layers, 10 classes"),
)

ZOO: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def names() -> tuple[str, ...]:
    """The names that `build` knows, in the order of the zoo."""
    return tuple(ZOO)


def build(name: str, num_classes: int | None = None) -> nn.Module:
    """A freshly initialised network, with as many classes as asked for or else the usual number.

    An unknown name raises `KeyError(name)`; classes asked of a network without any, or none of them at all,
    raise `ValueError`.
    """
    entry = ZOO[name]
    function = getattr(import_module(entry.module), entry.function)
    if num_classes is None:
        return function()
    if "num_classes" not in signature(function).parameters:
        raise ValueError(f"{name} has no classes, so it cannot have {num_classes}. Leave the number out.")
    if num_classes < 1:
        raise ValueError(f"{name} cannot have {num_classes} classes. Ask for 1 or more.")
    return function(num_classes=num_classes)
