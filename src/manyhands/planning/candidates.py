"""Layouts worth trying on some devices: products of cuts, with shares by what each device can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from manyhands.ir.geometry import Axis, Cut, Layout

Cuts = tuple[Cut, ...]
ROUNDS = 3  # of balancing shares
SHARES = 1000  # what all shares add up to, about


def all_cuts(num_devices: int) -> Iterator[Cuts]:
    """One axis or two, in every way that makes a tile for each device."""
    if num_devices == 1:
        yield ()
        return
    for axis in Axis:
        yield (Cut(axis, num_devices),)
    for outer in (n for n in range(2, num_devices) if num_devices % n == 0):
        for position, one in enumerate(Axis):
            for two in list(Axis)[position + 1 :]:
                yield Cut(one, outer), Cut(two, num_devices // outer)


def by_speed(devices: tuple[str, ...], cuts: Cuts, speeds: list[float]) -> Layout:
    """Shares in proportion to speed; speeds that differ by less than can be measured are taken as equal."""
    if max(speeds) <= 1.02 * min(speeds):
        return Layout(devices, cuts, (1,) * len(devices))
    shares = tuple(max(round(SHARES * speed / sum(speeds)), 1) for speed in speeds)
    return Layout(devices, cuts, shares)


def balanced(first: Layout, seconds: Callable[[Layout], list[float]]) -> Layout:
    """The layout with shares with which all devices would be ready at the same time.

    `seconds` says how long each device would be busy under a layout.
    """
    best, busy, shares = first, seconds(first), [float(share) for share in first.shares]
    least = max(busy)
    for _ in range(ROUNDS):
        if max(busy) <= 1.02 * min(busy):
            break
        speeds = [share / max(time, 1e-12) for share, time in zip(shares, busy, strict=True)]
        shares = [speed / sum(speeds) for speed in speeds]
        layout = by_speed(first.devices, first.cuts, shares)
        busy = seconds(layout)
        if max(busy) < least:
            best, least = layout, max(busy)
    return best
