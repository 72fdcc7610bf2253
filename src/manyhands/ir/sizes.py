"""Which kind of step is it, and how many bytes does it touch: what its time depends on."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph
from manyhands.ir.program import (
    Backward,
    Correct,
    Drop,
    Expect,
    Finish,
    Fold,
    Forward,
    Keep,
    Loss,
    Measure,
    Place,
    Prepare,
    Receive,
    Redo,
    Rerun,
    Restore,
    Return,
    Send,
    Slope,
    Square,
    Step,
    Update,
)
from manyhands.ir.territory import Bucket


class Sizes:
    """The bytes of one device's steps."""

    def __init__(
        self,
        graph: Graph,
        device: str,
        home: Mapping[str, Tile],
        computed: Mapping[str, Tile],
        needed: Mapping[tuple[str, int], Tile],
        owned_bytes: int,
        buckets: Mapping[int, Bucket],
        evaluated: Tile | None,  # of the output, where the loss is a sum of parts
    ) -> None:
        self.layers, self.device, self.buckets = graph.by_name(), device, buckets
        self.home, self.computed, self.needed, self.owned_bytes = home, computed, needed, owned_bytes
        outputs = [self.layers[name] for name in graph.outputs]
        self.output_bytes = sum(layer.num_bytes for layer in outputs)
        if evaluated is not None:
            self.output_bytes = evaluated.numel * outputs[0].item_bytes

    def of(self, step: Step) -> tuple[str, int]:
        """The name of a step's kind and its bytes: ("send value", 4096)."""
        match step:
            case Send(message) | Expect(message) | Receive(message):
                return f"{type(step).__name__.lower()} {message.content.value}", message.num_bytes
            case Prepare(layer, _, tile) | Place(layer, _, tile) | Return(layer, _, tile):
                num_bytes = tile.numel * self.layers[layer].item_bytes
            case Keep(layer, _, tile) | Restore(layer, _, tile):  # a copy like any other
                return "place", tile.numel * self.layers[layer].item_bytes
            case Finish(_, layer):  # besides computing: what is computed apart is put together
                return "place", self.computed[layer].numel * self.layers[layer].item_bytes
            case Drop(layer, segment):
                tile = self.computed[layer] if segment is None else self.needed[layer, segment]
                num_bytes = tile.numel * self.layers[layer].item_bytes
            case Measure(layer) | Correct(layer):
                source = self.layers[layer].inputs[0]
                num_bytes = self.home[source].numel * self.layers[source].item_bytes
            case Fold(bucket):
                num_bytes = self.buckets[bucket].num_bytes(self.device)
            case Loss():
                num_bytes = self.output_bytes
            case Square() | Update():
                num_bytes = self.owned_bytes
            case Forward() | Backward() | Slope() | Rerun() | Redo():
                num_bytes = 0
        return type(step).__name__.lower(), num_bytes
