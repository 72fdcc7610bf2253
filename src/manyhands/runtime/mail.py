"""Tiles on their way: what goes out, what comes in and where it is put, and the sums of weights' gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.ir.graph import Statistic
from manyhands.ir.program import Content, Message, Sum
from manyhands.runtime.formats import incoming, outgoing, wire_shape, wire_view
from manyhands.runtime.store import Store
from manyhands.runtime.transport import Pending, Transport
from manyhands.runtime.weights import Weights


class Mail:
    """The messages of one device."""

    def __init__(self, device: str, store: Store, weights: Weights, transport: Transport) -> None:
        self.device, self.store, self.weights, self.transport = device, store, weights, transport
        self.arriving: dict[int, tuple[Pending, Tensor]] = {}
        self.adding: dict[int, tuple[Pending, Tensor, Sum]] = {}

    def send(self, message: Message) -> None:
        """Send a copy, so that what it was taken from may change or go."""
        tensor = self._content(message)
        copied = outgoing(tensor)
        if copied.data_ptr() == tensor.data_ptr():
            copied = copied.clone()
        self.transport.send(copied, message.target, message.tag)

    def _content(self, message: Message) -> Tensor:
        store, layer, exchanges = self.store, message.layer, self.store.territory.exchanges
        match message.content:
            case Content.VALUE:
                return store.own(layer, message.tile)
            case Content.GRADIENT:
                gradient = store.read_gradients.get((layer, message.segment))
                if gradient is None:  # nothing flowed back here
                    return torch.zeros(message.tile.shape, dtype=store.dtype(layer))
                return gradient[message.tile.within(store.territory.needed[layer, message.segment])]
            case Content.MOMENTS:
                own = exchanges[layer].own
                assert own is not None
                return store.parts[layer][self.device][(slice(None), *message.tile.within(own.tile))]
            case Content.SUMS:
                known = exchanges[layer].known
                assert known is not None
                return store.sums[layer][self.device][(slice(None), *message.tile.within(known))]

    def expect(self, message: Message) -> None:
        """Let it come straight into its margin, where that is one piece of memory; else beside it."""
        shape = message.tile.shape
        if message.content in (Content.MOMENTS, Content.SUMS):
            shape = (1 if self.store.layers[message.layer].statistic is Statistic.MEAN else 2, *shape)
        buffer = None
        if message.content is Content.VALUE:
            buffer = wire_view(self.store.margin(message.layer, message.segment, message.tile))
        if buffer is None:
            buffer = torch.empty(wire_shape(shape), dtype=self.store.dtype(message.layer))
        self.arriving[message.tag] = self.transport.expect(buffer, message.source, message.tag), buffer

    def receive(self, message: Message) -> None:
        """Wait for it, and put it where it belongs."""
        pending, buffer = self.arriving.pop(message.tag)
        pending.wait()
        store, layer, received = self.store, message.layer, incoming(buffer)
        match message.content:
            case Content.VALUE:
                margin = store.margin(layer, message.segment, message.tile)
                if margin.data_ptr() != buffer.data_ptr():
                    margin.copy_(received)
            case Content.GRADIENT:
                store.add_gradient(layer, message.tile, received)
            case Content.MOMENTS:
                store.parts[layer][message.source] = received
            case Content.SUMS:
                store.sums[layer][message.source] = received

    def start_sum(self, step: Sum) -> None:
        """Hand a bucket of gradients over to be added up; the sum will take their place."""
        pieces = [outgoing(self.weights.gradient(p.parameter, p.tile)).reshape(-1) for p in step.pieces]
        for piece in step.pieces:
            if self.weights.tiles[piece.parameter] == piece.tile:
                self.weights.tensors[piece.parameter].grad = None
        first = step.pieces[0]
        alone = len(pieces) == 1 and self.weights.tiles[first.parameter] == first.tile
        total = pieces.pop() if alone else torch.cat(pieces)  # a part of a gradient stays where it is
        del pieces
        self.adding[step.bucket] = self.transport.sum(total, step.among), total, step

    def collect(self, bucket: int) -> None:
        pending, total, step = self.adding.pop(bucket)
        pending.wait()
        sizes = [piece.tile.numel for piece in step.pieces]
        for piece, value in zip(step.pieces, total.split(sizes), strict=True):
            shaped = incoming(value.view(wire_shape(piece.tile.shape)))
            self.weights.set_gradient(piece.parameter, piece.tile, shaped)
