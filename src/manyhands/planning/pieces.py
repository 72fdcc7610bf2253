"""What one segment in one layout makes of its devices: seconds, bytes kept, and what it needs of others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from manyhands.ir.geometry import Layout, Shape, Tile, empty_like
from manyhands.ir.graph import ITEM_BYTES, Layer, Statistic
from manyhands.ir.regions import needs, parameter_tiles
from manyhands.planning.assignment import is_source, statistic_source
from manyhands.planning.costs import Costs, tile_bytes
from manyhands.planning.memory import layer_bytes
from manyhands.planning.units import Units

Numbers = NDArray[np.float64]
Boxes = NDArray[np.int64]  # device, axis, start and stop


@dataclass(frozen=True)
class Reading:
    """One earlier result, and the tile of it that each device needs."""

    name: str
    boxes: Boxes
    statistic: bool  # of which statistics are taken as well, by everybody for everybody


@dataclass(frozen=True)
class Piece:
    """A segment in a layout. Arrays have one entry a device of the search."""

    forward_s: Numbers
    backward_s: Numbers
    kept_bytes: Numbers  # from forward to backward
    passing_bytes: Numbers  # at the worst moment inside, besides what is kept
    weight_bytes: Numbers
    shared_bytes: Numbers  # of gradients of weights that several hold: as many leave and come, twice a step
    readings: tuple[Reading, ...]
    statistics: tuple[int, ...]  # bytes of each exchange of statistics inside


class Pieces:
    """Pieces on some devices of a cluster, each worked out once for all places that look alike."""

    def __init__(self, units: Units, devices: tuple[str, ...], costs: Costs) -> None:
        self.units, self.devices, self.costs = units, devices, costs
        self.by_name, self.readers = units.graph.by_name(), units.graph.readers()
        self.known: dict[object, Piece] = {}
        self.seconds: dict[object, tuple[float, float]] = {}
        self.forms: dict[object, int] = {}
        self.signatures: dict[tuple[int, int], int] = {}
        self.form_of = {layer.name: self._form(layer) for layer in units.graph.layers}
        self.device_form = [self._device_form(device) for device in devices]

    def _form(self, layer: Layer) -> int:
        """A number for layers that look alike."""
        weights = tuple((p.role, p.shape, p.trainable, p.dtype) for p in layer.parameters)
        key = layer.operation, layer.shape, weights, layer.dtype, layer.differentiable
        return self.forms.setdefault(key, len(self.forms))

    def _device_form(self, device: str) -> int:
        profile, rates = self.costs.cluster.profile(device), self.costs.devices[device]
        key = rates.flops_per_s, rates.memory_bytes_per_s, rates.launch_s
        measured = (profile.timings, profile.lines, profile.stretches) if profile else None
        return self.forms.setdefault((key, measured), len(self.forms))

    def piece(self, start: int, stop: int, layout: Layout) -> Piece:
        key = layout, self.signature(start, stop)
        if key not in self.known:
            self.known[key] = _Cutter(self, self.units.layers(start, stop), layout).piece()
        found = self.known[key]
        names = self.inputs(start, stop)
        if tuple(reading.name for reading in found.readings) == names:
            return found
        again = zip(names, found.readings, strict=True)
        return replace(found, readings=tuple(Reading(n, r.boxes, r.statistic) for n, r in again))

    def inputs(self, start: int, stop: int) -> tuple[str, ...]:
        """Earlier results that a segment reads, in the order in which it does."""
        layers = self.units.layers(start, stop)
        inside = {layer.name for layer in layers}
        read = (name for layer in layers for name in layer.inputs)
        return tuple(dict.fromkeys(n for n in read if n not in inside and not is_source(self.by_name[n])))

    def signature(self, start: int, stop: int) -> int:
        """A number for segments that look alike: layers, who reads whom, and what leaves them."""
        if (start, stop) not in self.signatures:
            layers = self.units.layers(start, stop)
            outside = {name: -1 - index for index, name in enumerate(self.inputs(start, stop))}
            places = {layer.name: index for index, layer in enumerate(layers)}
            inside, places = set(places), places | outside
            key = tuple(
                (
                    self.form_of[layer.name],
                    tuple(places.get(name, self.form_of[name] + len(places)) for name in layer.inputs),
                    self.leaves(layer.name, inside),
                )
                for layer in layers
            )
            self.signatures[start, stop] = self.forms.setdefault(("segment", key), len(self.forms))
        return self.signatures[start, stop]

    def leaves(self, name: str, inside: set[str]) -> bool:
        readers = self.readers[name]
        return name in self.units.graph.outputs or not readers or any(r not in inside for r in readers)

    def layer_seconds(self, index: int, layer: Layer, tile: Tile, exchanged: bool) -> tuple[float, float]:
        key = self.device_form[index], self.form_of[layer.name], tile.shape, exchanged
        if key not in self.seconds:
            self.seconds[key] = self.costs.layer(self.devices[index], layer, tile, exchanged)
        return self.seconds[key]


class _Cutter:
    """The regions of one segment, from its last layer to its first (as `assignment` has them for a plan)."""

    def __init__(self, pieces: Pieces, layers: tuple[Layer, ...], layout: Layout) -> None:
        self.pieces, self.layers, self.layout = pieces, layers, layout
        self.devices = pieces.devices
        self.inside = {layer.name for layer in layers}
        self.computed: dict[str, list[Tile]] = {}
        self.wanted: dict[str, list[Tile]] = {}
        self.exchanged: set[str] = set()

    def piece(self) -> Piece:
        for layer in reversed(self.layers):
            self._visit(layer)
        return self._priced()

    def _home(self, layer: Layer) -> list[Tile]:
        tiles, nothing = self.layout.tiles(layer.shape), empty_like(layer.shape)
        return [tiles.get(device, nothing) for device in self.devices]

    def _visit(self, layer: Layer) -> None:
        name, home = layer.name, self._home(layer)
        tiles = self.wanted.pop(name, [empty_like(layer.shape)] * len(home))
        counted = any(reader in self.exchanged for reader in self.pieces.readers[name])
        if counted or self.pieces.leaves(name, self.inside):
            tiles = [tile.hull(own) for tile, own in zip(tiles, home, strict=True)]
        if layer.statistic:
            tiles = self._settled(layer, tiles)
        self.computed[name] = tiles
        if name in self.exchanged and layer.statistic is Statistic.MEAN:
            if not is_source(self.pieces.by_name[layer.inputs[0]]):
                self._ask(layer.inputs[0], [empty_like(self._shape(layer.inputs[0]))] * len(home))
            return
        shapes = tuple(self._shape(source) for source in layer.inputs)
        wanted = [needs(layer, tile, shapes) if tile.numel else None for tile in tiles]
        for position, source in enumerate(layer.inputs):
            if not is_source(self.pieces.by_name[source]):
                nothing = empty_like(self._shape(source))
                self._ask(source, [nothing if each is None else each[position] for each in wanted])

    def _shape(self, name: str) -> Shape:
        return self.pieces.by_name[name].shape

    def _ask(self, source: str, tiles: list[Tile]) -> None:
        before = self.wanted.get(source)
        both = tiles if before is None else [a.hull(b) for a, b in zip(before, tiles, strict=True)]
        self.wanted[source] = both

    def _settled(self, layer: Layer, tiles: list[Tile]) -> list[Tile]:
        """Statistics are exchanged unless every device has all that decides its own."""
        source = self.pieces.by_name[layer.inputs[0]]
        home = self._home(source)
        wanted = [statistic_source(layer, t, source.shape) if t.numel else t for t in tiles]
        if not all(own.covers(tile) for own, tile in zip(home, wanted, strict=True)):
            self.exchanged.add(layer.name)
            return tiles
        return tiles if layer.statistic is Statistic.MEAN else wanted

    def _priced(self) -> Piece:
        num = len(self.devices)
        forward, backward, kept, passing = (np.zeros(num) for _ in range(4))
        for layer in self.layers:
            for index, tile in enumerate(self.computed[layer.name]):
                if tile.numel:
                    exchanged = layer.name in self.exchanged
                    seconds = self.pieces.layer_seconds(index, layer, tile, exchanged)
                    forward[index] += seconds[0]
                    backward[index] += seconds[1]
                    size = tile_bytes(layer, tile)
                    kept[index] += layer_bytes(layer, tile)
                    passing[index] = max(passing[index], 2 * size)
        weights, shared = self._weights()
        readings = tuple(
            Reading(name, boxes(self.wanted[name], self._shape(name)), self._counted(name))
            for name in dict.fromkeys(n for layer in self.layers for n in layer.inputs)
            if name in self.wanted
        )
        told = tuple(
            2 * layer.item_bytes * layer.shape[1]
            for layer in self.layers
            if layer.name in self.exchanged and self._measured_here(layer.inputs[0])
        )
        return Piece(forward, backward, kept, passing, weights, shared, readings, told)

    def _measured_here(self, name: str) -> bool:
        """Are statistics of this result told inside of the segment, not as it is read?"""
        return name in self.inside or is_source(self.pieces.by_name[name])

    def _counted(self, name: str) -> bool:
        return any(reader in self.exchanged for reader in self.pieces.readers[name] if reader in self.inside)

    def _weights(self) -> tuple[Numbers, Numbers]:
        """Bytes of weights that each device holds, and of those that another holds too."""
        held, shared = np.zeros(len(self.devices)), np.zeros(len(self.devices))
        for layer in self.layers:
            holders: dict[tuple[str, Tile], list[int]] = {}
            for index, tile in enumerate(self.computed[layer.name]):
                for parameter, part in parameter_tiles(layer, tile) if tile.numel else ():
                    held[index] += part.numel * ITEM_BYTES[parameter.dtype]
                    if parameter.trainable:
                        holders.setdefault((parameter.name, part), []).append(index)
            for (_, part), among in holders.items():
                size = ITEM_BYTES[layer.dtype] * part.numel
                shared[among] += size * (len(among) - 1) / len(among)
        return held, shared


def boxes(tiles: list[Tile], shape: Shape) -> Boxes:
    """Tiles as an array of starts and stops."""
    return np.array(
        [
            [(span.start, span.stop) for span in tile.spans] if len(tile.spans) == len(shape) else []
            for tile in tiles
        ],
        dtype=np.int64,
    ).reshape(len(tiles), len(shape), 2)


def travelling(have: Boxes, need: Boxes) -> Numbers:
    """Elements that each device (row) sends to each other (column): intersections of tiles.

    `have` may have further axes in front: other ways to have it.
    """
    start = np.maximum(have[..., :, None, :, 0], need[None, :, :, 0])
    stop = np.minimum(have[..., :, None, :, 1], need[None, :, :, 1])
    common: Numbers = np.clip(stop - start, 0, None).prod(axis=-1, dtype=np.float64)
    return common * (1.0 - np.eye(len(need)))
