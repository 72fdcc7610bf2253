"""The best plan on given devices: dynamic programming over the places where segments may end.

A label is a plan for the units before a boundary. What follows depends on it only by the layouts of the
results that cross the boundary, so of labels alike in these the dominated ones are dropped. A thorough search
is exact within its cost model; others go on from `MAX_LABELS` labels of a boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Axis, Layout, empty_like
from manyhands.ir.plan import Plan, Segment
from manyhands.planning.assignment import loss_tiles
from manyhands.planning.links import Rounds
from manyhands.planning.pieces import Boxes, Numbers, Piece, Pieces, Reading, boxes, travelling
from manyhands.planning.units import Units

MAX_LABELS = 40  # of a boundary, where not every label is followed
OVERLAP = 0.5  # of the blocking seconds, in which gradients of weights can travel besides
ROOMY_OVERLAP = (
    0.9  # the same of gradients and new weights together, where they may be on their way for longer
)


@dataclass(frozen=True)
class Found:
    """The best plan of a search and what it is estimated to cost."""

    plan: Plan
    seconds: float
    peak_bytes: Numbers  # of each device of the cluster, beyond its bare process


class Option(NamedTuple):
    """A segment that can come next; `fetch`: for each result it reads, seconds by that result's layout."""

    stop: int
    layout: int
    computing_s: float
    traffic_s: float
    fetch: tuple[tuple[int, Numbers], ...]  # position among the results alive, seconds by layout
    held_bytes: Numbers
    passing_bytes: Numbers


@dataclass
class Labels:
    """Labels at one boundary, as columns."""

    layouts: list[NDArray[np.int64]] = field(default_factory=list)
    costs: list[Numbers] = field(default_factory=list)  # blocking and traffic seconds
    memory: list[Numbers] = field(default_factory=list)  # held and passing bytes, by device
    origins: list[tuple[int, NDArray[np.int64], Option]] = field(default_factory=list)


@dataclass(frozen=True)
class Kept:
    """The labels of a boundary that are worth going on from; origin: boundary, label there, option taken."""

    layouts: NDArray[np.int64]
    costs: Numbers
    memory: Numbers
    origins: tuple[tuple[int, int, Option], ...]


def step_seconds(blocking_s: Numbers, traffic_s: Numbers, *, roomy: bool = False) -> Numbers:
    """Half of the traffic of weights is gradients, which travel during backward; half is new weights.

    With room for them on their way, these travel during the next forward.
    """
    if roomy:
        return blocking_s + np.maximum(0.0, traffic_s - ROOMY_OVERLAP * blocking_s)
    half = traffic_s / 2
    return blocking_s + half + np.maximum(0.0, half - OVERLAP * blocking_s)


