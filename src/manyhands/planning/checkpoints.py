"""The fastest schedule of a chain within a number of bytes, by dynamic programming over parts of the chain.

A part is some stages in a row, entered with its first state at hand, and left with the gradients of that
state. Either its first stage is taped at once and the rest follows; or the way to a later state is computed
without keeping anything, the rest follows from there, and then the part before it, from its first state once
more. That is optimal among the schedules that keep a stored state until its stage is taped; in rare chains
one that lets it go before, and computes it a second time, is quicker.

O. Beaumont et al., Optimal checkpointing for heterogeneous chains, Inria RR-9302, 2019, has the recursion.
Here a state is a set of tensors, so that what a checkpoint shares with the one before it is counted once, and
a stage whose backward does not need its result is not computed again for it. Of the states on the first way
through, some may be on disk, which costs time instead of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from manyhands.ir.schedule import Action, Advance, Back, Chain, Disk, Mode, Restore, Store, Tape

Seconds = NDArray[np.float32]  # by slots, or by parts and slots
SLOTS = 640  # into which memory is divided
FEW = 70  # stages, up to which any state may be stored
_TAPED = -1  # a decision: tape the first stage in its first mode, -2 in its second; others: store that state


class Table:
    """The least seconds of every part of a chain, by slots of memory beyond the part's first state."""

    def __init__(
        self, chain: Chain, memory_bytes: int, slots: int | None = None, disk: Disk | None = None
    ) -> None:
        self.chain, length = chain, len(chain.stages)
        self.slot_bytes = _slot_bytes(chain, memory_bytes, slots or SLOTS)
        self.slots = max(0, self._slots_in(memory_bytes))
        self.rests = np.array(_rests(chain))
        self.carried = _carried(chain)
        self.gradients = np.array(chain.gradients, float)
        self.again = np.cumsum([0.0, *(stage.again_s for stage in chain.stages)])  # from the first state on
        self.first = np.cumsum([0.0, *(stage.first_s for stage in chain.stages)])  # on the way to the end
        self.parts: dict[int, _Parts] = {}  # by first state
        for first in reversed(range(length)):
            self.parts[first] = _Parts(self, first)
        self.sweep = _Sweep(self, disk) if disk is not None else None

    def rounded(self, num_bytes: NDArray[np.float64] | int) -> NDArray[np.int64]:
        """Slots for so many bytes; more than there are, if it is too much."""
        return np.minimum(np.ceil(num_bytes / self.slot_bytes), self.slots + 1).astype(np.int64)

    @property
    def seconds(self) -> Seconds:
        """Of the whole chain, by slots."""
        row: Seconds = self.parts[0].seconds[-1] if self.sweep is None else self.sweep.seconds[0]
        return row

    @property
    def least_bytes(self) -> int | None:
        """The fewest bytes beyond the first state with which the whole chain can be run."""
        fits = np.flatnonzero(np.isfinite(self.seconds))
        return self.bytes_of(int(fits[0])) if len(fits) else None

    def _slots_in(self, memory_bytes: int) -> int:
        return floor((memory_bytes - self.chain.noted_bytes) / self.slot_bytes + 1e-9)

    def bytes_of(self, slots: int) -> int:
        return ceil(slots * self.slot_bytes - 1e-6) + self.chain.noted_bytes

    def plan(self, memory_bytes: int, *, on_disk: bool = True) -> Checkpoints | None:
        """The fastest schedule within so many bytes beyond the first state; None: there is none.

        With states on disk, if there is one and that is faster; not `on_disk`: with none.
        """
        slots = min(self._slots_in(memory_bytes), self.slots)
        row: Seconds = self.parts[0].seconds[-1]
        sweep = self.sweep if on_disk and slots >= 0 else None
        if sweep is not None and sweep.seconds[0][slots] < row[slots]:
            row = sweep.seconds[0]
        else:
            sweep = None
        if slots < 0 or not np.isfinite(row[slots]):
            return None
        enough = int(np.flatnonzero(row == row[slots])[0])  # more is of no use
        actions: list[Action] = []
        self._go(actions, 0, enough, sweep)
        return Checkpoints(tuple(actions), float(row[slots]), self.bytes_of(enough))

    def _go(self, actions: list[Action], first: int, slots: int, sweep: _Sweep | None) -> None:
        """From a state to the end and back, with states on disk where that is planned."""
        length = len(self.chain.stages)
        stop = length if sweep is None else sweep.next(first, slots)
        left = slots if sweep is None else slots - sweep.beyond[first]
        if stop == length:
            self._enter(actions, first, length, left, stored=False)
            return
        actions += [Store(first, disk=first > 0), Advance(first, stop)]
        self._go(actions, stop, slots, sweep)
        self._enter(actions, first, stop, left, stored=True)

    def _enter(self, actions: list[Action], first: int, stop: int, slots: int, *, stored: bool) -> None:
        decision, left = self.parts[first].decision(stop, slots)
        if decision <= _TAPED:
            alone = stop == first + 1
            if stored:
                actions.append(Restore(first, last=True))
            actions.append(Tape(first, alone and stop < len(self.chain.stages), _TAPED - decision))
            if not alone:
                self._enter(actions, first + 1, stop, left, stored=False)
            actions.append(Back(first))
            return
        actions.append(Restore(first, last=False) if stored else Store(first))
        actions.append(Advance(first, decision))
        self._enter(actions, decision, stop, left, stored=False)
        self._enter(actions, first, decision, slots, stored=True)


