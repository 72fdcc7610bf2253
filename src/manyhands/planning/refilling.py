"""What is computed a second time because it was not kept, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.planning.assignment import Assignment
from manyhands.planning.chunks import Chunk
from manyhands.planning.liveness import reads


@dataclass(frozen=True, slots=True)
class Refill:
    """Results of one chunk that another needs again."""

    maker: Chunk
    reader: Chunk
    names: tuple[str, ...]


class Refills:
    """Of a plan's chunks, what each has computed again before its backward."""

    def __init__(self, graph: Graph, plan: Plan, chunks: tuple[Chunk, ...], regions: Assignment) -> None:
        self.plan, self.chunks, self.regions = plan, chunks, regions
        self.layers, self.readers, self.outputs = graph.by_name(), graph.readers(), graph.outputs
        self.maker = {name: chunk for chunk in chunks for name in chunk.layers}
        self.names = {chunk.index: self._names(chunk) for chunk in chunks}
        self.done: set[int] = set()

    def _names(self, chunk: Chunk) -> tuple[str, ...]:
        """What this chunk alone reads, of chunks that leave what they read as it is."""
        segment = self.plan.segments[chunk.segment]
        goes_back = any(self.layers[name].differentiable for name in chunk.layers)
        if not (segment.redo and segment.refill and goes_back):
            return ()
        read = dict.fromkeys(n for name in chunk.layers for n in reads(self.layers[name], self.regions))
        makers = {name: self.maker[name] for name in read if name in self.maker}
        return tuple(
            name
            for name, maker in makers.items()
            if maker is not chunk
            and self.plan.segments[maker.segment].redo
            and set(self.readers[name]) <= set(chunk.layers)
            and name not in self.outputs
        )

    def before(self, chunk: Chunk) -> list[Refill]:
        """What has to be computed before the backward of a chunk, and was not for that of a later one."""
        if chunk.index in self.done or not self.names[chunk.index]:
            return []
        self.done.add(chunk.index)
        makers = {self.maker[name].index for name in self.names[chunk.index]}
        found = []
        for maker in (self.chunks[index] for index in sorted(makers)):
            names = tuple(name for name in self.names[chunk.index] if self.maker[name] is maker)
            found += [*self.before(maker), Refill(maker, chunk, names)]
        return found
