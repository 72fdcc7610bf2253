"""Operations, bytes and seconds: what a tile of a layer costs on a device, and what moving bytes costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import prod
from statistics import mean

from manyhands.ir.cluster import Cluster, Link
from manyhands.ir.geometry import Shape, Tile
from manyhands.ir.graph import ITEM_BYTES, Convolve, Deconvolve, Graph, Layer, Linear, Pool, Rearrange, Whole
from manyhands.ir.profile import AXES, CARRY, POST, Factor, Line, Timing, fractions, kind_of

SLOPE = 0.5  # of a convolution's backward, for its weights: as many operations as for its input
BACKWARD = 2.0  # backward over forward, where nothing was measured: gradients of inputs and of weights
PACK_FLOPS = 150.0  # an element: packing takes as long as these, about (it is not profiled)
THIN = 1.3  # times as long as in proportion, a few rows take (it is not profiled)
STEP_S = 20e-6  # to begin any other step, where nothing was measured


def forward_flops(layer: Layer, tile: Tile) -> int:
    """Multiplications and additions to compute a tile; a pass over memory counts as a few."""
    weight = layer.parameter("weight")
    match layer.operation:
        case Convolve() | Linear() if weight is not None:
            return 2 * tile.numel * prod(weight.shape[1:])
        case Deconvolve(window) if weight is not None:
            taps = window.rows.kernel * window.columns.kernel / (window.rows.stride * window.columns.stride)
            return int(2 * tile.numel * weight.shape[0] * taps)
        case Pool(_, window):
            return tile.numel * window.rows.kernel * window.columns.kernel
        case Whole():
            return 10 * prod(layer.shape)
        case _:
            return 5 * tile.numel


def tile_bytes(layer: Layer, tile: Tile) -> int:
    return tile.numel * layer.item_bytes


def weight_bytes(graph: Graph, tiles: dict[str, Tile]) -> int:
    """Bytes of the pieces of weights and buffers held somewhere."""
    parameters = graph.parameters()
    return sum(tile.numel * ITEM_BYTES[parameters[name].dtype] for name, tile in tiles.items())


class Costs:
    """Seconds on the devices of a cluster: as measured where there is a profile, else from nominal rates."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.devices = {device.name: device for device in cluster.devices}
        self.links: dict[tuple[str, str], Link] = {}
        self.ports: dict[str, float] = {}
        self.curves: dict[str, dict[str, Curves]] = {}
        self.lines: dict[str, dict[str, Line]] = {}
        self.stretches: dict[str, dict[str, float]] = {}
        self.kinds: dict[int, tuple[Layer, str, str]] = {}  # by identity: the layer is kept, so it stays one
        self.known: dict[tuple[str, int, Shape, bool], tuple[float, float]] = {}
        for profile in cluster.profiles:
            self.curves[profile.device] = {timing.kind: Curves(timing) for timing in profile.timings}
            self.stretches[profile.device] = dict(profile.stretches)
            self.lines[profile.device] = {line.step: line for line in profile.lines}

    def layer(self, device: str, layer: Layer, tile: Tile, exchanged: bool = False) -> tuple[float, float]:
        """Seconds of forward and of backward of a tile of a layer's result.

        `exchanged`: it is a norm or mean whose statistics are put together from several devices.
        """
        key = device, id(layer), tile.shape, exchanged
        if key not in self.known:
            self.known[key] = self._layer(device, layer, tile, exchanged)
        return self.known[key]

    def parted(self, device: str, layer: Layer, tile: Tile, boxes: tuple[Tile, ...]) -> tuple[float, float]:
        """Seconds of forward of some boxes of a tile, and of the rest of it."""
        whole_s, _ = self.layer(device, layer, tile)
        part = sum(box.numel for box in boxes) / tile.numel
        thin = THIN if boxes[0].spans[:2] == tile.spans[:2] else 1.0  # some rows; else samples
        return thin * part * whole_s, (1 - part) * whole_s

    def slope(self, device: str, layers: Mapping[str, Layer], name: str, tile: Tile) -> float:
        """Of the seconds of a convolution's backward, those of its weights' gradients."""
        _, backward_s = self.layer(device, layers[name], tile)
        alone = not layers[layers[name].inputs[0]].differentiable
        return backward_s * (1.0 if alone else SLOPE)

    def _layer(self, device: str, layer: Layer, tile: Tile, exchanged: bool) -> tuple[float, float]:
        alone, together = self._kinds(layer)
        if not tile.numel:
            return 0.0, 0.0
        if curves := self.curves.get(device):
            found = curves.get(together if exchanged else alone) or curves.get(alone) or curves.get(together)
            if found is not None:
                forward_s, backward_s = found.seconds(layer.shape, tile.shape)
                parts = zip(AXES, fractions(layer.shape, tile.shape), strict=True)
                stretch = self._stretch(device, {axis for axis, part in parts if part != 1.0})
                return stretch * forward_s, stretch * backward_s
        if isinstance(layer.operation, Rearrange):
            return 0.0, 0.0
        rates = self.devices[device]
        passes = 3 * tile_bytes(layer, tile) / rates.memory_bytes_per_s
        seconds = rates.launch_s + forward_flops(layer, tile) / rates.flops_per_s + passes
        return seconds, BACKWARD * seconds if layer.differentiable else 0.0

    def _kinds(self, layer: Layer) -> tuple[str, str]:
        if id(layer) not in self.kinds:
            self.kinds[id(layer)] = layer, kind_of(layer), kind_of(layer, exchanged=True)
        _, alone, together = self.kinds[id(layer)]
        return alone, together

    def step(self, device: str, step: str, num_bytes: int) -> float:
        """Seconds of a step that computes no layer: "send", "send value", "place", "measure" and so on."""
        lines = self.lines.get(device)
        if lines is None:
            return STEP_S + 2 * num_bytes / self.devices[device].memory_bytes_per_s
        line = lines.get(step) or lines.get(step.split()[0])
        among_others = " " in step  # messages are "send value" of any axis; one device alone has none
        stretch = self._stretch(device, set(AXES)) if among_others else 1.0
        return stretch * line.seconds(num_bytes) if line is not None else 0.0

    def _stretch(self, device: str, axes: set[str]) -> float:
        """How much longer or shorter than measured it takes among others: the mean over these axes."""
        found = [stretch for axis, stretch in self.stretches[device].items() if axis in axes]
        return mean(found) if found else 1.0

    def pack(self, device: str, numel: int) -> float:
        """Seconds of leaving the zeros of a tile out, or putting them in again."""
        return PACK_FLOPS * numel / self.devices[device].flops_per_s

    def begin(self, device: str) -> float:
        """Seconds before the first step."""
        return self._line(device, "begin", 0)

    def post(self, device: str, num_bytes: int) -> float:
        """Of the seconds of sending, those of handing over: the message is on its way meanwhile."""
        return self._line(device, POST, num_bytes)

    def carry(self, device: str, num_bytes: int) -> float:
        """Seconds that a core works on a message besides, where devices share cores."""
        return self._line(device, CARRY, num_bytes)

    def _line(self, device: str, step: str, num_bytes: int) -> float:
        """As measured, or nothing."""
        line = self.lines.get(device, {}).get(step)
        return line.seconds(num_bytes) if line is not None else 0.0

    def bare_bytes(self, device: str) -> int:
        """Memory of a process that is ready to train and holds no weights yet."""
        profile = self.cluster.profile(device)
        return self.devices[device].bare_bytes if profile is None else profile.bare_bytes

    def port_bytes_per_s(self, target: str) -> float:
        """What comes in at a device at most: the rate of its fastest link."""
        if target not in self.ports:
            sources = [name for name in self.devices if name != target]
            self.ports[target] = max(self.link(source, target).bytes_per_s for source in sources)
        return self.ports[target]

    def link(self, source: str, target: str) -> Link:
        if (source, target) not in self.links:
            self.links[source, target] = self.cluster.link(source, target)
        return self.links[source, target]


