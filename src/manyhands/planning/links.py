"""Seconds of a round of messages between devices, as arrays: what a search needs thousands of times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from manyhands.planning.costs import Costs
from manyhands.planning.pieces import Numbers

STEPS = ("send value", "expect value", "receive value")
_LARGE = 1 << 20


class Rounds:
    """Rounds of messages among the devices of a cluster, all of them at the same time."""

    def __init__(self, devices: tuple[str, ...], costs: Costs) -> None:
        links = [[costs.link(a, b) if a != b else None for b in devices] for a in devices]
        self.per_byte_s = np.array([[1 / k.bytes_per_s if k else 0.0 for k in row] for row in links])
        alone = len(devices) == 1
        self.port_per_byte_s = np.array([0.0 if alone else 1 / costs.port_bytes_per_s(d) for d in devices])
        self.latency_s = np.array([[k.latency_s if k else 0.0 for k in row] for row in links])
        self.cores, self.shared_bytes_per_s = costs.cluster.cores, costs.cluster.shared_bytes_per_s
        self.lines = {step: np.array([_line(costs, device, step) for device in devices]) for step in STEPS}
        self.known: dict[tuple[object, ...], float] = {}

    def together(self, seconds: Numbers) -> Numbers:
        """Seconds until all (along the last axis) have computed; processes of one machine share its cores."""
        slowest: Numbers = seconds.max(axis=-1)
        return slowest if self.cores is None else np.maximum(slowest, seconds.sum(axis=-1) / self.cores)

    def seconds(self, num_bytes: Numbers) -> Numbers:
        """Seconds until messages of these sizes, from row to column, have all arrived and been handled.

        The last two axes are devices; others are separate rounds.
        """
        some = num_bytes > 0
        travel = num_bytes * self.per_byte_s
        coming = num_bytes.sum(axis=-2) * self.port_per_byte_s
        moving = np.maximum(travel.sum(axis=-1).max(axis=-1), coming.max(axis=-1))
        if self.shared_bytes_per_s is not None:
            moving = np.maximum(moving, num_bytes.sum(axis=(-1, -2)) / self.shared_bytes_per_s)
        send, expect, receive = STEPS
        handling = self._handled(send, some.sum(axis=-1), num_bytes.sum(axis=-1))
        arrived = some.sum(axis=-2), num_bytes.sum(axis=-2)
        handling = handling + self._handled(expect, *arrived) + self._handled(receive, *arrived)
        latency: Numbers = (self.latency_s * some).max(axis=(-1, -2))
        total: Numbers = latency + moving + self.together(handling)
        return total

    def _handled(self, step: str, count: NDArray[np.int64], num_bytes: Numbers) -> Numbers:
        fixed, per_byte = self.lines[step].T
        result: Numbers = count * fixed + num_bytes * per_byte
        return result

    def told(self, among: tuple[int, ...], num_bytes: int) -> float:
        """Seconds of a round in which each of these devices tells each other so many bytes."""
        key = among, num_bytes
        if key not in self.known:
            size = np.zeros_like(self.per_byte_s)
            size[np.ix_(among, among)] = num_bytes
            np.fill_diagonal(size, 0.0)
            self.known[key] = float(self.seconds(size))
        return self.known[key]

    def spread(self, shared_bytes: Numbers) -> float:
        """Seconds in which gradients of weights reach their owners: so many bytes leave each device."""
        if not shared_bytes.any():
            return 0.0
        busy = np.flatnonzero(shared_bytes)
        rates = self.per_byte_s[np.ix_(busy, busy)]
        usual = float(rates.sum()) / max(int(np.count_nonzero(rates)), 1)
        fixed = sum(self.lines[step][busy].max(axis=0)[1] for step in STEPS)
        alone = float(shared_bytes.max()) * (usual + float(fixed))
        if self.shared_bytes_per_s is not None:
            alone = max(alone, float(shared_bytes.sum()) / self.shared_bytes_per_s)
        return alone


def _line(costs: Costs, device: str, step: str) -> tuple[float, float]:
    fixed = costs.step(device, step, 0)
    return fixed, (costs.step(device, step, _LARGE) - fixed) / _LARGE
