"""The weights one device holds: its pieces of the model's parameters and buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyhands.errors import RequestError
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph
from manyhands.ir.territory import Bucket, Piece, Territory


class Weights:
    """Pieces by name. What the optimiser of this device changes, it sees as parameters of their own.

    A weight that several devices hold is whole on each, but each owns a part of it: a parameter that lies
    in the same memory, so that the optimiser's step is seen in the whole at once.
    """

    def __init__(
        self,
        tiles: dict[str, Tile],
        tensors: dict[str, Tensor],
        owned: tuple[Piece, ...],
        buckets: tuple[Bucket, ...],
    ) -> None:
        self.tiles, self.tensors, self.pieces = tiles, tensors, owned
        self.shared = [piece for bucket in buckets for _, part in bucket.parts for piece in part]
        self.shared_names = {piece.parameter for piece in self.shared}
        self._own()

    def _own(self) -> None:
        self.owned: dict[Piece, nn.Parameter] = {}
        for piece in self.pieces:
            tensor = self.tensors[piece.parameter]
            whole = piece.tile == self.tiles[piece.parameter]
            own = tensor if whole else nn.Parameter(self.piece(piece.parameter, piece.tile).detach())
            assert isinstance(own, nn.Parameter)
            self.owned[piece] = own

    def parameters(self) -> list[nn.Parameter]:
        """What to give to an optimiser."""
        return list(self.owned.values())

    def clear_gradients(self, unread: set[str]) -> None:
        """Begin a step. Weights that nothing reads here get zeros, as they would on one device."""
        for tensor in self.tensors.values():
            tensor.grad = None
        for piece, own in self.owned.items():
            own.grad = torch.zeros_like(own) if piece.parameter in unread else None

    def fold(self, bucket: Bucket, device: str) -> None:
        """Keep this device's part of a bucket's gradients, and forget the rest."""
        for piece in bucket.part(device):
            self.owned[piece].grad = self.gradient(piece.parameter, piece.tile).clone()
        sizes: dict[str, int] = {}
        for piece in (piece for _, pieces in bucket.parts for piece in pieces):
            sizes[piece.parameter] = sizes.get(piece.parameter, 0) + piece.tile.numel
        for name, size in sizes.items():
            owned_whole = Piece(name, self.tiles[name]) in self.owned
            if size == self.tiles[name].numel and not owned_whole:  # else the rest of it is still needed
                self.tensors[name].grad = None

    def settle_gradients(self) -> None:
        """Backward is over: parts that no bucket had are taken from the whole."""
        for piece, own in self.owned.items():
            whole = self.tensors[piece.parameter]
            if own is not whole and own.grad is None and whole.grad is not None:
                own.grad = self.gradient(piece.parameter, piece.tile).clone()

    def squares(self) -> Tensor:
        """The sum of the squares of all gradients owned here."""
        own = [p.grad for p in self.owned.values() if p.grad is not None]
        return torch.stack(
            [torch.zeros((), dtype=torch.float64), *(g.double().square().sum() for g in own)]
        ).sum()

    def clip(self, norm: float, squares: dict[str, Tensor]) -> None:
        """Scale gradients down to a norm of all devices', as torch.nn.utils.clip_grad_norm_ does."""
        assert squares, "the plan was lowered without clipping"
        total = sum(float(squares[device]) for device in sorted(squares)) ** 0.5
        scale = min(1.0, norm / (total + 1e-6))
        for own in self.owned.values():
            if own.grad is not None:
                own.grad *= scale

    def arrange(self, memory_format: torch.memory_format) -> None:
        """Put filters in this order in memory."""
        for tensor in self.tensors.values():
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=memory_format)
        self._own()

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


def split_weights(model: nn.Module, graph: Graph, territory: Territory) -> Weights:
    """Cut a model's state to what a device holds. Whole pieces share the model's memory."""
    tiles, tensors = territory.weights, dict[str, Tensor]()
    for name, parameter in graph.parameters().items():
        if name not in tiles:
            continue
        full = find_tensor(model, name)
        whole = tiles[name] == Tile.whole(parameter.shape)
        piece = (
            full.detach() if whole else full.detach()[tiles[name].within(Tile.whole(parameter.shape))].clone()
        )
        tensors[name] = nn.Parameter(piece, parameter.trainable) if not parameter.buffer else piece
    return Weights(tiles, tensors, territory.owned, tuple(territory.buckets.values()))


# These look at more than one element of a weight at a time, so a part of it would be updated otherwise.
_WHOLE_WEIGHTS = ("LBFGS", "Adafactor", "Muon", "Shampoo", "SparseAdam")


def refuse_split_weights(optimiser: torch.optim.Optimizer, weights: Weights, graph: Graph) -> None:
    """An optimiser that needs whole weights cannot work on parts of them."""
    names, parameters = [c.__name__ for c in type(optimiser).__mro__], graph.parameters()
    name = next((n for n in names if n in _WHOLE_WEIGHTS), names[0])
    split = [p.parameter for p in weights.pieces if p.tile != Tile.whole(parameters[p.parameter].shape)]
    if name == "LBFGS" or (name in _WHOLE_WEIGHTS and split):
        reason = f"and {split[0]} is divided" if split else "and calls the model again"
        raise RequestError(
            f"{name} needs whole weights at once, {reason}. Use SGD, Adam or another by-element one."
        )


def find_tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor), name
    return tensor
