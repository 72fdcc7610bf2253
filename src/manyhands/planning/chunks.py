"""Segments into chunks: runs of layers that compute without waiting for anybody."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.planning.assignment import Assignment


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    segment: int
    layers: tuple[str, ...]


def chunks(graph: Graph, plan: Plan, assignment: Assignment) -> tuple[Chunk, ...]:
    """A new chunk at every segment, and where a layer waits for statistics of what was just computed."""
    layers = graph.by_name()
    result: list[Chunk] = []
    for index, segment in enumerate(plan.segments):
        run: list[str] = []
        for name in segment.layers:
            if run and name in assignment.exchanged and set(layers[name].inputs) & set(run):
                result.append(Chunk(len(result), index, tuple(run)))
                run = []
            run.append(name)
        result.append(Chunk(len(result), index, tuple(run)))
    return tuple(result)
