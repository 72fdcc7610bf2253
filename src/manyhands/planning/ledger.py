"""Blocks of memory with holders: how many bytes a process has at most, by its allocator."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_LARGEST = (32 << 20) - 4096  # glibc never keeps a freed block above this
_SLACK = 96  # by which a gap has to be larger, for torch asks for blocks at round addresses


@dataclass(eq=False, slots=True)
class Block:
    """A piece of memory; alive as long as somebody holds it."""

    num_bytes: int
    holders: int = 0
    address: int | None = None  # in the heap; None: pages of its own


class Heap:
    """glibc's allocator by its defaults: what is freed stays, and is used again where it fits best.

    A block above the threshold has pages of its own, which go back when it is freed; but then the threshold
    rises to its size. The end of the heap hardly ever goes back: something small always lies there.
    """

    def __init__(self) -> None:
        self.threshold = 128 << 10
        self.end = self.top = self.mapped = 0  # of what is in use, of what ever was; pages of their own
        self.gaps: list[tuple[int, int]] = []  # (size, address), smallest first
        self.starts: dict[int, int] = {}  # the same by address: where each stops
        self.stops: dict[int, int] = {}  # and where each starts, by where it stops

    @property
    def resident(self) -> int:
        return self.top + self.mapped

    def take(self, block: Block) -> None:
        if block.num_bytes >= self.threshold or not block.num_bytes:
            self.mapped += block.num_bytes
            return
        place = bisect_left(self.gaps, (block.num_bytes + _SLACK, 0))
        if place == len(self.gaps):
            block.address, self.end = self.end, self.end + block.num_bytes
            self.top = max(self.top, self.end)
            return
        size, address = self.gaps[place]
        self._close(address, address + size)
        block.address = address
        self._open(address + block.num_bytes, address + size)

    def _open(self, start: int, stop: int) -> None:
        insort(self.gaps, (stop - start, start))
        self.starts[start], self.stops[stop] = stop, start

    def _close(self, start: int, stop: int) -> None:
        del self.gaps[bisect_left(self.gaps, (stop - start, start))]
        del self.starts[start], self.stops[stop]

    def give_back(self, block: Block) -> None:
        if block.address is None:
            self.mapped -= block.num_bytes
            if block.num_bytes <= _LARGEST:
                self.threshold = max(self.threshold, block.num_bytes)
            return
        start, stop = block.address, block.address + block.num_bytes
        block.address = None
        if start in self.stops:
            before = self.stops[start]
            self._close(before, start)
            start = before
        if stop in self.starts:
            after = self.starts[stop]
            self._close(stop, after)
            stop = after
        if stop < self.end:
            self._open(start, stop)
        else:
            self.end = start


class Ledger:
    """Who holds which block, and the most bytes there were at once; with a heap, those resident."""

    def __init__(self, heap: Heap | None = None) -> None:
        self.heap = heap
        self.alive = self.peak = 0

    def new(self, num_bytes: int) -> Block:
        """A block with one holder."""
        return self.hold(Block(num_bytes))

    def hold(self, block: Block) -> Block:
        if not block.holders:
            self.alive += block.num_bytes
            if self.heap is not None:
                self.heap.take(block)
            self.peak = max(self.peak, self.resident)
        block.holders += 1
        return block

    @property
    def resident(self) -> int:
        return self.alive if self.heap is None else self.heap.resident

    def free(self, block: Block) -> None:
        """One holder less."""
        block.holders -= 1
        assert block.holders >= 0, "freed more often than held"
        if not block.holders:
            self.alive -= block.num_bytes
            if self.heap is not None:
                self.heap.give_back(block)

    def touch(self, *sizes: int) -> None:
        """Blocks of these sizes are needed for a moment."""
        for block in [self.new(size) for size in sizes]:
            self.free(block)
