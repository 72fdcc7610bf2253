"""A plan changed a little, again and again, for as long as its programs are foreseen to get faster.

The search counts roughly, so that it can compare very many plans; this looks at few, by what will really run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from math import inf

from manyhands.ir.geometry import Layout
from manyhands.ir.plan import Segment

WHOLE = 960  # what shares add up to while they are moved
MOVES = (240, 120, 60, 30, 15)  # parts of it: from a quarter down to a sixty-fourth
HOPS = 12  # of the best in the end, the changes of layouts from which it goes on although they are worse
Segments = tuple[Segment, ...]


def refined(
    starts: Sequence[Segments],
    layouts: tuple[Layout, ...],
    seconds: Callable[[Segments], float],
    is_possible: Callable[[Segments], bool],
    likeness: Callable[[Segments], Hashable],
    tries: int,
) -> Segments:
    """The best that comes of these by changes of shares, of one layout, of where a segment ends.

    From each of them it goes on for as long as a change is an improvement, and from the best in the end also
    where another layout or other roles are none by themselves. `layouts` may be given to segments; `seconds`
    says how long a step takes, and `is_possible` is asked of what would be faster. What has the same
    `likeness` takes as long: of those one is tried. After so many tries it ends.
    """
    known: dict[Hashable, float] = {}
    left: set[Hashable] = set()  # from where it went on: to come there again leads to the same end

    def ask(found: Segments) -> float:
        key = likeness(found)
        if key not in known:
            known[key] = seconds(found) if len(known) < tries else inf
        return known[key]

    def better(segments: Segments) -> Segments | None:
        left.add(likeness(segments))
        now_s = ask(segments)
        return next((s for s in _changed(segments, layouts) if ask(s) < now_s and is_possible(s)), None)

    best = starts[0]

    def go_on(segments: Segments | None) -> bool:
        """From here for as long as it gets better; is it the best of all in the end?"""
        nonlocal best
        before = best
        while segments is not None and likeness(segments) not in left:
            best = segments if ask(segments) < ask(best) else best
            segments = better(segments)
        return best != before

    for segments in starts:
        go_on(segments)
    hopping = True
    while hopping and len(known) < tries:  # a layout may be better only together with other shares
        others = sorted(_with_other_ends(best, layouts), key=ask, reverse=True)
        kinds = sorted({_kind(found): found for found in others}.values(), key=ask)  # of each, the best
        hopping = any(is_possible(each) and go_on(each) for each in (*_with_roles(best), *kinds[:HOPS]))
    return best


def _with_roles(segments: Segments) -> Iterator[Segments]:
    """Two devices with each other's parts."""
    devices = dict.fromkeys(device for segment in segments for device in segment.layout.devices)
    for one, other in combinations(devices, 2):
        roles = {one: other, other: one}
        yield tuple(replace(s, layout=_with_names(s.layout, roles)) for s in segments)


def _with_names(layout: Layout, names: Mapping[str, str]) -> Layout:
    """In the same order where all of them are there before and after."""
    renamed = tuple(names.get(device, device) for device in layout.devices)
    if set(renamed) != set(layout.devices):
        return replace(layout, devices=renamed)
    shares = dict(zip(renamed, layout.shares, strict=True))
    return replace(layout, shares=tuple(shares[device] for device in layout.devices))


def _kind(segments: Segments) -> Hashable:
    """The same whatever the shares."""
    return tuple((segment.layers, segment.layout.cuts, segment.layout.devices) for segment in segments)


def _changed(segments: Segments, layouts: tuple[Layout, ...]) -> Iterator[Segments]:
    yield from _with_moved_shares(segments)
    yield from _with_other_ends(segments, layouts)


def _with_other_ends(segments: Segments, layouts: tuple[Layout, ...]) -> Iterator[Segments]:
    """Each segment in another layout, in two layouts, joined with the one after it, or ending elsewhere."""
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
            both = segment.layers + other.layers
            yield *before, replace(segment, layers=both), *after[1:]
            for place in range(1, len(both)):
                first, second = replace(segment, layers=both[:place]), replace(other, layers=both[place:])
                yield *before, first, second, *after[1:]


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
