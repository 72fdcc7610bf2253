"""Where the images of a batch are, and what of them has to travel before a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from manyhands.errors import RequestError
from manyhands.ir.geometry import Span, Tile, Transfer, divide, transfers
from manyhands.ir.graph import ITEM_BYTES, Input
from manyhands.planning.lowering import Lowered
from manyhands.planning.territories import input_tiles


class Feed(Enum):
    """Every device reads the same files; or the first has them all; or each has its own."""

    REPLICATED = "replicated"
    SOURCE = "source"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Feeding:
    """Who brings which samples of a batch, which part of each input a device reads, and what is sent."""

    feed: Feed
    samples: dict[str, Span]
    reads: dict[str, tuple[Tile, ...]]
    ways: tuple[tuple[Transfer, ...], ...]  # of each input
    item_bytes: tuple[int, ...]

    def sent_bytes(self, device: str) -> int:
        """Bytes of the inputs that a device sends in one step. (Targets come on top.)"""
        return sum(
            way.tile.numel * size
            for ways, size in zip(self.ways, self.item_bytes, strict=True)
            for way in ways
            if way.source == device
        )


def feed_plan(lowered: Lowered, feed: Feed) -> Feeding:
    """How the batches of a plan come to where they are read."""
    graph, devices = lowered.graph, lowered.plan.devices
    computed = {d: {name: tiles[d] for name, tiles in lowered.regions.computed.items()} for d in devices}
    reads = {device: input_tiles(graph, computed[device]) for device in devices}
    inputs = [layer for layer in graph.layers if isinstance(layer.operation, Input)]
    inputs.sort(key=lambda layer: layer.operation.position if isinstance(layer.operation, Input) else 0)
    samples = _samples(feed, devices, reads, lowered.plan.batch)
    ways = []
    for position, layer in enumerate(inputs):
        whole = Tile.whole(layer.shape)
        have = {d: whole.with_span(0, span) for d, span in samples.items()}
        need = {d: reads[d][position] for d in devices}
        ways.append(() if feed is Feed.REPLICATED else transfers(have, need))
        if feed is Feed.LOCAL:
            _refuse_whole_images(ways[-1], whole)
    return Feeding(feed, samples, reads, tuple(ways), tuple(ITEM_BYTES[layer.dtype] for layer in inputs))


def _samples(
    feed: Feed, devices: tuple[str, ...], reads: dict[str, tuple[Tile, ...]], batch: int
) -> dict[str, Span]:
    match feed:
        case Feed.REPLICATED:
            return {device: Span(0, batch) for device in devices}
        case Feed.SOURCE:
            return {device: Span(0, batch if device == devices[0] else 0) for device in devices}
        case Feed.LOCAL:
            return dict(zip(devices, _local_samples(devices, reads, batch), strict=True))


def _local_samples(
    devices: tuple[str, ...], reads: dict[str, tuple[Tile, ...]], batch: int
) -> tuple[Span, ...]:
    """Each device brings what it reads, where a plan divides the batch; else equal parts."""
    if batch < len(devices):
        raise RequestError(
            f"local data: a batch of {batch} cannot hold a sample of each of {len(devices)} devices. "
            f"Try batch = {len(devices)}."
        )
    read = [reads[device][0].spans[0] for device in devices]
    apart = all(a.stop == b.start for a, b in zip(read, read[1:], strict=False))
    if apart and read[0].start == 0 and read[-1].stop == batch and all(len(span) for span in read):
        return tuple(read)
    return divide(Span(0, batch), (1,) * len(devices))


def _refuse_whole_images(ways: tuple[Transfer, ...], whole: Tile) -> None:
    """Local images leave their device in parts or not at all."""
    for way in ways:
        if way.tile.spans[1:] == whole.spans[1:]:
            raise RequestError(
                f"local data: this plan would send whole images of {way.source} to {way.target}. "
                'Cut the first layers by rows or columns, or use feed = "source".'
            )