class _Parts:
    """All parts with the same first state. Those that begin later are known already."""

    def __init__(self, table: Table, first: int) -> None:
        chain = table.chain
        self.table = table
        here = int(table.rests[table.rests > first][0])  # up to there, parts may end anywhere
        self.stops = np.concatenate([np.arange(first + 1, here), table.rests[table.rests >= here]])
        self.beyond = table.rounded(table.carried[first, self.stops])
        # The most bytes at once on the way to each state, with the gradients that arrive at another.
        forward = np.array([stage.forward_bytes for stage in chain.stages[first:]], float)
        ways = np.maximum.accumulate(table.carried[first, first:-1] + forward)[self.stops - first - 1]
        self.needed = table.rounded(ways[:, None] + table.gradients[self.stops])
        self.again = (table.again[self.stops] - table.again[first]).astype(np.float32)
        self.first = (table.first[self.stops] - table.first[first]).astype(np.float32)
        self.tapes = [_Taped(table, first, mode, self.stops) for mode in chain.stages[first].modes]
        self.seconds: Seconds = np.min([tape.seconds() for tape in self.tapes], axis=0)
        for middle in range(len(self.stops) - 1):
            later = self.seconds[middle + 1 :, self.beyond[middle] :]
            np.minimum(later, self._stored(middle, middle + 1, len(self.stops)), out=later)
        self.least = np.isinf(self.seconds).sum(axis=1)  # slots that are needed: more are never worse

    def _stored(self, middle: int, start: int, stop: int) -> Seconds:
        """Up to some of the stops, storing an earlier one's state: by slots, from those for that state on."""
        beyond, rest = self.beyond[middle], self.table.parts[int(self.stops[middle])]
        skipped = len(rest.stops) - len(self.stops)  # they end alike
        start, stop = start + skipped, stop + skipped
        after = rest.seconds[start:stop, : self.table.slots + 1 - beyond]
        before = self.seconds[middle, beyond:]
        found: Seconds = after + (before + self.again[middle])
        if stop == len(rest.stops):
            found[-1] = after[-1] + (before + self.first[middle])
        needed = self.needed[middle, start - skipped : stop - skipped] - beyond
        for short in np.flatnonzero(needed > rest.least[start:stop]):
            found[short, : needed[short]] = np.inf
        return found

    def decision(self, stop: int, slots: int) -> tuple[int, int]:
        """What is done first within so many slots, and how many are left for what follows it."""
        end = int(np.searchsorted(self.stops, stop))
        ways = [
            (tape.seconds()[end, slots], _TAPED - number, slots - tape.held)
            for number, tape in enumerate(self.tapes)
        ]
        for middle in map(int, np.flatnonzero(self.beyond[:end] <= slots)):
            left = slots - int(self.beyond[middle])
            ways.append((self._stored(middle, end, end + 1)[0, left], int(self.stops[middle]), left))
        least = min(ways, key=lambda way: way[0])
        assert least[0] == self.seconds[end, slots]
        return least[1], least[2]


class _Taped:
    """The first stage of parts, taped in one of its modes, and the rest after it."""

    def __init__(self, table: Table, first: int, mode: Mode, stops: NDArray[np.int64]) -> None:
        chain = table.chain
        self.table, self.next = table, first + 1
        self.held = int(table.rounded(chain.held_bytes(first, mode)))
        forward_s = np.full(len(stops), mode.again_s)
        forward_bytes = np.full(len(stops), float(mode.taped_bytes))
        if self.next < len(chain.stages):  # a part of this stage alone
            forward_s[0] = mode.blind_s
            forward_bytes[0] = 0 if mode.blind_s == 0 else mode.taped_bytes
        forward_s[-1] = mode.first_s  # the last part ends where the chain does
        self.own_s = (forward_s + mode.backward_s).astype(np.float32)[:, None]
        backward_bytes = chain.kept_bytes(first, mode) + chain.gradients[self.next] + mode.backward_bytes
        self.needed = table.rounded(np.maximum(forward_bytes + table.gradients[stops], backward_bytes))

    def seconds(self) -> Seconds:
        """Of all parts, by slots."""
        slots = self.table.slots + 1
        found: Seconds = np.full((len(self.needed), slots), np.inf, np.float32)
        found[0] = 0.0
        if len(found) > 1:
            rest = self.table.parts[self.next].seconds
            found[1:, self.held :] = rest[len(rest) + 1 - len(found) :, : slots - self.held]
        found += self.own_s
        found[np.arange(slots) < self.needed[:, None]] = np.inf
        return found


