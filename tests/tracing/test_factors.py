"""Views and permutations as factors that move."""

from __future__ import annotations

from manyhands.tracing.factors import permute_factors, view_factors


def test_factors_of_views() -> None:
    """(2, 6) as (2, 3, 2): the second dimension is made of two factors."""
    found = view_factors((2, 6), (2, 3, 2))
    assert found is not None
    assert (found.sizes, found.source, found.target) == ((2, 3, 2), ((0,), (1, 2)), ((0,), (1,), (2,)))
    assert view_factors((4, 6), (6, 4)) is None
    ones = view_factors((2, 1, 3), (2, 3))
    assert ones is not None and ones.source == ((0,), (), (1,))


def test_factors_of_a_permutation() -> None:
    found = permute_factors((2, 3, 4), (0, -1, 1))
    assert found.target == ((0,), (2,), (1,))
