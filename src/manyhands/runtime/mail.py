"""Tiles and weights on their way: what goes out, what comes in, and where it is put."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.ir.graph import Statistic
from manyhands.ir.program import Content, Message, Program, postponed
from manyhands.ir.wire import wire_type
from manyhands.runtime.formats import incoming, outgoing, wire_shape, wire_view
from manyhands.runtime.packing import bits_bytes, pack, unpack
from manyhands.runtime.store import Place, Store
from manyhands.runtime.transport import Pending, Transport
from manyhands.runtime.weights import Weights


class Mail:
    """The messages of one device."""

    def __init__(self, program: Program, store: Store, weights: Weights, transport: Transport) -> None:
        self.device, self.store, self.weights, self.transport = program.device, store, weights, transport
        self.late = {message.tag for message in postponed(program)}
        self.arriving: dict[int, tuple[Message, Pending, Tensor]] = {}
        self.packed: dict[Place, Tensor] = {}  # values, while they go to one device after another
        self.dtypes: dict[int, torch.dtype] = {}  # by tag

    def send(self, message: Message) -> None:
        """Send a copy, so that what it was taken from may change or go."""
        if message.packed:
            self.transport.send(self._packed(message), message.target, message.tag)
            return
        tensor = self._content(message)
        fresh = message.patient
        copied = tensor if fresh else outgoing(tensor)
        copied = self._rounded(message, copied)
        if not fresh and copied.data_ptr() == tensor.data_ptr():
            copied = copied.clone()
        self.transport.send(copied, message.target, message.tag, patient=message.patient)

    def _packed(self, message: Message) -> Tensor:
        """Without zeros."""
        place = message.layer, message.segment, message.tile
        if message.content is Content.VALUE and place in self.packed:
            return self.packed[place]
        flat = self._rounded(message, outgoing(self._content(message))).reshape(-1)
        if message.content is Content.GRADIENT:
            return self.store.gaps[place].without(flat)
        if not any(key[:2] == place[:2] for key in self.packed):
            self.packed.clear()
        self.packed[place], self.store.gaps[place] = pack(flat)
        return self.packed[place]

    def _rounded(self, message: Message, tensor: Tensor) -> Tensor:
        """As it travels."""
        return tensor if self.store.territory.wire is None else tensor.to(self._dtype(message))

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
            case Content.SQUARES:
                return store.squares[self.device]
            case Content.LOSS:
                return store.losses[self.device]
            case Content.SLOPES:
                pieces = store.territory.buckets[message.segment].part(message.target)
                parts = [self.weights.gradient(p.parameter, p.tile) for p in pieces]
                return torch.cat([outgoing(part).reshape(-1) for part in parts])
            case Content.WEIGHTS:
                pieces = store.territory.buckets[message.segment].part(self.device)
                return torch.cat([outgoing(self.weights.owned[p].detach()).reshape(-1) for p in pieces])

    def expect(self, message: Message) -> None:
        """Let it come straight into its margin, where that is one piece of memory; else beside it."""
        self.packed.clear()
        shape, dtype = message.tile.shape, self._dtype(message)
        if message.patient:
            shape = (message.num_bytes // dtype.itemsize,)
        if message.content in (Content.MOMENTS, Content.SUMS):
            shape = (1 if self.store.layers[message.layer].statistic is Statistic.MEAN else 2, *shape)
        buffer = None
        if message.packed:
            buffer = self._room_for(message, dtype)
        elif message.content is Content.VALUE and dtype == self.store.dtype(message.layer):
            buffer = wire_view(self.store.margin(message.layer, message.segment, message.tile))
        if buffer is None:
            buffer = torch.empty(wire_shape(shape), dtype=dtype)
        pending = self.transport.expect(buffer, message.source, message.tag, patient=message.patient)
        self.arriving[message.tag] = message, pending, buffer

    def _room_for(self, message: Message, dtype: torch.dtype) -> Tensor:
        if message.content is Content.GRADIENT:
            gaps = self.store.gaps[message.layer, message.segment, message.tile]
            return torch.empty(gaps.count, dtype=dtype)
        most = bits_bytes(message.tile.numel) + message.tile.numel * dtype.itemsize
        return torch.empty(most, dtype=torch.uint8)

    def _dtype(self, message: Message) -> torch.dtype:
        """In which it travels."""
        if message.tag not in self.dtypes:
            self.dtypes[message.tag] = self._found_dtype(message)
        return self.dtypes[message.tag]

    def _found_dtype(self, message: Message) -> torch.dtype:
        if message.content in (Content.SQUARES, Content.LOSS):
            return torch.float64
        if message.patient:
            parts = self.store.territory.buckets[message.segment].parts
            first = next(piece for _, part in parts for piece in part)
            own = self.weights.tensors[first.parameter].dtype
        else:
            own = self.store.dtype(message.layer)
        wire = self.store.territory.wire
        found = getattr(torch, wire_type(wire, message.content, str(own).removeprefix("torch.")))
        assert isinstance(found, torch.dtype)
        return found

    def receive(self, message: Message) -> None:
        """Wait for it, and put it where it belongs."""
        self.packed.clear()
        if message.tag in self.late and message.tag not in self.arriving:
            return  # no step before left them on their way, so they are here
        _, pending, buffer = self.arriving.pop(message.tag)
        pending.wait()
        store, layer = self.store, message.layer
        received = incoming(self._unpacked(message, buffer) if message.packed else buffer)
        match message.content:
            case Content.VALUE:
                margin = store.margin(layer, message.segment, message.tile)
                if margin.data_ptr() != buffer.data_ptr():
                    margin.copy_(received)
            case Content.GRADIENT:
                store.add_gradient(layer, message.tile, received.to(store.dtype(layer)))
            case Content.MOMENTS:
                store.parts[layer][message.source] = received
            case Content.SUMS:
                store.sums[layer][message.source] = received
            case Content.SQUARES:
                store.squares[message.source] = received
            case Content.LOSS:
                store.losses[message.source] = received
            case Content.SLOPES | Content.WEIGHTS:
                self._take_bucket(message, received)

    def _unpacked(self, message: Message, buffer: Tensor) -> Tensor:
        place = message.layer, message.segment, message.tile
        if message.content is Content.GRADIENT:
            flat = self.store.gaps[place].filled(buffer)
        else:
            flat, self.store.gaps[place] = unpack(buffer, message.tile.numel, self._dtype(message))
        return flat.view(wire_shape(message.tile.shape))

    def end_step(self) -> None:
        """Wait until everything is sent, unless the plan leaves weights on their way to this device."""
        self.packed.clear()
        self.store.gaps.clear()
        if not self.arriving:
            self.transport.flush()

    def settle(self) -> None:
        """Wait for what a step has left on its way: before weights are read, or replaced, between steps."""
        for message, _, _ in list(self.arriving.values()):
            self.receive(message)
        self.transport.flush()

    def _take_bucket(self, message: Message, received: Tensor) -> None:
        """Gradients of what this device owns are added up; weights that another owns are taken over."""
        slopes = message.content is Content.SLOPES
        owner = message.target if slopes else message.source
        pieces = self.store.territory.buckets[message.segment].part(owner)
        for piece, flat in zip(pieces, received.split([p.tile.numel for p in pieces]), strict=True):
            value = incoming(flat.view(wire_shape(piece.tile.shape)))
            if not slopes:
                self.weights.piece(piece.parameter, piece.tile).detach().copy_(value)
                continue
            gradient = self.weights.owned[piece].grad
            assert gradient is not None, f"{piece.parameter} was not folded"
            gradient += value
