"""Samples of a rehearsal as timings and lines: what was measured can be read off again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.geometry import Span, Tile
from manyhands.ir.graph import Layer, Pointwise
from manyhands.ir.profile import LayerSample, Profile, StepSample, kind_of
from manyhands.planning.costs import Costs
from manyhands.profiling.fitting import fit_lines, fit_timings

LAYER = Layer("layer", Pointwise(), ("x",), (8, 16, 32, 32))
times = st.floats(1e-5, 10.0)


def fitted(*samples: LayerSample) -> Costs:
    profile = Profile("a", 1, False, 0, fit_timings(samples, batch=8), ())
    return Costs(replace(Cluster((Device("a"),)), profiles=(profile,)))


def tile(batch: int = 8, channels: int = 16, rows: int = 32) -> Tile:
    return Tile((Span(0, batch), Span(0, channels), Span(0, rows), Span(0, 32)))


@settings(deadline=None)
@given(whole=times, half=times, quarter=times, backward=times)
def test_what_was_measured_is_foreseen(whole: float, half: float, quarter: float, backward: float) -> None:
    kind = kind_of(LAYER)
    known = fitted(
        LayerSample(kind, (1.0, 1.0, 1.0), whole, backward),
        LayerSample(kind, (0.5, 1.0, 1.0), half, backward),
        LayerSample(kind, (1.0, 1.0, 0.25), quarter, backward),
    )
    assert known.layer("a", LAYER, tile()) == pytest.approx((whole, backward))
    assert known.layer("a", LAYER, tile(batch=4)) == pytest.approx((half, backward))
    assert known.layer("a", LAYER, tile(rows=8)) == pytest.approx((quarter, backward))


@settings(deadline=None)
@given(part=st.sampled_from([0.25, 0.5]), seconds=times)
def test_where_the_whole_was_too_large_it_follows_from_a_part(part: float, seconds: float) -> None:
    known = fitted(LayerSample(kind_of(LAYER), (part, 1.0, 1.0), seconds, 2 * seconds))
    assert known.layer("a", LAYER, tile(batch=int(8 * part))) == pytest.approx((seconds, 2 * seconds))
    assert known.layer("a", LAYER, tile()) == pytest.approx((seconds / part, 2 * seconds / part))


@settings(deadline=None)
@given(whole=times, extra=st.floats(0, 1))
def test_a_larger_batch_than_measured_takes_longer_in_proportion(whole: float, extra: float) -> None:
    known = fitted(LayerSample(kind_of(LAYER), (1.0, 1.0, 1.0), whole, whole))
    larger = replace(LAYER, shape=(16, 16, 32, 32))
    assert known.layer("a", larger, tile(batch=16))[0] == pytest.approx(2 * whole)


@settings(deadline=None)
@given(fixed=st.floats(1e-6, 1e-2), per_byte=st.floats(1e-12, 1e-8))
def test_a_line_is_found_again(fixed: float, per_byte: float) -> None:
    sizes = (1_000, 50_000, 2_000_000)
    lines = fit_lines(StepSample("send value", n, fixed + n * per_byte) for n in sizes)
    assert {line.step for line in lines} == {"send value", "send"}
    for line in lines:
        assert [line.seconds(n) for n in sizes] == pytest.approx(
            [fixed + n * per_byte for n in sizes], rel=1e-3
        )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 1)), min_size=1, max_size=20))
def test_no_step_takes_less_than_nothing(samples: list[tuple[int, float]]) -> None:
    (line,) = fit_lines(StepSample("place", num_bytes, seconds) for num_bytes, seconds in samples)
    assert line.fixed_s >= 0 and line.per_byte_s >= 0
