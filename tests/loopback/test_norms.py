"""Statistics of a tile, however it lies in memory."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from manyhands.ir.graph import BatchNorm, Layer
from manyhands.runtime.norms import Normalise, measure
from manyhands.runtime.tape import Box

SHAPES = ((4, 6), (3, 5, 9), (1, 7, 5, 5), (2, 64, 33, 31), (1, 64, 1, 1), (1, 16, 40, 40), (2, 3, 4, 5, 6))


def laid(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool, cut: bool) -> Tensor:
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype) + 3
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x[:, :, x.shape[2] // 2 :] if cut and x.dim() > 2 else x


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_is_measured_as_it_is(shape: tuple[int, ...], dtype: torch.dtype, error: float) -> None:
    """In one piece or cut out of a larger one, channels first or last: one sample too."""
    for channels_last, cut in product((False, True), repeat=2):
        x = laid(shape, dtype, channels_last, cut)
        layer = Layer("norm", BatchNorm(True, 1e-5, 0.1), ("x",), tuple(x.shape))
        mean, squares = measure(layer, x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        exact, average = torch.var_mean(x.double(), axes, correction=0)
        count = x.numel() // x.shape[1]
        assert mean.dtype == dtype and mean.shape == squares.shape == (1, x.shape[1])
        assert (mean[0] - average).abs().max() < error
        assert (squares[0] / count - exact).abs().max() < error


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 2], ids=str)
def test_what_flows_back_through_a_norm_is_right_however_its_input_lies(shape: tuple[int, ...]) -> None:
    """Statistics are given, so a norm is a line: its gradient, and those of weight and bias, are known."""
    for channels_last, cut in product((False, True), repeat=2):
        x = laid(shape, torch.float64, channels_last, cut).requires_grad_()
        channels, generator = x.shape[1], torch.Generator().manual_seed(1)
        weight, bias, mean = (torch.randn(channels, generator=generator, dtype=x.dtype) for _ in range(3))
        variance = torch.rand(channels, generator=generator, dtype=x.dtype) + 0.5
        factors = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        leaves = (x, weight.requires_grad_(), bias.requires_grad_())
        result = Normalise.apply(*leaves, mean, variance, 1e-5, Box())
        found = torch.autograd.grad((result * factors).sum(), leaves)
        line = (1, channels, *(1,) * (x.dim() - 2))
        inverse = torch.rsqrt(variance + 1e-5).reshape(line)
        plain = (x - mean.reshape(line)) * inverse * weight.reshape(line) + bias.reshape(line)
        expected = torch.autograd.grad((plain * factors).sum(), leaves)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() < 1e-9
