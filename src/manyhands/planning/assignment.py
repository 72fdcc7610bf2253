"""From layouts to regions: what each device owns, what it computes, and what it needs from the others."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.ir.geometry import Axis, Shape, Span, Tile, empty_like
from manyhands.ir.graph import Constant, Graph, GroupNorm, Input, Layer, Statistic
from manyhands.ir.plan import Plan
from manyhands.ir.regions import group_range, needs

Tiles = dict[str, Tile]  # by device
Followed = dict[str, dict[str, Span]]  # channels, by layer and device


@dataclass(frozen=True)
class Assignment:
    """Regions of every layer's result, by device.

    home: the disjoint ownership; computed: what a device computes, home and overlap; needed: what it must
    put together of earlier segments' results, by (layer, segment); exchanged: layers whose statistics are
    added up over devices. The segment after the last one is the loss; tellers: devices whose parts of it
    make the sum, in their order; none where everybody who evaluates it evaluates all of it.
    """

    segment_of: dict[str, int]
    home: dict[str, Tiles]
    computed: dict[str, Tiles]
    needed: dict[tuple[str, int], Tiles]
    exchanged: frozenset[str]
    tellers: tuple[str, ...] = ()

    def assembled(self, layer: str, segment: int, device: str) -> bool:
        """Does this device have to put the tile together, or has it computed all of it itself?"""
        tile = self.needed.get((layer, segment), {}).get(device)
        return tile is not None and bool(tile.numel) and not self.computed[layer][device].covers(tile)

    def evaluated(self, graph: Graph, device: str) -> Tile | None:
        """The part of the output on which this device evaluates its part of the loss, if there are parts."""
        end = 1 + max(self.segment_of.values())
        return self.needed[graph.outputs[0], end].get(device) if self.tellers else None


def is_source(layer: Layer) -> bool:
    """Batches and weights are at hand on every device; nobody computes or sends them."""
    return isinstance(layer.operation, Input | Constant)


def assign(graph: Graph, plan: Plan) -> Assignment:
    """The regions that a plan's layouts imply."""
    followed: Followed = {}
    while missing := _unfollowed(graph, regions := _Assigner(graph, plan, followed).assign()):
        for name, spans in missing.items():
            followed[name] = followed.get(name, {}) | spans
    return regions


def _unfollowed(graph: Graph, regions: Assignment) -> Followed:
    """Channels that a device has to compute, at least somewhere, for the sake of running statistics.

    Every channel is followed by somebody, and a device that follows a channel does so at every use.
    """
    uses: dict[str, list[Layer]] = {}
    for layer in graph.layers:
        running = layer.parameter("running_mean")
        if running and layer.statistic:
            uses.setdefault(running.name, []).append(layer)
    missing: Followed = {}
    for layers in uses.values():
        spans = _channels_followed([regions.computed[layer.name] for layer in layers], layers[0].shape[1])
        for layer in layers:
            for device, span in spans.items():
                tile = regions.computed[layer.name][device]
                if not tile.numel or tile.spans[1] != span:
                    missing.setdefault(layer.name, {})[device] = span
    return missing


def _channels_followed(computed: list[Tiles], num_channels: int) -> dict[str, Span]:
    """The channels each device computes in any use of a norm; what nobody does falls to the first."""
    spans: dict[str, Span] = {}
    for tiles in computed:
        for device, tile in tiles.items():
            if tile.numel:
                spans[device] = spans.get(device, tile.spans[1]).hull(tile.spans[1])
    if {c for span in spans.values() for c in range(span.start, span.stop)} != set(range(num_channels)):
        spans[next(iter(spans or computed[0]))] = Span(0, num_channels)
    return spans


