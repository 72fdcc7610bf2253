"""The weights one device holds: its pieces of the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph


class Weights:
    """Pieces by name; parameters are nn.Parameters, so that any optimiser takes them."""

    def __init__(self, tiles: dict[str, Tile], tensors: dict[str, Tensor]) -> None:
        self.tiles, self.tensors = tiles, tensors

    def parameters(self) -> dict[str, nn.Parameter]:
        return {n: t for n, t in self.tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}

    def arrange(self, memory_format: torch.memory_format) -> None:
        """Put filters in this order in memory."""
        for tensor in self.tensors.values():
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=memory_format)

    def piece(self, name: str, tile: Tile) -> Tensor:
        """A box of a weight, inside of what is held here."""
        held = self.tiles[name]
        tensor = self.tensors[name]
        return tensor if held == tile else tensor[tile.within(held)]

    def gradient(self, name: str, tile: Tile) -> Tensor:
        """A box of a weight's gradient; zeros where nothing flowed."""
        gradient = self.tensors[name].grad
        if gradient is None:
            return self.tensors[name].new_zeros(tile.shape)
        return gradient if self.tiles[name] == tile else gradient[tile.within(self.tiles[name])]

    def set_gradient(self, name: str, tile: Tile, value: Tensor) -> None:
        tensor = self.tensors[name]
        if self.tiles[name] == tile:
            tensor.grad = value
            return
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        if 0 in tensor.grad.stride():  # one number seen many times cannot be written to in pieces
            tensor.grad = tensor.grad.clone(memory_format=torch.contiguous_format)
        tensor.grad[tile.within(self.tiles[name])] = value


def split_weights(model: nn.Module, graph: Graph, tiles: dict[str, Tile]) -> Weights:
    """Cut a model's state to what a device holds. Whole pieces share the model's memory."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in graph.parameters().items():
        if name not in tiles:
            continue
        full = find_tensor(model, name)
        whole = tiles[name] == Tile.whole(parameter.shape)
        piece = (
            full.detach() if whole else full.detach()[tiles[name].within(Tile.whole(parameter.shape))].clone()
        )
        tensors[name] = nn.Parameter(piece, parameter.trainable) if not parameter.buffer else piece
    return Weights(tiles, tensors)


def find_tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor), name
    return tensor


def merge_weights(graph: Graph, parts: Iterable[Weights]) -> dict[str, Tensor]:
    """The whole state under the model's own names, from the pieces of all devices."""
    state: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            shape = graph.parameters()[name].shape
            full = state.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            full[part.tiles[name].within(Tile.whole(shape))] = tensor.detach()
    return state
