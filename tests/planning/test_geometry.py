"""Tiles are a partition, and what travels is exactly what is needed and missing."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from manyhands.ir.geometry import Axis, Cut, Layout, Shape, Span, Tile, divide, transfers

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    axes = draw(st.lists(st.sampled_from(Axis), unique=True, max_size=3))
    cuts = tuple(Cut(axis, draw(st.integers(1, 3))) for axis in axes)
    count = prod(cut.count for cut in cuts)
    shares = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any))
    return Layout(tuple(f"d{i}" for i in range(count)), cuts, tuple(shares))


def cells(tile: Tile) -> set[tuple[int, ...]]:
    return set(product(*(range(span.start, span.stop) for span in tile.spans))) if tile.numel else set()


@given(st.integers(0, 30), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_divided_spans_are_neighbours_and_nobody_with_a_share_goes_without(
    size: int, shares: list[int]
) -> None:
    spans = divide(Span(3, 3 + size), tuple(shares))
    assert spans[0].start == 3 and spans[-1].stop == 3 + size
    assert all(one.stop == two.start for one, two in zip(spans, spans[1:], strict=False))
    wanting = [share > 0 for share in shares]
    if any(wanting):
        assert all(not len(span) for span, wants in zip(spans, wanting, strict=True) if not wants)
        if size >= sum(wanting):
            assert all(len(span) for span, wants in zip(spans, wanting, strict=True) if wants)


@given(layouts(), SHAPES)
def test_a_layout_is_a_partition(layout: Layout, shape: Shape) -> None:
    tiles = layout.tiles(shape)
    everything = [cell for tile in tiles.values() for cell in cells(tile)]
    assert len(everything) == len(set(everything)) == prod(shape)
    assert set(everything) == cells(Tile.whole(shape))
    idle = [d for d, share in zip(layout.devices, layout.shares, strict=True) if not share]
    assert not any(tiles[device].numel for device in idle), "who has no share gets nothing"


@given(layouts(), layouts(), st.lists(st.integers(1, 6), min_size=4, max_size=4))
def test_transfers_bring_what_is_needed_and_missing(have: Layout, need: Layout, sizes: list[int]) -> None:
    owned, needed = have.tiles(tuple(sizes)), need.tiles(tuple(sizes))
    for reader, wanted in needed.items():
        arriving = [t for t in transfers(owned, needed) if t.target == reader]
        brought = [cell for transfer in arriving for cell in cells(transfer.tile)]
        missing = cells(wanted) - (cells(owned[reader]) if reader in owned else set())
        assert len(brought) == len(set(brought)) and set(brought) == missing
        assert all(transfer.source != reader for transfer in arriving)


def test_an_empty_tile_adds_nothing_to_a_hull() -> None:
    tile = Tile.parse("2:3,0:4")
    assert tile.hull(Tile.parse("0:0,0:0")) == tile == Tile.parse("0:0,0:0").hull(tile)
    assert Tile.parse("0:3,0:4").hull(tile) == Tile.parse("0:3,0:4")
