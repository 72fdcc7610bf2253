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
    says how long a step takes, and `is_possible` is asked of what would be faster (starts are). What has the
    same `likeness` takes as long: of those one is tried. After so many tries it ends.
    """
    climb = _Climb(starts, layouts, seconds, is_possible, likeness)
    for number, segments in enumerate(starts, 1):  # half of the tries, the same for each
        climb.go_on(segments, max(tries * number // (2 * len(starts)), len(starts)))
    while climb.hop(tries):
        pass
    return climb.best


class _Climb:
    """What was tried, and the best of it."""

    def __init__(
        self,
        starts: Sequence[Segments],
        layouts: tuple[Layout, ...],
        seconds: Callable[[Segments], float],
        is_possible: Callable[[Segments], bool],
        likeness: Callable[[Segments], Hashable],
    ) -> None:
        self.layouts, self.likeness, self.is_possible = layouts, likeness, is_possible
        self.measure = seconds
        self.known: dict[Hashable, float] = {}
        self.possible: dict[Hashable, bool] = {}
        self.left: set[Hashable] = set()  # from where it went on already
        self.best, self.allowed = starts[0], len(starts)
        for segments in starts:
            self.seconds(segments)

    def seconds(self, segments: Segments) -> float:
        """Of a step; endless where nothing more may be tried."""
        key = self.likeness(segments)
        if key not in self.known and len(self.known) < self.allowed:
            self.known[key] = self.measure(segments)
        return self.known.get(key, inf)

    def can_be(self, segments: Segments) -> bool:
        key = self.likeness(segments)
        if key not in self.possible:
            self.possible[key] = self.is_possible(segments)
        return self.possible[key]

    def go_on(self, segments: Segments | None, tries: int) -> bool:
        """From here for as long as it gets better; is it the best of all in the end?"""
        before, self.allowed = self.best, tries
        while segments is not None and self.likeness(segments) not in self.left:
            if self.seconds(segments) < self.seconds(self.best):
                self.best = segments
            segments = self._better(segments)
        return self.best != before

    def _better(self, segments: Segments) -> Segments | None:
        self.left.add(self.likeness(segments))
        now_s, changed = self.seconds(segments), _changed(segments, self.layouts)
        return next((s for s in changed if self.seconds(s) < now_s and self.can_be(s)), None)

    def hop(self, tries: int) -> bool:
        """From the best to layouts and roles that are better only with other shares; is one of them?"""
        self.allowed = tries
        others = sorted(_with_other_ends(self.best, self.layouts), key=self.seconds, reverse=True)
        kinds = {_kind(found): found for found in others}  # of each, the best
        nearest = (*_with_roles(self.best), *sorted(kinds.values(), key=self.seconds)[:HOPS])
        hops = (each for each in nearest if self.seconds(each) < inf and self.can_be(each))
        return any(self.go_on(each, tries) for each in hops)


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
