"""Parts of tensors, and what flows back through them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.ir.choices import unshared_gradients
from manyhands.ir.geometry import Span, Tile
from manyhands.ir.graph import Mode, Pool, Slide, Window
from manyhands.ir.program import Forward
from manyhands.runtime.parts import part
from manyhands.runtime.pooling import pool
from manyhands.runtime.statistics import _add_line
from manyhands.tracing.graphs import trace

LAST, FIRST = torch.channels_last, torch.contiguous_format


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=5)))
    where = []
    for size in shape[: draw(st.integers(1, len(shape)))]:
        start = draw(st.integers(0, size))
        where.append(slice(start, draw(st.integers(start, size))))
    return shape, tuple(where)


@settings(deadline=None)
@given(boxes(), st.booleans())
def test_a_part_has_the_gradient_that_a_slice_has(
    box: tuple[tuple[int, ...], tuple[slice, ...]], channels_last: bool
) -> None:
    shape, where = box
    data = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if channels_last and len(shape) == 4:
        data = data.contiguous(memory_format=LAST)
    factors = torch.randn(data[where].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = []
    for cut in (part, lambda tensor, spans: tensor[spans]):
        leaf = data.clone().requires_grad_()
        taken = cut(leaf, where)
        assert torch.equal(taken, data[where])
        gradients.append(torch.autograd.grad((taken * factors).sum(), leaf)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("order", [LAST, FIRST], ids=["last", "first"])
def test_the_gradient_of_a_part_lies_as_the_whole_does(order: torch.memory_format) -> None:
    whole = torch.randn(2, 5, 8, 6).contiguous(memory_format=order).requires_grad_()
    rows = part(whole, (slice(None), slice(None), slice(1, 7)))
    (gradient,) = torch.autograd.grad(rows.sum(), whole)
    assert gradient.is_contiguous(memory_format=order) and int(gradient.sum()) == rows.numel()


def test_all_of_a_tensor_is_the_tensor_itself() -> None:
    whole = torch.zeros(2, 3, 4, 5, requires_grad=True)
    assert part(whole, (slice(None), slice(0, 3), slice(0, 4))) is whole
    assert part(whole.detach(), (slice(0, 1),)).data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("rows", [Span(0, 4), Span(1, 3), Span(2, 4)], ids=str)
def test_what_flows_back_through_pooling_lies_with_the_channels_last(rows: Span) -> None:
    """Of a tile, or of all that is at hand: torch's slices would put the channels first."""
    slide = Slide(2, 2, 0, 0, 1)
    operation = Pool(Mode.MAX, Window(slide, slide))
    x = torch.randn(2, 5, 8, 6).contiguous(memory_format=LAST).requires_grad_()
    tile = Tile((Span(0, 2), Span(0, 5), rows, Span(0, 3)))
    pooled = pool(operation, x, Tile.whole(x.shape), tile, tuple(x.shape))
    assert torch.equal(pooled, nn.functional.max_pool2d(x, 2)[:, :, rows.start : rows.stop])
    (gradient,) = torch.autograd.grad(pooled.sum(), x)
    assert gradient.is_contiguous(memory_format=LAST)


class Shortcut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.norm(self.two(x)) + x


def test_what_two_read_or_an_addition_hands_on_is_not_taken_for_unshared() -> None:
    layers = trace(Shortcut(), (torch.zeros(2, 3, 8, 8),)).graph.by_name()
    convolution, norm, addition = (Forward(0, (name,)) for name in ("two", "norm", "add"))
    assert unshared_gradients(convolution, layers) == {"one"}
    assert unshared_gradients(norm, layers) == {"two"}
    assert unshared_gradients(addition, layers) == set()
    others = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.GroupNorm(2, 4), nn.ReLU())
    layers_of_others = trace(others, (torch.zeros(2, 3, 8, 8),)).graph.by_name()
    assert unshared_gradients(Forward(0, ("1",)), layers_of_others) == {"0"}
    assert unshared_gradients(Forward(0, ("2",)), layers_of_others) == set()
    both = Forward(0, ("two", "norm", "add"))  # `one` is read by the first and by the last
    assert unshared_gradients(both, layers) == set()


@pytest.mark.parametrize(
    "shape", [(3, 4), (2, 3, 5), (2, 64, 130, 70), (1, 4, 1, 9), (0, 4, 5, 6), (2, 3, 4, 5, 6)]
)
@pytest.mark.parametrize("samples", [1, None], ids=["of the batch", "of each sample"])
def test_a_correction_in_blocks_is_the_correction(shape: tuple[int, ...], samples: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    own, x = (torch.randn(shape, generator=generator) for _ in range(2))
    line = (samples or shape[0], shape[1], *(1,) * (len(shape) - 2))
    offset, slope = (torch.randn(line, generator=generator) for _ in range(2))
    expected = own + slope * x + offset
    _add_line(own, x, offset, slope)
    assert torch.allclose(own, expected, rtol=0, atol=1e-5)
