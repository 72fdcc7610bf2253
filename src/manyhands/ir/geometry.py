"""Spans, tiles and layouts: who owns which piece of a tensor, and what must therefore travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, stop): `Span(2, 5)` is rows 2, 3, 4."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert self.start <= self.stop, f"a span cannot end before it starts: {self}"

    def __len__(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Span) -> Span:
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def hull(self, other: Span) -> Span:
        return Span(min(self.start, other.start), max(self.stop, other.stop))

    def shift(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a tensor of any rank; for images the axes are batch, channels, rows, columns."""

    spans: tuple[Span, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Tile:
        return cls(tuple(Span(0, size) for size in shape))

    @classmethod
    def parse(cls, text: str) -> Tile:
        """The tile of its text form: `Tile.parse("0:1,0:64")`."""
        pairs = (part.split(":") for part in text.split(",")) if text else ()
        return cls(tuple(Span(int(start), int(stop)) for start, stop in pairs))

    @property
    def shape(self) -> Shape:
        return tuple(len(span) for span in self.spans)

    @property
    def numel(self) -> int:
        size = 1
        for span in self.spans:
            size *= span.stop - span.start
        return size

    def __and__(self, other: Tile) -> Tile:
        if len(self.spans) != len(other.spans):  # only the tile of nothing of a scalar has another rank
            return self if not self.numel else other
        return Tile(tuple(a & b for a, b in zip(self.spans, other.spans, strict=True)))

    def hull(self, other: Tile) -> Tile:
        """The smallest box around both; an empty tile adds nothing."""
        if not self.numel:
            return other
        if not other.numel:
            return self
        return Tile(tuple(a.hull(b) for a, b in zip(self.spans, other.spans, strict=True)))

    def covers(self, other: Tile) -> bool:
        if len(self.spans) != len(other.spans):
            return not other.numel or (self & other) == other
        for mine, theirs in zip(self.spans, other.spans, strict=True):
            if theirs.start < mine.start or mine.stop < theirs.stop:
                return not other.numel
        return True

    def within(self, outer: Tile) -> tuple[slice, ...]:
        """Where this tile lies inside a tensor that holds `outer`."""
        assert outer.covers(self), f"[{self}] is not inside [{outer}]"
        pairs = zip(self.spans, outer.spans, strict=True)
        return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)

    def with_span(self, dimension: int, span: Span) -> Tile:
        return Tile(self.spans[:dimension] + (span,) + self.spans[dimension + 1 :])

    def __str__(self) -> str:
        return ",".join(str(span) for span in self.spans)


def samples_at_a_time(tile: Tile, count: int) -> tuple[Tile, ...]:
    """The tile cut into some of its samples (its first dimension) after others; a count of 0: all at once."""
    if not count or len(tile.spans[0]) <= count:
        return (tile,)
    first, stop = tile.spans[0].start, tile.spans[0].stop
    starts = range(first, stop, count)
    return tuple(tile.with_span(0, Span(start, min(start + count, stop))) for start in starts)


def rest_of(tile: Tile, boxes: Sequence[Tile]) -> Tile:
    """What is left of a tile without boxes at its ends."""
    for box in boxes:
        axis = next(n for n, (a, b) in enumerate(zip(box.spans, tile.spans, strict=True)) if a != b)
        span, cut = tile.spans[axis], box.spans[axis]
        left = Span(cut.stop, span.stop) if cut.start == span.start else Span(span.start, cut.start)
        tile = tile.with_span(axis, left)
    return tile


def empty_like(shape: Shape) -> Tile:
    """The tile of nothing. A scalar has no empty tile: one spare axis of length 0 stands for it."""
    return Tile(tuple(Span(0, 0) for _ in shape) or (Span(0, 0),))