class Curves:
    """What was measured of one kind of layer, to be asked for any tile."""

    def __init__(self, timing: Timing) -> None:
        self.timing, factors = timing, dict(timing.factors)
        self.axes = tuple(_Curve(factors.get(axis, ())) for axis in AXES)

    def seconds(self, shape: Shape, tile: Shape) -> tuple[float, float]:
        """Forward and backward of a tile of that shape."""
        of_batch, of_channels, of_map = fractions(shape, tile)
        forward, backward = self.timing.forward_s, self.timing.backward_s
        parts = of_batch * shape[0] / self.timing.batch if shape else 1.0, of_channels, of_map
        for curve, fraction in zip(self.axes, parts, strict=True):
            ahead, back = curve.at(fraction)
            forward, backward = forward * ahead, backward * back
        return forward, backward


class _Curve:
    """Factors between the measured fractions of one axis; the whole has factor one."""

    def __init__(self, factors: tuple[Factor, ...]) -> None:
        self.points = [(0.0, 0.0, 0.0), *((f.fraction, f.forward, f.backward) for f in factors)]
        self.points.append((1.0, 1.0, 1.0))
        self.fractions = [point[0] for point in self.points]

    def at(self, fraction: float) -> tuple[float, float]:
        if fraction == 1.0:
            return 1.0, 1.0
        end = min(max(bisect_left(self.fractions, fraction), 2), len(self.points) - 1)
        if end < 2:  # nothing was measured along this axis
            return fraction, fraction
        (low, *below), (high, *above) = self.points[end - 1], self.points[end]
        part = (fraction - low) / (high - low)
        line = [b + (a - b) * part for b, a in zip(below, above, strict=True)]
        if low <= fraction <= high:
            return line[0], line[1]
        nearest = (low, below) if fraction < low else (high, above)  # beyond: never better than in proportion
        floor = [value * fraction / nearest[0] for value in nearest[1]]
        return max(line[0], floor[0]), max(line[1], floor[1])
