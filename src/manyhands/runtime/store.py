"""What is alive on one device in the middle of a step: tiles, gradients, statistics."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph
from manyhands.ir.territory import Territory
from manyhands.runtime.late import Job
from manyhands.runtime.norms import Moments
from manyhands.runtime.packing import Gaps
from manyhands.runtime.tape import Tape

Place = tuple[str, int, Tile]  # of what travels: a layer's tile, for a segment
Buffer = tuple[str, int | None]  # a layer's result, or the tile of it put together for a segment


class Store:
    """The device's tensors by name; `clear` begins a new step."""

    def __init__(self, graph: Graph, territory: Territory) -> None:
        self.layers, self.territory = graph.by_name(), territory
        self.memory_format = torch.contiguous_format
        self.clear()

    def clear(self) -> None:
        self.values: dict[Buffer, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}  # of results, on the computed tile
        self.borrowed: set[str] = set()  # gradients that somebody else may hold too
        self.aside: dict[tuple[str, int, Tile], Tensor] = {}  # what others sent, to be put in a second time
        self.read_gradients: dict[tuple[str, int], Tensor] = {}  # of tiles put together
        self.own_reads: set[tuple[str, int]] = set()  # those of them that nobody else holds
        self.tapes: dict[int, Tape] = {}
        self.left: defaultdict[int, list[tuple[str, Job]]] = defaultdict(list)  # by chunk: for a Slope
        self.unfinished: dict[int, Job] = {}  # by chunk: for a Finish
        self.parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)  # of statistics, by device
        self.sums: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)  # of a norm's backward, by device
        self.moments: dict[str, Moments] = {}
        self.own_inputs: dict[str, Tensor] = {}  # a norm's input, on this device's home tile
        self.gaps: dict[Place, Gaps] = {}  # of tiles that travelled without their zeros
        self.squares: dict[str, Tensor] = {}  # of everybody's own gradients
        self.losses: dict[str, Tensor] = {}  # of everybody who tells its part; or of this device, all of it

    def dtype(self, layer: str) -> torch.dtype:
        dtype = getattr(torch, self.layers[layer].dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def empty(self, layer: str, tile: Tile) -> Tensor:
        layout = self.memory_format if len(tile.spans) == 4 else torch.contiguous_format
        return torch.empty(tile.shape, dtype=self.dtype(layer), memory_format=layout)

    def zeros(self, layer: str, tile: Tile) -> Tensor:
        return torch.zeros_like(self.empty(layer, tile))

    def own(self, layer: str, tile: Tile) -> Tensor:
        """A tile of what this device itself computed."""
        return self.values[layer, None][tile.within(self.territory.computed[layer])]

    def margin(self, layer: str, segment: int, tile: Tile) -> Tensor:
        """A part of a tile that is being put together."""
        return self.values[layer, segment][tile.within(self.territory.needed[layer, segment])]

    def buffer(self, source: str, segment: int) -> Buffer:
        return self.territory.buffer(source, segment)

    def tile_of(self, buffer: Buffer) -> Tile:
        layer, segment = buffer
        return self.territory.computed[layer] if segment is None else self.territory.needed[layer, segment]

    def add_gradient(self, layer: str, tile: Tile, value: Tensor, *, unshared: bool = False) -> None:
        """Add to the gradient of what this device computed of a layer; unshared: nobody else holds it."""
        if layer not in self.gradients and tile == self.territory.computed[layer]:
            self.gradients[layer] = value
            if not unshared:
                self.borrowed.add(layer)
            return
        self.own_gradient(layer)[tile.within(self.territory.computed[layer])] += value

    def own_gradient(self, layer: str) -> Tensor:
        """The gradient of what this device computed of a layer, to be added to in place."""
        held = self.gradients.get(layer)
        if held is None:
            held = self.zeros(layer, self.territory.computed[layer])
        elif layer in self.borrowed:
            held = held.clone()
        self.borrowed.discard(layer)
        self.gradients[layer] = held
        return held
