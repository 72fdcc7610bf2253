"""Which library computes 1x1 convolutions.

With one thread and a small batch, torch (2.13) takes them for products of matrices and hands them to another
library. On many processors that is half as fast, so both ways are measured, once in a process.
"""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.ir.geometry import Shape
from manyhands.ir.graph import Convolve, Graph
from manyhands.ir.territory import Territory

# The distance between a filter's taps means nothing where there is only one, but with it torch asks the
# library of convolutions, forward and backward.
APART = 2
MARGIN = 0.9  # it must take so little of the time: else luck would decide
MOST_SAMPLES, MOST_ROWS, ROUNDS = 8, 28, 4  # with which both are measured
SMALL = 20480  # numbers of a single sample, for which torch does not ask that library whatever the distance


def distance(x: Tensor, groups: int) -> int:
    """Between the taps of a filter with one, for the library of convolutions; 1 where it is not asked."""
    return APART if len(x) > 1 or groups > 1 or x.numel() > SMALL else 1


def convolutions_are_faster(graph: Graph, territory: Territory) -> bool:
    """Do this device's 1x1 convolutions take less time as such, with the channels last?"""
    seconds = [0.0, 0.0]
    for layer in graph.layers:
        operation, tile = layer.operation, territory.computed[layer.name]
        if not isinstance(operation, Convolve) or not operation.is_product or layer.dtype != "float32":
            continue
        if tile.numel:
            samples, _, rows, columns = tile.shape
            size = min(samples, MOST_SAMPLES), min(rows, MOST_ROWS), min(columns, MOST_ROWS)
            times = samples * rows * columns / (size[0] * size[1] * size[2])
            both = _seconds(layer.parameters[0].shape, operation.groups, size, torch.get_num_threads())
            seconds = [total + times * each for total, each in zip(seconds, both, strict=True)]
    return seconds[1] < MARGIN * seconds[0]


@cache
def _seconds(filters: Shape, groups: int, size: Shape, threads: int) -> tuple[float, float]:
    """As a product and as a convolution: the best of a few rounds of forward and backward, in turn."""
    samples, *rows_and_columns = size
    image = torch.ones(samples, filters[1] * groups, *rows_and_columns)
    image = image.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.ones(filters).contiguous(memory_format=torch.channels_last).requires_grad_()
    # One thread's own clock does not see what else the machine does, so that does not decide.
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        for way, apart in enumerate((1, distance(image, groups))):
            start = clock()
            F.conv2d(image, weight, groups=groups, dilation=apart).sum().backward()
            best[way] = min(best[way], clock() - start)
    return best[0], best[1]
