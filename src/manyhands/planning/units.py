"""The finest pieces that a search puts together to segments, and what is alive between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from manyhands.ir.graph import Convolve, Deconvolve, Graph, Layer, Linear
from manyhands.planning.assignment import is_source


@dataclass(frozen=True)
class Units:
    """Runs of layers between places where a segment may end: before and after every layer with filters."""

    graph: Graph
    runs: tuple[tuple[Layer, ...], ...]

    @cached_property
    def unit_of(self) -> dict[str, int]:
        return {layer.name: index for index, run in enumerate(self.runs) for layer in run}

    @cached_property
    def last_use(self) -> dict[str, int]:
        """The last unit that reads each result; one past the end for what the loss reads."""
        last: dict[str, int] = {}
        for name, readers in self.graph.readers().items():
            if name in self.unit_of:
                last[name] = max((self.unit_of[reader] for reader in readers), default=self.unit_of[name])
        return last | {name: len(self.runs) for name in self.graph.outputs}

    @cached_property
    def alive(self) -> tuple[tuple[str, ...], ...]:
        """Results that cross each boundary: `alive[3]` was made before unit 3 and is read from there on."""
        names = self.unit_of.items()
        return tuple(
            tuple(name for name, unit in names if unit < boundary <= self.last_use[name])
            for boundary in range(len(self.runs) + 1)
        )

    def layers(self, start: int, stop: int) -> tuple[Layer, ...]:
        return tuple(layer for run in self.runs[start:stop] for layer in run)


def units(graph: Graph) -> Units:
    """The layers of a graph as units."""
    runs: list[list[Layer]] = [[]]
    for layer in graph.layers:
        if is_source(layer):
            continue
        heavy = isinstance(layer.operation, Convolve | Deconvolve | Linear)
        if heavy and runs[-1]:
            runs.append([])
        runs[-1].append(layer)
        if heavy:
            runs.append([])
    return Units(graph, tuple(tuple(run) for run in runs if run))
