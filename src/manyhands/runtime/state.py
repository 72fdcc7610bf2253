"""The whole model and optimiser on one device, from everybody's pieces, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.ir.geometry import Shape, Tile
from manyhands.ir.graph import Graph
from manyhands.ir.territory import Piece
from manyhands.runtime.packets import Packet, receive_packet, send_packet
from manyhands.runtime.worker import Worker

WEIGHT = ""  # the kind of a weight or buffer; kinds of optimiser state are named by the optimiser


class Stored(Protocol):
    """Tensors by name of which a part can be read."""

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor: ...

    def __contains__(self, name: object) -> bool: ...


@dataclass
class State:
    """Whole tensors: the model's by name, the optimiser's by `kind/name` (`momentum_buffer/conv1.weight`)."""

    model: dict[str, Tensor] = field(default_factory=dict)
    optimiser: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Keeping:
    """What of the whole each device contributes, and what it holds: the same on every device."""

    devices: tuple[str, ...]
    kept: dict[str, tuple[Piece, ...]]  # frozen weights and buffers, one keeper each
    owned: dict[str, tuple[Piece, ...]]  # trainable weights, one owner each
    held: dict[str, dict[str, Tile]]  # of each device: what it holds of each weight


def collect(worker: Worker, keeping: Keeping) -> State | None:
    """On the first device the whole state; the others send their parts, and get None."""
    mine, first = worker.program.device, keeping.devices[0]
    own = _contribution(worker, keeping.kept[mine])
    if mine != first:
        send_packet(worker.transport, own, first)
        return None
    state = State()
    _merge(state, own, worker.graph)
    for device in keeping.devices[1:]:
        _merge(state, receive_packet(worker.transport, device), worker.graph)
    return state


def _contribution(worker: Worker, kept: tuple[Piece, ...]) -> Packet:
    facts: list[tuple[str, str, str]] = []
    tensors: list[Tensor] = []

    def add(kind: str, name: str, tile: str, tensor: Tensor) -> None:
        facts.append((kind, name, tile))
        tensors.append(tensor.detach())

    for piece in kept:
        add(WEIGHT, piece.parameter, str(piece.tile), worker.weights.piece(piece.parameter, piece.tile))
    for piece, own in worker.weights.owned.items():
        add(WEIGHT, piece.parameter, str(piece.tile), own)
        state = worker.optimiser.state.get(own, {}) if worker.optimiser else {}
        for kind, value in state.items():
            if not isinstance(value, Tensor):
                continue
            whole = value.shape == own.shape  # else one number for all of the weight
            add(kind, piece.parameter, str(piece.tile) if whole and own.dim() else "all", value)
    return Packet(facts, tuple(tensors))


def _merge(state: State, packet: Packet, graph: Graph) -> None:
    parameters = graph.parameters()
    for (kind, name, tile), tensor in zip(packet.facts, packet.tensors, strict=True):
        into, key = (state.model, name) if kind == WEIGHT else (state.optimiser, f"{kind}/{name}")
        shape = parameters[name].shape
        if tile == "all" or not shape:
            into[key] = tensor.clone()
            continue
        whole = into.setdefault(key, torch.zeros(shape, dtype=tensor.dtype))
        whole[Tile.parse(tile).within(Tile.whole(shape))] = tensor


def restore(worker: Worker, keeping: Keeping, model: Stored | None, optimiser: Mapping[str, Any]) -> None:
    """Take the state over: the first device reads it and sends each other its part.

    `model` and `optimiser` matter on the first device alone.
    """
    mine, first = worker.program.device, keeping.devices[0]
    if mine != first:
        _take(worker, receive_packet(worker.transport, first))
        return
    assert model is not None
    for device in keeping.devices[1:]:
        part = _part(worker.graph, keeping.held[device], keeping.owned[device], model, optimiser)
        send_packet(worker.transport, part, device)
    _take(worker, _part(worker.graph, keeping.held[first], keeping.owned[first], model, optimiser))


def _part(
    graph: Graph,
    held: dict[str, Tile],
    owned: tuple[Piece, ...],
    model: Stored,
    optimiser: Mapping[str, Any],
) -> Packet:
    """What one device needs of the whole."""
    facts: list[tuple[str, str, str]] = []
    tensors: list[Tensor] = []
    parameters = graph.parameters()
    for name, tile in held.items():
        facts.append((WEIGHT, name, str(tile)))
        tensors.append(model.part(name, tile.within(Tile.whole(parameters[name].shape))))
    kinds = dict.fromkeys(key.partition("/")[0] for key in optimiser)
    for piece in owned:
        for kind in kinds:
            whole = optimiser.get(f"{kind}/{piece.parameter}")
            if whole is None:
                continue
            shape: Shape = parameters[piece.parameter].shape
            cut = tuple(whole.shape) == shape
            facts.append((kind, piece.parameter, str(piece.tile)))
            tensors.append(whole[piece.tile.within(Tile.whole(shape))] if cut and shape else whole)
    return Packet(facts, tuple(tensors))


def _take(worker: Worker, packet: Packet) -> None:
    weights = worker.weights
    for (kind, name, tile), tensor in zip(packet.facts, packet.tensors, strict=True):
        if kind == WEIGHT:
            assert str(weights.tiles[name]) == tile, f"{name}: {weights.tiles[name]} is held, {tile} came"
            own = weights.tensors[name].detach()
            assert own.shape == tensor.shape, f"{name}: {tuple(tensor.shape)} came for {tuple(own.shape)}"
            own.copy_(tensor)
            continue
        owned = weights.owned[Piece(name, Tile.parse(tile))]
        assert worker.optimiser is not None
        cut = tensor.shape == owned.shape
        like = torch.empty_like(owned, requires_grad=False) if cut else torch.empty_like(tensor)
        worker.optimiser.state[owned][kind] = like.copy_(tensor)
