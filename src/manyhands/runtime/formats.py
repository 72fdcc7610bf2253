"""In which order a tensor's numbers lie: with the channels last they travel, and often compute, faster.

On the wire, images and filters always lie with the channels last, whatever a device computes with. Then a
strip of rows of one sample is one piece of memory, and goes straight out of and into a tile that lies so too.
"""

from __future__ import annotations

import time
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.ir.geometry import Shape
from manyhands.ir.graph import Convolve, Graph
from manyhands.ir.territory import Territory


def outgoing(tensor: Tensor) -> Tensor:
    """The tensor in the order of the wire."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).contiguous()


def wire_shape(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[3], shape[1]) if len(shape) == 4 else shape


def incoming(received: Tensor) -> Tensor:
    """What was received, seen in the usual order of axes."""
    return received.permute(0, 3, 1, 2) if received.dim() == 4 else received


def wire_view(tensor: Tensor) -> Tensor | None:
    """The tensor's own memory as the wire fills it, where that is in one piece."""
    view = tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
    return view if view.is_contiguous() else None


def arranged(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    return tensor.contiguous(memory_format=memory_format) if tensor.dim() == 4 else tensor


def faster_format(graph: Graph, territory: Territory, dtype: torch.dtype) -> torch.memory_format:
    """Channels last or first, whichever computes this device's heaviest convolution faster, measured now."""
    work = {
        layer: territory.computed[layer.name].numel * prod(layer.parameters[0].shape[1:])
        for layer in graph.layers
        if isinstance(layer.operation, Convolve)
    }
    heaviest = max(work, key=lambda layer: work[layer], default=None)
    if heaviest is None or not work[heaviest]:
        return torch.contiguous_format
    shape, operation = heaviest.parameters[0].shape, heaviest.operation
    assert isinstance(operation, Convolve)
    rows, columns = (
        min(size, 32) + slide.reach
        for size, slide in zip(
            territory.computed[heaviest.name].shape[2:],
            (operation.window.rows, operation.window.columns),
            strict=True,
        )
    )
    image = torch.ones(1, shape[1] * operation.groups, rows, columns, dtype=dtype)
    weight = torch.ones(shape, dtype=dtype)
    seconds = {
        memory_format: _seconds(image, weight, operation.groups, memory_format)
        for memory_format in (torch.contiguous_format, torch.channels_last)
    }
    return min(seconds, key=lambda memory_format: seconds[memory_format])


def _seconds(image: Tensor, weight: Tensor, groups: int, memory_format: torch.memory_format) -> float:
    """The best of a few rounds of forward and backward."""
    image = image.clone(memory_format=memory_format).requires_grad_()
    weight = weight.clone(memory_format=memory_format).requires_grad_()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        F.conv2d(image, weight, groups=groups).sum().backward()
        best = min(best, time.perf_counter() - start)
    return best