class Search:
    """Plans for one graph among given layouts, whose devices are some of those of `pieces`."""

    def __init__(
        self,
        units: Units,
        layouts: tuple[Layout, ...],
        pieces: Pieces,
        rounds: Rounds,
        max_fused: int | None = None,
        weight_copies: float = 3.0,  # the weight, its gradient, its momentum
        roomy: bool = False,
        loss: tuple[Axis, ...] = (),  # axes of the output along which it is a sum of parts
    ) -> None:
        self.units, self.layouts, self.pieces, self.rounds = units, layouts, pieces, rounds
        self.thorough, self.by_name = max_fused is None, units.graph.by_name()
        self.weight_copies, self.roomy = weight_copies, roomy
        self.loss = loss if len(units.graph.outputs) == 1 else ()
        self.max_fused = len(units.runs) if max_fused is None else max_fused
        self.fetched: dict[object, Numbers] = {}
        self.homes: dict[tuple[int, ...], Boxes] = {}
        self.computed: dict[int, float] = {}

    def best(self, limit_bytes: Numbers | None = None) -> Found | None:
        """The fastest plan within what each device may hold beyond its bare process; None: nothing fits.

        A thorough search looks first for a good plan, then at everything that could be better.
        """
        found = self._pass(limit_bytes, MAX_LABELS, np.inf)
        if not self.thorough:
            return found
        better = self._pass(limit_bytes, None, np.inf if found is None else found.seconds)
        return min((f for f in (found, better) if f is not None), key=lambda f: f.seconds, default=None)

    def _pass(self, limit_bytes: Numbers | None, max_labels: int | None, below_s: float) -> Found | None:
        """The best plan, with so many labels at each boundary and none that must take `below_s` or longer."""
        end, num = len(self.units.runs), len(self.pieces.devices)
        by_memory, least = limit_bytes is not None, self.least_s
        waiting = [Labels() for _ in range(end + 1)]
        nothing = np.zeros((1, 0), dtype=np.int64)
        kept = {0: Kept(nothing, np.zeros((1, 2)), np.zeros((1, 2, num)), ())}
        for start in range(end):
            if start:
                kept[start] = self._pruned(waiting[start], by_memory, max_labels, least[start], below_s)
            for option in self.options[start] if len(kept[start].costs) else ():
                self._extend(waiting[option.stop], kept[start], start, option, limit_bytes)
        last = self._pruned(waiting[end], by_memory, max_labels, 0.0, below_s)
        if not len(last.costs):
            return None
        closing = np.array([self._closing(row) for row in last.layouts])
        seconds = step_seconds(last.costs[:, 0] + closing, last.costs[:, 1], roomy=self.roomy)
        index = int(seconds.argmin())
        kept[end] = last
        return Found(self._plan(kept, index), float(seconds[index]), last.memory[index].sum(axis=0))

    @cached_property
    def least_s(self) -> list[float]:
        """From each unit to the end, seconds that no plan can do without: computing, nothing brought."""
        least = [0.0] * (len(self.units.runs) + 1)
        for start in reversed(range(len(self.units.runs))):
            ways = (option.computing_s + least[option.stop] for option in self.options[start])
            least[start] = min(ways, default=np.inf)
        return least

    def estimate(self, plan: Plan) -> Found | None:
        """What a given plan costs by the same count; None where its segments end elsewhere or cannot be."""
        num, start = len(self.pieces.devices), 0
        kept = Kept(np.zeros((1, 0), np.int64), np.zeros((1, 2)), np.zeros((1, 2, num)), ())
        for segment in plan.segments:
            stop = self.units.unit_of[segment.layers[-1]] + 1
            names = tuple(layer.name for layer in self.units.layers(start, stop))
            piece = self.piece(start, stop, segment.layout) if names == segment.layers else None
            if piece is None:
                return None
            labels = Labels()
            option = self._option(start, stop, self.layouts.index(segment.layout), piece)
            self._extend(labels, kept, start, option, None)
            kept, start = self._pruned(labels, by_memory=False), stop
        blocking = kept.costs[:, 0] + self._closing(kept.layouts[0])
        seconds = step_seconds(blocking, kept.costs[:, 1], roomy=self.roomy)
        return Found(plan, float(seconds[0]), kept.memory[0].sum(axis=0))

    def _pruned(
        self,
        labels: Labels,
        by_memory: bool,
        max_labels: int | None = None,
        rest_s: float = 0.0,
        below_s: float = np.inf,
    ) -> Kept:
        """The labels that no other with the same layouts dominates; where there are too many, the fastest.

        Dropped as well: those that are no faster than `below_s` even if the rest takes only `rest_s`.
        """
        costs = np.concatenate(labels.costs or [np.zeros((0, 2))])
        seconds = step_seconds(costs[:, 0] + rest_s, costs[:, 1], roomy=self.roomy)
        order = np.argsort(seconds, kind="stable")
        order = order[seconds[order] < below_s]
        if not len(order):
            return Kept(np.zeros((0, 0), np.int64), np.zeros((0, 2)), np.zeros((0, 2, 0)), ())
        layouts, costs = np.concatenate(labels.layouts)[order], costs[order]
        memory = np.concatenate(labels.memory)[order]
        values = np.hstack([costs, memory.reshape(len(costs), -1)]) if by_memory else costs
        kept = _not_dominated(layouts, values)
        if max_labels is not None and len(kept) > max_labels:
            if by_memory:  # half of them for their speed, half for their size
                size = memory.sum(axis=1).max(axis=1)
                small = sorted(kept, key=lambda index: float(size[index]))[: max_labels // 2]
                kept = list(dict.fromkeys(kept[: max_labels // 2] + small))
            kept = kept[:max_labels]
        origins = [(start, int(i), option) for start, chosen, option in labels.origins for i in chosen]
        return Kept(layouts[kept], costs[kept], memory[kept], tuple(origins[order[index]] for index in kept))

    # ---- one more segment ------------------------------------------------------------------------------

    def _extend(
        self, labels: Labels, kept: Kept, start: int, option: Option, limit_bytes: Numbers | None
    ) -> None:
        costs = kept.costs + (option.computing_s, option.traffic_s)
        for position, by_layout in option.fetch:
            costs[:, 0] += by_layout[kept.layouts[:, position]]
        held = kept.memory[:, 0] + option.held_bytes
        passing = np.maximum(kept.memory[:, 1], option.passing_bytes)
        chosen = np.arange(len(costs))
        if limit_bytes is not None:
            chosen = np.flatnonzero(np.all(held + passing <= limit_bytes, axis=1))
        if not len(chosen):
            return
        before = {name: index for index, name in enumerate(self.units.alive[start])}
        columns = [
            np.full(len(chosen), option.layout)
            if self.units.unit_of[name] >= start
            else kept.layouts[chosen, before[name]]
            for name in self.units.alive[option.stop]
        ]
        labels.layouts.append(np.stack(columns, axis=1) if columns else np.zeros((len(chosen), 0), np.int64))
        labels.costs.append(costs[chosen])
        labels.memory.append(np.stack([held[chosen], passing[chosen]], axis=1))
        labels.origins.append((start, chosen, option))

    @cached_property
    def options(self) -> list[list[Option]]:
        return [self._options(start) for start in range(len(self.units.runs))]

    def _options(self, start: int) -> list[Option]:
        """Segments from here on that no chain of shorter ones in the same layout beats in every way."""
        found: list[Option] = []
        for index, layout in enumerate(self.layouts):
            for stop in self._stops(start, layout):
                piece = self.piece(start, stop, layout)
                if piece is None:
                    continue
                if stop > start + 1 and self._beaten(start, stop, layout, piece):
                    if not self.thorough and stop > start + 2:
                        break  # longer ones are hardly better
                    continue
                found.append(self._option(start, stop, index, piece))
        return found

    def _stops(self, start: int, layout: Layout) -> range:
        """Where a segment may end.

        Cut by batch or not at all, longer ones are sums of shorter ones but for what a stride leaves unread.
        """
        plain = not self.thorough and all(cut.axis is Axis.BATCH for cut in layout.cuts)
        return range(start + 1, min(start + (1 if plain else self.max_fused), len(self.units.runs)) + 1)

    def piece(self, start: int, stop: int, layout: Layout) -> Piece | None:
        """None where a device of the layout would own nothing of the result."""
        shape = self.units.runs[stop - 1][-1].shape
        if not all(tile.numel for tile in layout.tiles(shape).values()):
            return None
        return self.pieces.piece(start, stop, layout)

    def _beaten(self, start: int, stop: int, layout: Layout, whole: Piece) -> bool:
        """Is the segment without its last unit, and that unit by itself, as fast and as small?"""
        one, two = self.piece(start, stop - 1, layout), self.piece(stop - 1, stop, layout)
        if one is None or two is None:
            return False
        inside = [r for r in two.readings if self.units.unit_of[r.name] >= start]
        if {r.name for r in one.readings} & {r.name for r in two.readings}:
            return False  # it would be brought twice
        seconds = self.computing(one) + self.computing(two)
        index = self.layouts.index(layout)
        seconds += sum(float(self.fetch(reading)[index]) for reading in inside)
        smaller = np.all(one.kept_bytes + two.kept_bytes <= whole.kept_bytes)
        return bool(smaller) and seconds <= self.computing(whole)

    def _option(self, start: int, stop: int, index: int, piece: Piece) -> Option:
        alive = self.units.alive[start]
        fetch = tuple((alive.index(reading.name), self.fetch(reading)) for reading in piece.readings)
        held = piece.kept_bytes + self.weight_copies * piece.weight_bytes
        traffic = 2 * self.rounds.spread(piece.shared_bytes)
        return Option(stop, index, self.computing(piece), traffic, fetch, held, piece.passing_bytes)

    def computing(self, piece: Piece) -> float:
        """Seconds for which a piece blocks by itself: forward, backward and statistics inside of it."""
        key = id(piece.forward_s)
        if key not in self.computed:
            seconds = self.rounds.together(piece.forward_s) + self.rounds.together(piece.backward_s)
            busy = _places(piece.forward_s > 0)
            told = sum(self.rounds.told(busy, size) for size in piece.statistics)
            self.computed[key] = float(seconds) + 2 * told
        return self.computed[key]

    def fetch(self, reading: Reading) -> Numbers:
        """Seconds to bring an earlier result to its readers, and its gradient back, by the layout it has."""
        source = self.by_name[reading.name]
        key = source.shape, source.item_bytes, source.differentiable, id(reading.boxes)
        if key not in self.fetched:
            homes = self._homes(source.shape)
            ways = 2 if source.differentiable else 1
            size = travelling(homes, reading.boxes) * source.item_bytes
            seconds = ways * self.rounds.seconds(size)
            if reading.statistic:
                told = 2 * source.item_bytes * source.shape[1]
                busy = [_places((home[..., 1] > home[..., 0]).all(axis=-1)) for home in homes]
                seconds = seconds + np.array([2 * self.rounds.told(places, told) for places in busy])
            self.fetched[key] = seconds
        return self.fetched[key]

    def _homes(self, shape: tuple[int, ...]) -> Boxes:
        """The tiles of a result in every layout."""
        if shape not in self.homes:
            nothing, found = empty_like(shape), []
            for layout in self.layouts:
                tiles = layout.tiles(shape)
                found.append(boxes([tiles.get(d, nothing) for d in self.pieces.devices], shape))
            self.homes[shape] = np.stack(found)
        return self.homes[shape]

    # ---- the end ---------------------------------------------------------------------------------------

    def _closing(self, row: NDArray[np.int64]) -> float:
        """Seconds to bring the outputs to everybody who evaluates the loss."""
        seconds = 0.0
        for name, index in zip(self.units.alive[-1], row, strict=True):
            layer, layout = self.by_name[name], self.layouts[int(index)]
            homes = {d: tile for d, tile in layout.tiles(layer.shape).items() if tile.numel}
            tiles, nothing = loss_tiles(layer.shape, homes, self.loss), empty_like(layer.shape)
            need = boxes([tiles.get(d, nothing) for d in self.pieces.devices], layer.shape)
            size = travelling(self._homes(layer.shape)[int(index)], need) * layer.item_bytes
            seconds += float(self.rounds.seconds(size))
        return seconds

    def _plan(self, kept: dict[int, Kept], index: int) -> Plan:
        """The plan that a label at the end stands for; neighbours that exchange nothing are joined."""
        taken: list[tuple[int, Option]] = []
        boundary = len(self.units.runs)
        while boundary:
            boundary, index, option = kept[boundary].origins[index]
            taken.insert(0, (boundary, option))
        segments: list[Segment] = []
        for start, option in taken:
            layout = self.layouts[option.layout]
            names = tuple(layer.name for layer in self.units.layers(start, option.stop))
            free = all(cut.axis is Axis.BATCH for cut in layout.cuts)
            if segments and free and segments[-1].layout == layout:
                names = segments.pop().layers + names
            segments.append(Segment(names, layout))
        used = {device for segment in segments for device in segment.layout.devices}
        devices = tuple(device for device in self.pieces.devices if device in used)
        batch = self.units.graph.layers[0].shape[0]
        return Plan(graph_digest(self.units.graph), batch, devices, tuple(segments))


def _places(chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.flatnonzero(chosen))


def _not_dominated(layouts: NDArray[np.int64], values: Numbers) -> list[int]:
    """Rows, in their order, that no earlier row with the same layouts is as good as in every value."""
    fronts: dict[bytes, list[int]] = {}
    kept: list[int] = []
    for index, row in enumerate(values):
        front = fronts.setdefault(layouts[index].tobytes(), [])
        if front and (values[front] <= row).all(axis=1).any():
            continue
        front.append(index)
        kept.append(index)
    return kept