class _Sweep:
    """Some states of the first way through the chain on disk; between two of them, all is in memory.

    While the way from one to the next is computed the first is written, and it is read before that way back.
    Seconds and slots are those from a state to the end and back, with the chain's first state at hand.
    """

    def __init__(self, table: Table, disk: Disk) -> None:
        self.table, whole = table, table.parts[0]
        places, length = [int(rest) for rest in table.rests], len(table.chain.stages)
        stops = [int(stop) for stop in whole.stops]
        self.beyond = {0: 0} | {stop: int(slots) for stop, slots in zip(stops, whole.beyond, strict=True)}
        self.seconds: dict[int, Seconds] = {}
        self._next: dict[int, NDArray[np.int64]] = {}
        for first in reversed(places[:-1]):
            parts, beyond = table.parts[first], self.beyond[first]
            num_bytes = float(table.carried[0, first])
            write_s, read_s = num_bytes / disk.write_bytes_per_s, num_bytes / disk.read_bytes_per_s
            best = _shifted(parts.seconds[-1], beyond)
            choice = np.full(len(best), length)
            for stop in (place for place in places[:-1] if place > first):
                number = int(np.searchsorted(parts.stops, stop))
                walk_s = max(float(parts.first[number]), write_s)
                found = self.seconds[stop] + _shifted(parts.seconds[number], beyond)
                found += np.float32(walk_s + read_s)
                found[: beyond + int(parts.needed[number, -1])] = np.inf
                choice[found < best] = stop
                best = np.minimum(best, found)
            self.seconds[first], self._next[first] = best, choice

    def next(self, first: int, slots: int) -> int:
        """The state that is stored after one; the last: nothing more goes to disk."""
        return int(self._next[first][slots])


def _shifted(row: Seconds, slots: int) -> Seconds:
    """The same with some slots taken by something else."""
    taken: Seconds = np.full(min(slots, len(row)), np.inf, np.float32)
    return np.concatenate([taken, row[: len(row) - len(taken)]])


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A schedule, how long it takes and how many bytes beyond the first state it needs at most."""

    actions: tuple[Action, ...]
    seconds: float
    peak_bytes: int

    @property
    def on_disk(self) -> tuple[int, ...]:
        """States that are written to disk."""
        return tuple(action.state for action in self.actions if isinstance(action, Store) and action.disk)


def plain(chain: Chain) -> Checkpoints:
    """Everything is kept, as torch does it."""
    stages = range(len(chain.stages))
    actions: list[Action] = [Tape(stage, blind=False) for stage in stages]
    actions += [Back(stage) for stage in reversed(stages)]
    held, peak = 0, 0
    for index, stage in enumerate(chain.stages):
        peak = max(peak, held + stage.modes[0].taped_bytes)
        held += chain.held_bytes(index, stage.modes[0])
    for index in reversed(stages):
        mode = chain.stages[index].modes[0]
        arrived = held + chain.gradients[index + 1]
        held -= chain.held_bytes(index, mode)
        back = chain.kept_bytes(index, mode) + chain.gradients[index + 1] + mode.backward_bytes
        peak = max(peak, arrived, held + back)
    return Checkpoints(tuple(actions), chain.plain_s, peak + chain.noted_bytes)


def _carried(chain: Chain) -> NDArray[np.float64]:
    """Bytes of each state (column) that are not in another one (row)."""
    inside = np.zeros((len(chain.states), len(chain.tensor_bytes)))
    for number, state in enumerate(chain.states):
        inside[number, list(state)] = 1.0
    weighed = inside * np.array(chain.tensor_bytes, float)
    return np.asarray(weighed.sum(axis=1) - inside @ weighed.T)


def _rests(chain: Chain) -> tuple[int, ...]:
    """States worth storing far from others: all of a short chain, else those smaller than the next ones."""
    length = len(chain.stages)
    if length <= FEW:
        return tuple(range(length + 1))
    sizes = [chain.bytes_of(state) for state in chain.states]
    changes = [n for n in range(1, length + 1) if sizes[n] != sizes[n - 1]]
    lows = [
        start
        for start, stop in pairwise(changes)
        if sizes[start] < sizes[start - 1] and sizes[start] < sizes[stop]
    ]
    return (0, *lows, length)


def _slot_bytes(chain: Chain, memory_bytes: int, slots: int) -> float:
    """The size of a slot, of about as many as asked, with which least is lost by rounding up."""
    sizes = np.array([chain.held_bytes(n, m) for n, s in enumerate(chain.stages) for m in s.modes])
    sizes = np.concatenate([sizes, [chain.bytes_of(b - a) for a, b in pairwise(chain.states)]])
    sizes = sizes[sizes > 0]
    candidates = memory_bytes / np.arange(max(1, slots // 2), slots + 1)
    lost = [float((np.ceil(sizes / slot) * slot - sizes).sum()) for slot in candidates]
    return float(max(1.0, candidates[int(np.argmin(lost))]))
