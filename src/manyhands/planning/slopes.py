"""Memory of the weights of one device, of their gradients, and of what is made of them to be sent."""

from __future__ import annotations

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import ITEM_BYTES, Parameter
from manyhands.ir.territory import Bucket, Piece, Territory
from manyhands.planning.ledger import Block, Ledger

TRIED_COPIES = 5  # of the largest filters: themselves, rearranged, their gradient and its work space


class Slopes:
    """Gradients of weights as backward makes them, and of the parts that this device's optimiser changes."""

    def __init__(
        self, ledger: Ledger, territory: Territory, parameters: dict[str, Parameter], *, channels_last: bool
    ) -> None:
        self.ledger, self.territory, self.parameters = ledger, territory, parameters
        self.channels_last = channels_last
        self.made: dict[str, Block] = {}
        self.owned: dict[Piece, Block] = {}
        self.state: list[Block] = []

    def num_bytes(self, name: str, tile: Tile) -> int:
        return tile.numel * ITEM_BYTES[self.parameters[name].dtype]

    def hold_weights(self) -> None:
        for name, tile in self.territory.weights.items():
            self.ledger.new(self.num_bytes(name, tile))

    def hold_state(self, slots: float) -> None:
        """The optimiser's, from its first step on."""
        if not self.state:
            self.state = [self.ledger.new(int(slots * self._bytes(piece))) for piece in self.territory.owned]

    @property
    def largest_bytes(self) -> int:
        return max((self._bytes(piece) for piece in self.territory.owned), default=0)

    def starting_bytes(self) -> int:
        """While the model is cut to this device's pieces, it is there as a whole too.

        Then convolutions are tried in both orders of memory; and filters are copied into the one chosen.
        """
        whole = {name: self.num_bytes(name, Tile.whole(p.shape)) for name, p in self.parameters.items()}
        held = self.territory.weights
        cut = {name for name, tile in held.items() if tile.shape != self.parameters[name].shape}
        filters = {name for name, tile in held.items() if len(tile.spans) == 4}
        tried = TRIED_COPIES * max((whole[name] for name in filters), default=0)
        arranged = sum(self.num_bytes(name, held[name]) for name in filters - cut if self.channels_last)
        pieces = sum(self.num_bytes(name, held[name]) for name in cut)
        return sum(whole.values()) + pieces + max(tried, arranged)

    def _bytes(self, piece: Piece) -> int:
        return self.num_bytes(piece.parameter, piece.tile)

    def clear(self) -> None:
        """A step begins without gradients."""
        for block in (*self.made.values(), *self.owned.values()):
            self.ledger.free(block)
        self.made.clear()
        self.owned.clear()

    def add(self, name: str, tile: Tile) -> None:
        """A layer's backward makes the gradient of a piece of a weight."""
        if name in self.made:
            self.ledger.touch(self.num_bytes(name, tile))
        else:
            self.made[name] = self.ledger.new(self.num_bytes(name, self.territory.weights[name]))

    def copied_bytes(self, pieces: tuple[Piece, ...]) -> int:
        """Of some pieces of weights, those that have to be put in the order of the wire to be sent."""
        return sum(self._bytes(piece) for piece in pieces if not self._travels_as_it_lies(piece))

    def _travels_as_it_lies(self, piece: Piece) -> bool:
        shape, held = piece.tile.shape, self.territory.weights[piece.parameter].shape
        if len(shape) == 4 and not self.channels_last and shape[2:] != (1, 1):
            return False
        return shape[1:] == held[1:]

    def fold(self, bucket: Bucket, device: str) -> None:
        """The own part is copied, and what was all sent or copied is let go."""
        for piece in bucket.part(device):
            self.owned[piece] = self.ledger.new(self._bytes(piece))
        sizes: dict[str, int] = {}
        for piece in (piece for _, pieces in bucket.parts for piece in pieces):
            sizes[piece.parameter] = sizes.get(piece.parameter, 0) + piece.tile.numel
        for name, size in sizes.items():
            whole = self.territory.weights[name]
            if size == whole.numel and Piece(name, whole) not in self.territory.owned and name in self.made:
                self.ledger.free(self.made.pop(name))

    def settle(self) -> None:
        """Parts that no bucket had are copied from the whole."""
        for piece in self.territory.owned:
            whole = piece.tile == self.territory.weights[piece.parameter]
            if not whole and piece not in self.owned and piece.parameter in self.made:
                self.owned[piece] = self.ledger.new(self._bytes(piece))
