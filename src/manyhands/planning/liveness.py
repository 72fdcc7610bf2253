"""What each step makes and reads, and when a result is dropped: right after its last reader."""

from __future__ import annotations

from manyhands.ir.graph import Graph, Layer, Statistic
from manyhands.ir.program import (
    Content,
    Correct,
    Drop,
    Finish,
    Forward,
    Keep,
    Loss,
    Measure,
    Place,
    Prepare,
    Redo,
    Rerun,
    Restore,
    Send,
    Step,
)
from manyhands.planning.assignment import Assignment, is_source

Buffer = tuple[str, int | None]  # a layer's result, or the tile of it put together for a segment


class Liveness:
    """Reads and writes of one device's steps."""

    def __init__(self, graph: Graph, regions: Assignment, device: str) -> None:
        self.layers, self.readers = graph.by_name(), graph.readers()
        self.outputs, self.regions, self.device = graph.outputs, regions, device

    def with_drops(self, steps: list[Step]) -> tuple[Step, ...]:
        """The same steps with a Drop after the last use of every buffer, each time that it is made."""
        last: dict[Buffer, int] = {}
        drops: dict[int, list[Drop]] = {}
        for index, step in enumerate(steps):
            for buffer in self.made(step):
                if buffer in last:  # a second time
                    drops.setdefault(last.pop(buffer), []).append(Drop(*buffer))
                last[buffer] = index
            last |= dict.fromkeys(self.read(step), index)
        for buffer, index in last.items():
            drops.setdefault(index, []).append(Drop(*buffer))
        return tuple(s for index, step in enumerate(steps) for s in (step, *drops.get(index, ())))

    def made(self, step: Step) -> list[Buffer]:
        """The buffers that a step fills for later steps."""
        match step:
            case Prepare(layer, segment):
                return [(layer, segment)]
            case Forward(_, layers) | Rerun(_, layers):
                return [(name, None) for name in layers if self.leaves(name, set(layers))]
            case _:
                return []

    def leaves(self, name: str, chunk: set[str]) -> bool:
        """Is a layer's result read by anything but layers of its own chunk?"""
        readers = self.readers[name]
        return name in self.outputs or any(r not in chunk or r in self.regions.exchanged for r in readers)

    def read(self, step: Step) -> list[Buffer]:
        """The buffers from which a step reads."""
        match step:
            case Place(layer, segment):
                return [(layer, None), (layer, segment)]
            case Send(message) if message.content is Content.VALUE:
                return [(message.layer, None)]
            case Measure(layer):
                return [(self.layers[layer].inputs[0], None)]
            case Correct(layer) if not self.tape_holds_input(self.layers[layer]):
                return [(self.layers[layer].inputs[0], None)]
            case Keep(layer, segment) | Restore(layer, segment):
                return [(layer, segment)]
            case Forward(_, layers) | Rerun(_, layers) | Redo(_, layers):
                return list(dict.fromkeys(b for name in layers for b in self._inputs(name, set(layers))))
            case Finish(_, layer):
                return [(layer, None)]
            case Loss():
                return [
                    self._buffer(name, 1 + max(self.regions.segment_of.values())) for name in self.outputs
                ]
            case _:
                return []

    def _inputs(self, name: str, chunk: set[str]) -> list[Buffer]:
        segment = self.regions.segment_of[name]
        sources = reads(self.layers[name], self.regions)
        outside = [s for s in sources if s not in chunk and not is_source(self.layers[s])]
        return [b for b in (self._buffer(s, segment) for s in outside) if self._has(b)]

    def _buffer(self, source: str, segment: int) -> Buffer:
        return source, segment if self.regions.assembled(source, segment, self.device) else None

    def _has(self, buffer: Buffer) -> bool:
        return buffer[1] is not None or bool(self.regions.computed[buffer[0]][self.device].numel)

    def tape_holds_input(self, layer: Layer) -> bool:
        """Is this device's own part of a norm's input on its tape anyway (or not needed at all)?"""
        computed = self.regions.computed[layer.name][self.device]
        if layer.statistic is Statistic.MEAN:
            return True
        return bool(computed.numel) and computed.covers(self.regions.home[layer.inputs[0]][self.device])


def reads(layer: Layer, regions: Assignment) -> tuple[str, ...]:
    """The inputs whose values a layer reads; a mean whose sums are exchanged reads none."""
    if layer.statistic is Statistic.MEAN and layer.name in regions.exchanged:
        return ()
    return layer.inputs