class _Assigner:
    def __init__(self, graph: Graph, plan: Plan, followed: Followed) -> None:
        self.followed = followed
        self.plan, self.layers, self.readers = plan, graph.by_name(), graph.readers()
        self.outputs, self.single = set(graph.outputs), len(graph.outputs) == 1
        self.segment_of = {n: i for i, segment in enumerate(plan.segments) for n in segment.layers}
        self.home: dict[str, Tiles] = {}
        self.computed: dict[str, Tiles] = {}
        self.needed: dict[tuple[str, int], Tiles] = {}
        self.exchanged: set[str] = set()
        for name, layer in self.layers.items():
            self.home[name] = self._home(layer)
            self.computed[name] = self._nothing(layer)

    def _nothing(self, layer: Layer) -> Tiles:
        return {device: empty_like(layer.shape) for device in self.plan.devices}

    def _home(self, layer: Layer) -> Tiles:
        if is_source(layer):
            return {device: Tile.whole(layer.shape) for device in self.plan.devices}
        layout = self.plan.segments[self.segment_of[layer.name]].layout
        return self._nothing(layer) | layout.tiles(layer.shape)

    def assign(self) -> Assignment:
        end = len(self.plan.segments)
        holders = {d for name in self.outputs for d, tile in self.home[name].items() if tile.numel}
        axes = self.plan.loss if self.single else ()
        for name in self.outputs:
            homes = {d: self.home[name][d] for d in self.plan.devices if d in holders}
            self.needed[name, end] = loss_tiles(self.layers[name].shape, homes, axes)
        for index in reversed(range(end)):
            for name in reversed(self.plan.segments[index].layers):
                self._visit(self.layers[name], index)
        exchanged = frozenset(self.exchanged)
        return Assignment(
            self.segment_of, self.home, self.computed, self.needed, exchanged, self._tellers(end)
        )

    def _tellers(self, end: int) -> tuple[str, ...]:
        """The first device of each part of the loss, if there are parts."""
        firsts: dict[Tile, str] = {}
        for tiles in (self.needed[name, end] for name in self.outputs):
            for device, tile in tiles.items():
                firsts.setdefault(tile, device)
        return tuple(firsts.values()) if self.single and len(firsts) > 1 else ()

    def _visit(self, layer: Layer, index: int) -> None:
        """All readers were visited: settle what is computed of this layer, and ask for its inputs."""
        name = layer.name
        exported = name in self.outputs or any(
            self.segment_of[r] != index or r in self.exchanged for r in self.readers[name]
        )
        dead = not self.readers[name] and name not in self.outputs  # a batch norm that only learns
        for device in self.plan.devices:
            if exported or dead:
                self.computed[name][device] = self.computed[name][device].hull(self.home[name][device])
        for device, span in self.followed.get(name, {}).items():
            tile, corner = self.computed[name][device], (Span(0, 1) for _ in layer.shape[2:])
            tile = tile.with_span(1, span) if tile.numel else Tile((Span(0, 1), span, *corner))
            self.computed[name][device] = tile
        if layer.statistic:
            self._settle_statistic(layer)
        shapes = tuple(self.layers[n].shape for n in layer.inputs)
        for device in self.plan.devices:
            tile = self.computed[name][device]
            if name in self.exchanged and layer.statistic is Statistic.MEAN:
                continue  # it reads nothing but the statistics
            for source, wanted in zip(layer.inputs, needs(layer, tile, shapes), strict=True):
                self._ask(source, index, device, wanted)

    def _settle_statistic(self, layer: Layer) -> None:
        """Statistics of a tile that is whole on its device stay there; else they are exchanged."""
        (source,) = layer.inputs
        shape = self.layers[source].shape
        wanted = {
            d: statistic_source(layer, tile, shape)
            for d, tile in self.computed[layer.name].items()
            if tile.numel
        }
        if all(self.home[source][d].covers(tile) for d, tile in wanted.items()):
            if layer.statistic is not Statistic.MEAN:
                self.computed[layer.name] |= wanted
        else:
            self.exchanged.add(layer.name)

    def _ask(self, source: str, index: int, device: str, wanted: Tile) -> None:
        if not wanted.numel or is_source(self.layers[source]):
            return
        if self.segment_of[source] == index:
            self.computed[source][device] = self.computed[source][device].hull(wanted)
            return
        tiles = self.needed.setdefault((source, index), self._nothing(self.layers[source]))
        tiles[device] = tiles[device].hull(wanted)


def loss_tiles(shape: Shape, homes: Tiles, axes: tuple[Axis, ...]) -> Tiles:
    """What each device that owns some of an output needs of it for its part of the loss, a sum along `axes`.

    That is all of it along other axes. Two devices need the same tile, or nothing of each other's: else the
    parts would not add up to the loss, and everybody evaluates all of it.
    """
    whole = Tile.whole(shape)
    parts = dict.fromkeys(homes, whole)
    for dimension in (axis.dimension(len(shape)) for axis in axes):
        if dimension is not None:
            parts = {d: tile.with_span(dimension, homes[d].spans[dimension]) for d, tile in parts.items()}
    apart = sum(tile.numel for tile in set(parts.values())) == whole.numel
    return parts if apart else dict.fromkeys(homes, whole)


def statistic_source(layer: Layer, tile: Tile, shape: tuple[int, ...]) -> Tile:
    """The part of its input that decides the statistics of a tile of a norm's result."""
    batch, channels = tile.spans[0], tile.spans[1]
    if layer.statistic is Statistic.BATCH_NORM:
        batch = Span(0, shape[0])
    if isinstance(layer.operation, GroupNorm):
        size = shape[1] // layer.operation.groups
        first, last = group_range(channels, shape[1], layer.operation.groups)
        channels = Span(first * size, last * size)
    return Tile((batch, channels, *(Span(0, size) for size in shape[2:])))


def statistic_domain(layer: Layer, tile: Tile) -> Tile:
    """(samples, channels) for which a tile of a norm's input has partial statistics."""
    batch = Span(0, 1) if layer.statistic is Statistic.BATCH_NORM else tile.spans[0]
    if not tile.numel:
        return Tile((Span(0, 0), Span(0, 0)))
    return Tile((batch, tile.spans[1]))
