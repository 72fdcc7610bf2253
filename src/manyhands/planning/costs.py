"""Operations, bytes and seconds: what a tile of a layer costs on a device, and what moving bytes costs."""

from __future__ import annotations

from math import prod

from manyhands.ir.cluster import Cluster, Link
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import ITEM_BYTES, Convolve, Deconvolve, Graph, Layer, Linear, Pool, Rearrange, Whole

BACKWARD = 2.0  # backward over forward, where nothing was measured: gradients of inputs and of weights
BARE_BYTES = 310 << 20  # of a process, where nothing was measured
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

    def layer(self, device: str, layer: Layer, tile: Tile) -> tuple[float, float]:
        """Seconds of forward and of backward of a tile of a layer's result."""
        if not tile.numel or isinstance(layer.operation, Rearrange):
            return 0.0, 0.0
        rates = self.devices[device]
        passes = 3 * tile_bytes(layer, tile) / rates.memory_bytes_per_s
        seconds = rates.launch_s + forward_flops(layer, tile) / rates.flops_per_s + passes
        return seconds, BACKWARD * seconds if layer.differentiable else 0.0

    def step(self, device: str, step: str, num_bytes: int) -> float:
        """Seconds of a step that computes no layer: "send", "place", "measure" and so on."""
        return STEP_S + 2 * num_bytes / self.devices[device].memory_bytes_per_s

    def bare_bytes(self, device: str) -> int:
        """Memory of a process that is ready to train and holds no weights yet."""
        profile = self.cluster.profile(device)
        return BARE_BYTES if profile is None else profile.bare_bytes

    def link(self, source: str, target: str) -> Link:
        if (source, target) not in self.links:
            self.links[source, target] = self.cluster.link(source, target)
        return self.links[source, target]
