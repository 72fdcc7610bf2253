"""Tensors whose number and shapes only the sender knows: first a JSON header, then what it announces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.runtime.transport import Transport

FIRST_TAG = 1 << 24  # above all tags of programs


@dataclass(frozen=True)
class Packet:
    """Tensors, and what to know about them (any JSON value)."""

    facts: Any
    tensors: tuple[Tensor, ...]


def announce(transport: Transport, packet: Packet, target: str) -> None:
    """Send what is coming."""
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in packet.tensors]
    header = json.dumps({"facts": packet.facts, "shapes": shapes}).encode()
    transport.send(torch.tensor([len(header)], dtype=torch.int64), target, FIRST_TAG)
    transport.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), target, FIRST_TAG + 1)


def deliver(transport: Transport, packet: Packet, target: str) -> None:
    """Send the tensors that were announced."""
    for tensor in packet.tensors:
        if tensor.numel():
            transport.send(tensor.detach().contiguous().reshape(-1).clone(), target, FIRST_TAG + 2)


def send_packet(transport: Transport, packet: Packet, target: str) -> None:
    announce(transport, packet, target)
    deliver(transport, packet, target)
    transport.flush()


def receive_announcement(transport: Transport, source: str) -> Packet:
    """The facts, and empty tensors for `receive_tensors` to fill."""
    length = torch.empty(1, dtype=torch.int64)
    transport.expect(length, source, FIRST_TAG).wait()
    header = torch.empty(int(length), dtype=torch.uint8)
    transport.expect(header, source, FIRST_TAG + 1).wait()
    said = json.loads(header.numpy().tobytes())
    tensors = tuple(torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in said["shapes"])
    return Packet(said["facts"], tensors)


def receive_tensors(transport: Transport, packet: Packet, source: str) -> None:
    for tensor in packet.tensors:
        if tensor.numel():
            transport.expect(tensor.view(-1), source, FIRST_TAG + 2).wait()


def receive_packet(transport: Transport, source: str) -> Packet:
    packet = receive_announcement(transport, source)
    receive_tensors(transport, packet, source)
    return packet
