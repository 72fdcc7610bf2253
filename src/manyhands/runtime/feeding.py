"""Bring each device the part of a batch that it reads, from where the images are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.errors import RequestError
from manyhands.ir.geometry import Shape, Span, Tile, Transfer
from manyhands.runtime.packets import FIRST_TAG, Packet, announce, deliver, receive_announcement
from manyhands.runtime.transport import Pending, Transport


class Feeder:
    """One device's part in bringing batches to where they are read.

    `samples` says who brings which samples, `reads` what this device reads of each input, and `ways` what is
    sent of each input, the same list on every device.
    """

    def __init__(
        self,
        transport: Transport,
        device: str,
        samples: dict[str, Span],
        reads: tuple[Tile, ...],
        ways: tuple[tuple[Transfer, ...], ...],
        shapes: tuple[Shape, ...],
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        self.transport, self.device, self.samples = transport, device, samples
        self.reads, self.ways, self.shapes, self.dtypes = reads, ways, shapes, dtypes

    def bring(self, inputs: Sequence[Tensor], targets: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """From this device's own samples to the tiles that it reads and the targets of all samples."""
        mine = self.samples[self.device]
        dtypes = self.dtypes
        inputs = self._checked(inputs, mine) if len(mine) else ()
        tiles, arriving = [], list[tuple[Pending, Tensor, Tensor]]()
        for position, tile in enumerate(self.reads):
            buffer = torch.empty(tile.shape, dtype=dtypes[position])
            tiles.append(buffer)
            for index, way in self._numbered(position):
                if way.target == self.device:
                    part = torch.empty(way.tile.shape, dtype=dtypes[position])
                    tag = FIRST_TAG + 3 + index
                    pending = self.transport.expect(part, way.source, tag)
                    arriving.append((pending, part, buffer[way.tile.within(tile)]))
        self._send(inputs, mine)
        for position, tile in enumerate(self.reads):
            self._place(inputs, position, tile, mine, tiles[position])
        for pending, part, place in arriving:
            pending.wait()
            place.copy_(part)
        return tuple(tiles), self._targets(targets)

    def _checked(self, inputs: Sequence[Tensor], mine: Span) -> tuple[Tensor, ...]:
        """Inputs of the type that travels; those of another shape than the plan's are refused."""
        for given, shape in zip(inputs, self.shapes, strict=True):
            wanted = (len(mine), *shape[1:])
            if tuple(given.shape) != wanted:
                raise RequestError(
                    f"{self.device} brought {_times(given.shape)} where the plan has {_times(wanted)} of it."
                )
        return tuple(given.to(dtype) for given, dtype in zip(inputs, self.dtypes, strict=True))

    def _numbered(self, position: int) -> list[tuple[int, Transfer]]:
        """The transfers of an input with numbers that no other has."""
        first = sum(len(ways) for ways in self.ways[:position])
        return list(enumerate(self.ways[position], first))

    def _send(self, inputs: Sequence[Tensor], mine: Span) -> None:
        for position in range(len(self.ways)):
            for index, way in self._numbered(position):
                if way.source == self.device:
                    held = _held(inputs[position], mine)
                    part = inputs[position][way.tile.within(held)].contiguous().clone()
                    self.transport.send(part, way.target, FIRST_TAG + 3 + index)

    def _place(self, inputs: Sequence[Tensor], position: int, tile: Tile, mine: Span, buffer: Tensor) -> None:
        if not len(mine):
            return
        held = _held(inputs[position], mine)
        own = held & tile
        if own.numel:
            buffer[own.within(tile)] = inputs[position][own.within(held)]

    def _targets(self, targets: Tensor | None) -> Tensor:
        """Everybody's targets, in the order of samples."""
        bringers = [device for device, span in self.samples.items() if len(span)]
        others = [device for device in self.samples if device != self.device]
        brings = self.device in bringers
        if brings and targets is None:
            raise RequestError(f"{self.device} brought images without targets.")
        packet = Packet(None, (targets,)) if brings and targets is not None else Packet(None, ())
        for other in others if brings else ():
            announce(self.transport, packet, other)
        sources = [d for d in bringers if d != self.device]
        announced = {d: receive_announcement(self.transport, d) for d in sources}
        waiting = [
            self.transport.expect(tensor.view(-1), d, FIRST_TAG + 2)
            for d in sources
            for tensor in announced[d].tensors
            if tensor.numel()
        ]
        for other in others if brings else ():
            deliver(self.transport, packet, other)
        for pending in waiting:
            pending.wait()
        parts = {self.device: packet.tensors} | {d: announced[d].tensors for d in sources}
        return torch.cat([tensor for device in bringers for tensor in parts[device]])


def _times(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def _held(tensor: Tensor, mine: Span) -> Tile:
    return Tile.whole(tensor.shape).with_span(0, mine)
