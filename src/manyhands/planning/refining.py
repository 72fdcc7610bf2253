"""A plan changed a little, again and again, for as long as its programs are foreseen to get faster.

The search counts roughly, so that it can compare very many plans; this looks at few, by what will really run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from math import inf

from manyhands.ir.geometry import Layout
from manyhands.ir.plan import Segment

WHOLE = 960  # what shares add up to while they are moved
MOVES = (240, 120, 60, 30, 15)  # parts of it: from a quarter down to a sixty-fourth
Segments = tuple[Segment, ...]


def refined(
    starts: Iterable[Segments],
    layouts: tuple[Layout, ...],
    seconds: Callable[[Segments], float],
    is_possible: Callable[[Segments], bool],
    likeness: Callable[[Segments], Hashable],
    tries: int,
) -> Segments:
    """The best that comes of these by changes of shares, of one layout, of where a segment ends.

    From each of them it goes on for as long as a change is an improvement. `layouts` may be given to
    segments; `seconds` says how long a step takes, and `is_possible` is asked of what would be faster. What
    has the same `likeness` takes as long: of those one is tried. After so many tries it ends.
    """
    known: dict[Hashable, float] = {}

    def ask(found: Segments) -> float | None:
        """Seconds of what was not tried before."""
        key = likeness(found)
        if key in known or len(known) >= tries:
            return None
        known[key] = seconds(found)
        return known[key]

    best, best_s = None, inf
    for segments in starts:
        now_s = ask(segments)
        improved = now_s is not None
        while now_s is not None and improved:
            improved = False
            for found in _changed(segments, layouts):
                found_s = ask(found)
                if found_s is not None and found_s < now_s and is_possible(found):
                    segments, now_s, improved = found, found_s, True
                    break
        if now_s is not None and now_s < best_s:
            best, best_s = segments, now_s
    assert best is not None, "there is always a first"
    return best


def _changed(segments: Segments, layouts: tuple[Layout, ...]) -> Iterator[Segments]:
    yield from _with_moved_shares(segments)
    yield from _with_other_ends(segments, layouts)


def _with_other_ends(segments: Segments, layouts: tuple[Layout, ...]) -> Iterator[Segments]:
    """Each segment in another layout, in two layouts, or joined with the one after it."""
    for index, segment in enumerate(segments):
        before, after = segments[:index], segments[index + 1 :]
        for layout in layouts:
            if layout == segment.layout:
                continue
            yield *before, replace(segment, layout=layout), *after
            for place in range(1, len(segment.layers)):
                head = replace(segment, layers=segment.layers[:place])
                tail = replace(segment, layers=segment.layers[place:])
                yield *before, head, replace(tail, layout=layout), *after
                yield *before, replace(head, layout=layout), tail, *after
        for other in after[:1]:
            yield *before, replace(segment, layers=segment.layers + other.layers), *after[1:]


def _with_moved_shares(segments: Segments) -> Iterator[Segments]:
    """Some of a share moved from one device to another, in every segment of both or in one."""
    devices = dict.fromkeys(device for segment in segments for device in segment.layout.devices)
    for move in MOVES:
        for giver, taker in permutations(devices, 2):
            changed = [_shifted(segment, giver, taker, move) for segment in segments]
            places = [index for index, segment in enumerate(changed) if segment != segments[index]]
            if len(places) > 1:
                yield tuple(changed)
            for index in places:
                yield (*segments[:index], changed[index], *segments[index + 1 :])


def _shifted(segment: Segment, giver: str, taker: str, move: int) -> Segment:
    """The same where one of them has no part of it, or where the giver would keep nothing."""
    layout = segment.layout
    if not {giver, taker} <= set(layout.devices):
        return segment
    shares = dict(zip(layout.devices, _in_parts(layout), strict=True))
    if shares[giver] <= move:
        return segment
    shares[giver] -= move
    shares[taker] += move
    return replace(segment, layout=replace(layout, shares=tuple(shares.values())))


def _in_parts(layout: Layout) -> list[int]:
    total = sum(layout.shares)
    return [max(round(WHOLE * share / total), 1) for share in layout.shares]
