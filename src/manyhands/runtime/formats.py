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

# Channels first must take so little of the time: else they travel faster last. Where both are about as fast a
# short measurement would decide by luck, and differently on every device.
MARGIN = 0.8


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


def order_of(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.stride(1) == 1
    return torch.channels_last if last else torch.contiguous_format


def faster_format(graph: Graph, territory: Territory, dtype: torch.dtype) -> torch.memory_format:
    """Channels last or first, whichever computes this device's heaviest convolutions faster, measured now."""
    work: dict[tuple[Shape, int, Shape], int] = {}
    for layer in graph.layers:
        if isinstance(layer.operation, Convolve):
            tile, weight = territory.computed[layer.name], layer.parameters[0]
            key = weight.shape, layer.operation.groups, tile.shape[2:]
            work[key] = work.get(key, 0) + tile.numel * prod(weight.shape[1:])
    heaviest = [key for key in sorted(work, key=lambda key: -work[key]) if work[key]][:4]
    seconds = {
        memory_format: sum(_seconds(*key, dtype, memory_format) for key in heaviest)
        for memory_format in (torch.contiguous_format, torch.channels_last)
    }
    first, last = seconds[torch.contiguous_format], seconds[torch.channels_last]
    return torch.contiguous_format if first < MARGIN * last else torch.channels_last


def _seconds(
    shape: Shape, groups: int, size: Shape, dtype: torch.dtype, memory_format: torch.memory_format
) -> float:
    """The best of a few rounds of forward and backward, on a map of at most 56 rows and columns."""
    rows, columns = (min(n, 56) + k for n, k in zip(size, shape[2:], strict=True))
    image = torch.ones(1, shape[1] * groups, rows, columns, dtype=dtype).contiguous(
        memory_format=memory_format
    )
    weight = torch.ones(shape, dtype=dtype).contiguous(memory_format=memory_format).requires_grad_()
    image.requires_grad_()
    best = float("inf")
    # One thread's own clock does not see what else the machine does, so that does not decide.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(3):
        start = clock()
        F.conv2d(image, weight, groups=groups).sum().backward()
        best = min(best, clock() - start)
    return best