class Axis(Enum):
    """What can be cut."""

    BATCH = "batch"
    CHANNELS = "channels"
    ROWS = "rows"
    COLUMNS = "columns"

    def dimension(self, rank: int) -> int | None:
        """The dimension this axis has in a tensor of that rank, or None where it has none."""
        position = list(Axis).index(self)
        if rank == 4 or position == 0:
            return position if rank else None
        return 1 if rank == 2 and self is Axis.CHANNELS else None


@dataclass(frozen=True, slots=True)
class Cut:
    axis: Axis
    count: int

    def __str__(self) -> str:
        return f"{self.axis.value}:{self.count}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A partition of any tensor into one tile a device: cuts applied one inside the other, by shares.

    `batch:2,rows:2` on a, b, c, d with equal shares: a and b have the first half of the batch, a its
    upper rows and b its lower rows; c and d have the second half likewise.
    """

    devices: tuple[str, ...]
    cuts: tuple[Cut, ...]
    shares: tuple[int, ...]

    def __post_init__(self) -> None:
        assert prod(cut.count for cut in self.cuts) == len(self.devices) == len(self.shares), self

    def tiles(self, shape: Shape) -> dict[str, Tile]:
        """Each device's tile of a tensor; where there is too little to cut, some are empty."""
        return dict(zip(self.devices, _tiles(self.cuts, self.shares, shape), strict=True))

    def __str__(self) -> str:
        cuts = ",".join(str(cut) for cut in self.cuts) or "whole"
        equal = len(set(self.shares)) == 1
        return cuts if equal else f"{cuts} by {'/'.join(str(share) for share in self.shares)}"


@lru_cache(maxsize=4096)
def _tiles(cuts: tuple[Cut, ...], shares: tuple[int, ...], shape: Shape) -> tuple[Tile, ...]:
    return tuple(_divide(Tile.whole(shape), cuts, shares))


def _divide(tile: Tile, cuts: tuple[Cut, ...], shares: tuple[int, ...]) -> list[Tile]:
    if not cuts:
        return [tile]
    cut, *inner = cuts
    size = len(shares) // cut.count
    groups = [shares[i * size : (i + 1) * size] for i in range(cut.count)]
    dimension = cut.axis.dimension(len(tile.spans))
    tiles: list[Tile] = []
    if dimension is None:  # nothing to cut here: the first group with a share has it all, the others none
        first = next((index for index, group in enumerate(groups) if any(group)), 0)
        for index, group in enumerate(groups):
            part = tile if index == first else empty_like(tile.shape)
            tiles += _divide(part, tuple(inner), group)
        return tiles
    spans = divide(tile.spans[dimension], tuple(sum(group) for group in groups))
    for span, group in zip(spans, groups, strict=True):
        tiles += _divide(tile.with_span(dimension, span), tuple(inner), group)
    return tiles


def divide(span: Span, shares: tuple[int, ...]) -> tuple[Span, ...]:
    """Neighbouring spans in proportion to the shares, rounded to whole rows.

    Where there are enough rows, every share above nothing gets at least one; no share gets none.
    """
    shares = shares if any(shares) else (1,) * len(shares)
    total, size = sum(shares), len(span)
    least = [int(share > 0) for share in shares]
    if sum(least) > size:
        least = [0] * len(shares)
    edges = [0]
    for index in range(len(shares)):
        rounded = (2 * sum(shares[: index + 1]) * size + total) // (2 * total)
        edges.append(min(max(rounded, edges[-1] + least[index]), size - sum(least[index + 1 :])))
    return tuple(Span(a, b).shift(span.start) for a, b in zip(edges, edges[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Transfer:
    source: str
    target: str
    tile: Tile


def transfers(have: dict[str, Tile], need: dict[str, Tile]) -> tuple[Transfer, ...]:
    """What each owner sends to each reader. Halo exchange, scatter, gather and re-layout are all this."""
    return tuple(
        Transfer(owner, reader, common)
        for reader, wanted in need.items()
        for owner, owned in have.items()
        if owner != reader and (common := owned & wanted).numel
    )
