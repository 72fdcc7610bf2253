"""View, permute and shuffles as factors that move: the common form of everything that only reorders."""

from __future__ import annotations

from manyhands.ir.geometry import Shape
from manyhands.ir.graph import Rearrange


def view_factors(source: Shape, target: Shape) -> Rearrange | None:
    """The factors of a view from one shape to another, or None where the shapes share no factors.

    From (2, 6) to (2, 3, 2): factors of sizes 2, 3, 2; the source's second dimension is (3, 2).
    """
    edges = sorted(set(_suffix_products(source)) | set(_suffix_products(target)))
    if any(large % small for small, large in zip(edges, edges[1:], strict=False)):
        return None
    sizes = tuple(large // small for small, large in zip(edges, edges[1:], strict=False))[::-1]
    return Rearrange(sizes, _grouped(sizes, source), _grouped(sizes, target))


def _suffix_products(shape: Shape) -> list[int]:
    products = [1]
    for size in reversed(shape):
        products.append(products[-1] * size)
    return products


def _grouped(sizes: tuple[int, ...], shape: Shape) -> tuple[tuple[int, ...], ...]:
    groups, factor = [], 0
    for size in shape:
        group: list[int] = []
        product = 1
        while product < size:
            product *= sizes[factor]
            group.append(factor)
            factor += 1
        groups.append(tuple(group))
    return tuple(groups)


def permute_factors(shape: Shape, order: tuple[int, ...]) -> Rearrange:
    singles = tuple((dimension,) for dimension in range(len(shape)))
    return Rearrange(tuple(shape), singles, tuple(singles[d % len(shape)] for d in order))


def pixel_shuffle_factors(shape: Shape, factor: int) -> Rearrange:
    """(n, c*f*f, h, w) -> (n, c, h*f, w*f)."""
    batch, channels, rows, columns = shape
    sizes = (batch, channels // factor**2, factor, factor, rows, columns)
    return Rearrange(sizes, ((0,), (1, 2, 3), (4,), (5,)), ((0,), (1,), (4, 2), (5, 3)))


def pixel_unshuffle_factors(shape: Shape, factor: int) -> Rearrange:
    """(n, c, h*f, w*f) -> (n, c*f*f, h, w)."""
    batch, channels, rows, columns = shape
    sizes = (batch, channels, rows // factor, factor, columns // factor, factor)
    return Rearrange(sizes, ((0,), (1,), (2, 3), (4, 5)), ((0,), (1, 3, 5), (2,), (4,)))


def channel_shuffle_factors(shape: Shape, groups: int) -> Rearrange:
    batch, channels, rows, columns = shape
    sizes = (batch, groups, channels // groups, rows, columns)
    return Rearrange(sizes, ((0,), (1, 2), (3,), (4,)), ((0,), (2, 1), (3,), (4,)))
