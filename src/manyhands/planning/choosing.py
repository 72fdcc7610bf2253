"""Which devices and layouts are worth a search, and the searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from manyhands.ir.cluster import Cluster
from manyhands.ir.geometry import Axis, Layout
from manyhands.ir.graph import Graph
from manyhands.planning.candidates import all_cuts, balanced, by_speed
from manyhands.planning.costs import Costs
from manyhands.planning.links import Rounds
from manyhands.planning.pieces import Boxes, Numbers, Pieces, boxes
from manyhands.planning.search import Found, Search, step_seconds
from manyhands.planning.strategies import parse_cuts
from manyhands.planning.units import units

FEW_DEVICES = 4  # up to which every subset is looked at
FEW_UNITS = 6  # up to which nothing is left out of a search on few devices
MAX_FUSED = 4  # units in a segment, where devices are few
MAX_LAYOUTS = 7  # of one search, the most promising
MAX_PRODUCTS = 2  # of layouts along two axes, foreseen as they are
MAX_SEARCHES = 3  # subsets of devices that are searched, the most promising


class Chooser:
    """Searches of one graph on one cluster."""

    def __init__(
        self, graph: Graph, cluster: Cluster, weight_copies: float = 3.0, loss: tuple[Axis, ...] = ()
    ) -> None:
        self.graph, self.cluster, self.weight_copies, self.loss = graph, cluster, weight_copies, loss
        self.units, self.costs = units(graph), Costs(cluster)
        self.pieces = Pieces(self.units, cluster.names, self.costs)
        self.rounds = Rounds(cluster.names, self.costs)
        kinds = [self.pieces.signature(index, index + 1) for index in range(len(self.units.runs))]
        self.alike = {kinds.index(kind): count for kind, count in Counter(kinds).items()}  # unit: how many
        self.speed = {
            device: 1 / max(self._busy(Layout((device,), (), (1,)))[index], 1e-12)
            for index, device in enumerate(cluster.names)
        }
        self.promises: dict[Layout, float] = {}
        self.samples: dict[tuple[str, ...], Pieces] = {}

    @property
    def thorough(self) -> bool:
        """Is the whole space small enough to leave nothing out?"""
        return len(self.cluster.names) < FEW_DEVICES and len(self.units.runs) <= FEW_UNITS

    def _busy(self, layout: Layout) -> list[float]:
        """Seconds for which each device computes under one layout, where the maps allow it."""
        total = np.zeros(len(self.cluster.names))
        for index, count in self.alike.items():
            shape = self.units.runs[index][-1].shape
            if all(tile.numel for tile in layout.tiles(shape).values()):
                piece = self.pieces.piece(index, index + 1, layout)
                total += count * (piece.forward_s + piece.backward_s)
        return [float(seconds) for seconds in total]

    def subsets(self, required: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        """Devices to try together, in the order of the cluster; of those alike in all, one selection."""
        names = self.cluster.names
        if not self.few:
            fastest = sorted(names, key=lambda name: (name not in required, -self.speed[name]))
            for size in _sizes(len(names)):
                yield tuple(name for name in names if name in set(fastest[:size]))
            return
        seen = set()
        for size in range(1, len(names) + 1):
            for subset in combinations(names, size):
                key = tuple(self._likeness(name) for name in subset)
                if self.cluster.links or key not in seen:
                    seen.add(key)
                    yield subset

    def _likeness(self, name: str) -> object:
        index = self.cluster.names.index(name)
        memory = self.cluster.device(name).memory_bytes, self.costs.bare_bytes(name)
        return self.pieces.device_form[index], memory

    def layouts(self, devices: tuple[str, ...]) -> tuple[Layout, ...]:
        """Layouts on these devices, and devices alone; the most promising where there are many."""
        alone = tuple(Layout((device,), (), (1,)) for device in devices)
        if len(devices) == 1:
            return alone
        speeds = [self.speed[device] for device in devices]
        cut = [by_speed(devices, cuts, speeds) for cuts in all_cuts(len(devices))]
        if not self.thorough:
            alone = (max(alone, key=lambda layout: self.speed[layout.devices[0]]),)
            cut = _varied(sorted(cut, key=self.promise), len(devices) if self.few else 0)
        if self.few:
            equal = [replace(layout, shares=(1,) * len(devices)) for layout in cut]
            refined = [self.shared(layout) for layout in cut]
            cut = [*cut, *refined, *equal] if self.thorough else [*refined, *equal[:2]]
        return tuple(dict.fromkeys((*alone, *cut)))

    def products(self) -> list[str]:
        """The most promising ways to cut along two axes, the same for the whole network."""
        names = self.cluster.names
        speeds = [self.speed[name] for name in names]
        grid = parse_cuts("grid", len(names))
        cuts = [cuts for cuts in all_cuts(len(names)) if len(cuts) > 1 and cuts != grid]
        layouts = sorted((by_speed(names, each, speeds) for each in cuts), key=self.promise)
        return [",".join(map(str, layout.cuts)) for layout in layouts[:MAX_PRODUCTS]]

    def shared(self, first: Layout) -> Layout:
        """The same cuts, with shares by what each device can do; of many devices, the speeds must do."""
        if not self.few:
            return first
        where = [self.cluster.names.index(device) for device in first.devices]

        def busy(layout: Layout) -> list[float]:
            seconds = self._busy(layout)
            return [seconds[index] for index in where]

        return balanced(first, busy)

    def promise(self, layout: Layout) -> float:
        """Seconds of the network under one layout, or on the fastest device where that cannot be.

        A rough guide, from the first, the middle and the last device.
        """
        if layout not in self.promises:
            self.promises[layout] = self._promise(layout)
        return self.promises[layout]

    def _promise(self, layout: Layout) -> float:
        num, cores = len(layout.devices), self.cluster.cores or len(layout.devices)
        sample = tuple(dict.fromkeys(layout.devices[index] for index in (0, num // 2, num - 1)))
        if sample not in self.samples:
            self.samples[sample] = Pieces(self.units, sample, self.costs)
        pieces = self.samples[sample]
        fastest = max(layout.devices, key=lambda device: self.speed[device])
        alone, rates = Layout((fastest,), (), (1,)), self.rounds.per_byte_s
        per_byte_s = float(rates.sum()) / max(int(np.count_nonzero(rates)), 1)
        blocking = traffic = 0.0
        for index, count in self.alike.items():
            shape = self.units.runs[index][-1].shape
            if not all(tile.numel for tile in layout.tiles(shape).values()):
                piece = self.pieces.piece(index, index + 1, alone)
                blocking += count * float((piece.forward_s + piece.backward_s).max())
                continue
            piece = pieces.piece(index, index + 1, layout)
            seconds = piece.forward_s + piece.backward_s
            blocking += count * max(float(seconds.max()), float(seconds.mean()) * num / cores)
            for reading in piece.readings:
                layer = pieces.by_name[reading.name]
                tiles = layout.tiles(layer.shape)
                have = boxes([tiles[device] for device in sample], layer.shape)
                blocking += 2 * count * per_byte_s * layer.item_bytes * _missing(have, reading.boxes)
            traffic += 2 * count * per_byte_s * float(piece.shared_bytes.max())
        return float(step_seconds(np.array(blocking), np.array(traffic)))

    def searches(self, required: tuple[str, ...] = ()) -> list[tuple[Layout, ...]]:
        """The layouts of each search that is worth its time, on subsets with the required devices."""
        found = [self.layouts(devices) for devices in self.subsets(required) if set(required) <= set(devices)]
        if self.thorough:
            return list(dict.fromkeys(part for layouts in found for part in (layouts, *_by_axis(layouts))))
        found.sort(key=lambda layouts: min(map(self.promise, layouts)))
        alone = [layouts for layouts in found if len(layouts) == 1]
        count = MAX_SEARCHES if self.few else MAX_SEARCHES - 1
        everybody = [layouts for layouts in found if layouts[-1].devices == self.cluster.names]
        return list(dict.fromkeys((*found[:count], *alone[:1], *(everybody if self.few else ()))))

    @property
    def few(self) -> bool:
        """Are the devices few enough to look at every subset, and to search with two counts?"""
        return len(self.cluster.names) <= FEW_DEVICES

    def search(
        self, layouts: tuple[Layout, ...], limit_bytes: Numbers | None, *, roomy: bool = False
    ) -> Found | None:
        fused = None if self.thorough else MAX_FUSED if self.few else 2
        return self.searching(layouts, fused, roomy=roomy).best(limit_bytes)

    def searching(
        self, layouts: tuple[Layout, ...], fused: int | None = None, *, roomy: bool = False
    ) -> Search:
        place = self.units, layouts, self.pieces, self.rounds
        return Search(*place, fused, self.weight_copies, roomy, self.loss)


def _varied(layouts: list[Layout], num_devices: int) -> list[Layout]:
    """Of layouts in the order of what they promise for the whole network, the first few.

    What is bad for the whole may be best for a part of it, as channels are where weights are large: so all
    that cut one axis for so many devices stay.
    """
    simple = [layout for layout in layouts[MAX_LAYOUTS:] if [c.count for c in layout.cuts] == [num_devices]]
    return layouts[:MAX_LAYOUTS] + [each for each in simple if each.cuts[0].axis is not Axis.COLUMNS]


def _by_axis(layouts: tuple[Layout, ...]) -> Iterator[tuple[Layout, ...]]:
    """The layouts that cut along one axis, with those that do not cut, for each axis.

    The best plan of each is foreseen by its programs, and the search's own count errs a little.
    """
    alone = [layout for layout in layouts if not layout.cuts]
    for axis in Axis:
        if cut := [layout for layout in layouts if [each.axis for each in layout.cuts] == [axis]]:
            yield (*alone, *cut)


def _missing(have: Boxes, need: Boxes) -> float:
    """Elements that a device needs and does not have, of the one that lacks most."""
    start, stop = np.maximum(have, need)[..., 0], np.minimum(have, need)[..., 1]
    common = np.clip(stop - start, 0, None).prod(axis=-1)
    return float(((need[..., 1] - need[..., 0]).prod(axis=-1) - common).max())


def _sizes(num_devices: int) -> list[int]:
    """How many devices to try: few, then half as many again, and all."""
    sizes, size = {1, 2, 3, 4, num_devices}, 4
    while size < num_devices:
        sizes.add(size)
        size += size // 2
    return sorted(size for size in sizes if size <= num_devices)
