"""Segments into chunks: runs of layers that compute without waiting for anybody."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from manyhands.ir.graph import ITEM_BYTES, Graph, Layer
from manyhands.ir.plan import Plan
from manyhands.planning.assignment import Assignment

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    segment: int
    layers: tuple[str, ...]


def chunks(graph: Graph, plan: Plan, assignment: Assignment) -> tuple[Chunk, ...]:
    """A new chunk at every segment, where a layer waits for statistics of what was just computed, and where
    enough weights have come together that their gradients can travel while backward goes on."""
    layers = graph.by_name()
    result: list[Chunk] = []
    for index, segment in enumerate(plan.segments):
        run: list[str] = []
        for name in segment.layers:
            waits = name in assignment.exchanged and set(layers[name].inputs) & set(run)
            if run and (waits or len(plan.devices) > 1 and _weight_bytes(layers, run) >= CHUNK_BYTES):
                result.append(Chunk(len(result), index, tuple(run)))
                run = []
            run.append(name)
        result.append(Chunk(len(result), index, tuple(run)))
    return tuple(result)


def _weight_bytes(layers: dict[str, Layer], names: list[str]) -> int:
    parameters = {p.name: p for name in names for p in layers[name].parameters if p.trainable}
    return sum(prod(p.shape) * ITEM_BYTES[p.dtype] for p in parameters.values())
