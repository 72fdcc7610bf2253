"""The tables of the paper on training on the edge, from our own models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.benches import paper3
from manyhands.benches.paper3 import Result


@pytest.fixture(scope="module")
def result() -> Result:
    return paper3.run(lambda what: None)


def test_every_entry_and_the_claim_come_out(result: Result) -> None:
    assert len(result.entries) == 80
    assert max(abs(entry.error) for entry in result.entries) <= 0.01
    assert result.claim[152] == pytest.approx(1.605, abs=5e-4)
    assert result.within


def test_a_single_entry_or_the_claim_can_fail_it(result: Result) -> None:
    wrong = replace(result.entries[17], counted=1.011 * result.entries[17].printed)
    assert not replace(result, entries=(*result.entries[:17], wrong, *result.entries[18:])).within
    slower = tuple(replace(c, limit_factor=1.606) if c.depth == 152 else c for c in result.curves)
    assert not replace(result, curves=slower).within


def test_torch_keeps_far_less_than_the_paper_counts(result: Result) -> None:
    """MiB of an image of 224x224, as measured with torch 2.13 on real tensors."""
    kept = {depth: paper3.count(depth, 224).kept_sample_bytes / paper3.MIB for depth in paper3.DEPTHS}
    expected = {18: 21.2, 34: 30.7, 50: 81.9, 101: 121.0, 152: 169.2}
    assert {depth: round(size, 1) for depth, size in kept.items()} == expected


def test_curves_fall_and_begin_with_everything_kept(result: Result) -> None:
    for curve in result.curves:
        sizes = [size for _, size in curve.points]
        assert sizes == sorted(sizes, reverse=True) and curve.points[0][0] == 1.0
        assert sizes[-1] < sizes[0] / 2
