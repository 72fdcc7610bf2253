"""Which 1x1 convolutions are computed as convolutions.

With one thread and a small batch, torch (2.13) takes them for products of matrices and hands them to another
library. On many processors that is half as fast, so both ways are measured, once in a process.
"""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.nn.functional as F

from manyhands.ir.geometry import Shape
from manyhands.ir.graph import Convolve, Graph, Layer
from manyhands.ir.territory import Territory

# The distance between a filter's taps means nothing where there is only one, but with it torch asks the
# library of convolutions, forward and backward.
APART = 2
MARGIN = 0.9  # it must take so little of the time: else luck would decide
MOST_SAMPLES, MOST_ROWS, ROUNDS = 8, 28, 4  # with which both are measured


def faster_as_convolutions(graph: Graph, territory: Territory) -> frozenset[str]:
    """Layers of this device that take less time so, with the channels last."""
    return frozenset(
        layer.name
        for layer in graph.layers
        if _is_product(layer)
        and territory.computed[layer.name].numel
        and _is_faster(*_size(layer, territory))
    )


def _is_product(layer: Layer) -> bool:
    if not isinstance(layer.operation, Convolve) or layer.dtype != "float32":
        return False
    window = layer.operation.window
    return all(slide.kernel == slide.stride == 1 for slide in (window.rows, window.columns))


def _size(layer: Layer, territory: Territory) -> tuple[Shape, int, Shape]:
    """Filters, groups, and samples with the rows and columns of a map."""
    assert isinstance(layer.operation, Convolve)
    samples, _, rows, columns = territory.computed[layer.name].shape
    size = min(samples, MOST_SAMPLES), min(rows, MOST_ROWS), min(columns, MOST_ROWS)
    return layer.parameters[0].shape, layer.operation.groups, size


@cache
def _is_faster(filters: Shape, groups: int, size: Shape) -> bool:
    """The best of a few rounds of forward and backward, both ways in turn."""
    samples, *rows_and_columns = size
    image = torch.ones(samples, filters[1] * groups, *rows_and_columns)
    image = image.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.ones(filters).contiguous(memory_format=torch.channels_last).requires_grad_()
    # One thread's own clock does not see what else the machine does, so that does not decide.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = {1: float("inf"), APART: float("inf")}
    for _ in range(ROUNDS):
        for apart in best:
            start = clock()
            F.conv2d(image, weight, groups=groups, dilation=apart).sum().backward()
            best[apart] = min(best[apart], clock() - start)
    return best[APART] < MARGIN * best[1]
