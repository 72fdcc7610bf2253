"""The fastest schedule of a chain within a number of bytes, by dynamic programming over parts of the chain.

A part is some stages in a row, entered with its first state at hand, and left with the gradients of that
state. Either its first stage is taped at once and the rest follows; or the way to a later state is computed
without keeping anything, the rest follows from there, and then the part before it, from its first state once
more. That is optimal among the schedules that never drop a stored state before its last use.

O. Beaumont et al., Optimal checkpointing for heterogeneous chains, Inria RR-9302, 2019, has the recursion.
Here a state is a set of tensors, so that what a checkpoint shares with the one before it is counted once, and
a stage whose backward does not need its result is not computed again for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from manyhands.ir.schedule import Action, Advance, Back, Chain, Mode, Restore, Store, Tape

Row = NDArray[np.float32] | NDArray[np.float64]
SLOTS = 320  # into which memory is divided
LONG = 150  # stages, from which on there are fewer
FEW = 70  # stages, up to which any state may be stored
_TAPED = -1  # a decision: tape the first stage in its first mode, -2 in its second; others: store that state


class Table:
    """The least seconds of every part of a chain, by slots of memory beyond the part's first state."""

    def __init__(self, chain: Chain, memory_bytes: int, slots: int | None = None) -> None:
        self.chain, length = chain, len(chain.stages)
        slots = slots or (SLOTS if length < LONG else SLOTS * LONG // length)
        self.slot_bytes = _slot_bytes(chain, memory_bytes, slots)
        self.slots = max(0, self._slots_in(memory_bytes))
        self.rests = _rests(chain)
        self.decisions: dict[tuple[int, int], NDArray[np.int16]] = {}
        self._walked = {
            False: np.cumsum([0.0, *(stage.again_s for stage in chain.stages)]),
            True: np.cumsum([0.0, *(stage.first_s for stage in chain.stages)]),  # on the way to the end
        }
        # By last state; rows by first state, from the last on. Where memory is short, the index is -1.
        self._seconds = {
            stop: np.full((1 + stop - self._earliest(stop), self.slots + 2), np.inf, np.float32)
            for stop in range(1, length + 1)
        }
        self._carried = _carried(chain)
        for first in reversed(range(length)):
            self._fill(first)

    def seconds(self, first: int, stop: int) -> Row:
        row: Row = self._seconds[stop][stop - first, :-1]
        return row

    def _earliest(self, stop: int) -> int:
        """The first state of the longest part that ends here."""
        return 0 if stop in self.rests else max(rest for rest in self.rests if rest < stop)

    def _rounded(self, num_bytes: int) -> int:
        """Slots for so many bytes; more than there are, if it is too much."""
        return min(-int(-num_bytes // self.slot_bytes), self.slots + 1)

    def _all_rounded(self, num_bytes: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.minimum(np.ceil(num_bytes / self.slot_bytes), self.slots + 1).astype(np.int64)

    def _fill(self, first: int) -> None:
        """All parts that begin with this stage, the shortest first."""
        chain = self.chain
        here = min(rest for rest in self.rests if rest > first)
        stops = np.array([*range(first + 1, here + 1), *(rest for rest in self.rests if rest > here)])
        beyond = self._all_rounded(self._carried[first, stops])
        ways = self._ways(first)[stops - first - 1]
        slots = np.arange(self.slots + 1)
        shifted = np.maximum(slots - beyond[:, None], -1)
        before = np.zeros((len(stops), self.slots + 1), np.float32)  # seconds of the part before each of them
        tapes = [_Taped(self, first, mode) for mode in chain.stages[first].modes]
        for count, stop in enumerate(stops):
            best, decision = self._taped(tapes, int(stop))
            if count:
                middles, arriving = stops[:count], chain.gradients[stop]
                found = self._seconds[int(stop)][(stop - middles)[:, None], shifted[:count]] + before[:count]
                walked = self._walked[int(stop) == len(chain.stages)]
                found += (walked[middles] - walked[first]).astype(np.float32)[:, None]
                needed = self._all_rounded(ways[:count] + arriving)
                found[slots < needed[:, None]] = np.inf
                choice = found.argmin(axis=0)
                least = found[choice, slots]
                decision[least < best] = middles[choice][least < best]
                best = np.minimum(best, least)
            self._seconds[int(stop)][int(stop) - first, :-1] = best
            self.decisions[first, int(stop)] = decision
            before[count] = best

    def _taped(self, tapes: list[_Taped], stop: int) -> tuple[Row, NDArray[np.int16]]:
        """The first stage is taped at once, in its best mode."""
        rows = [tape.row(stop) for tape in tapes]
        if len(rows) == 1:
            return rows[0], np.full(self.slots + 1, _TAPED, np.int16)
        best = np.argmin(rows, axis=0)
        return np.min(rows, axis=0), (_TAPED - best).astype(np.int16)

    def _ways(self, first: int) -> NDArray[np.float64]:
        """The most bytes at once on the way from one state to each later one, beyond the first."""
        forward = np.array([stage.forward_bytes for stage in self.chain.stages[first:]], float)
        return np.asarray(np.maximum.accumulate(self._carried[first, first:-1] + forward))

    @property
    def least_bytes(self) -> int | None:
        """The fewest bytes beyond the first state with which the whole chain can be run."""
        whole = self.seconds(0, len(self.chain.stages))
        fits = np.flatnonzero(np.isfinite(whole))
        return self.bytes_of(int(fits[0])) if len(fits) else None

    def _slots_in(self, memory_bytes: int) -> int:
        return floor((memory_bytes - self.chain.noted_bytes) / self.slot_bytes + 1e-9)

    def bytes_of(self, slots: int) -> int:
        return ceil(slots * self.slot_bytes) + self.chain.noted_bytes

    def plan(self, memory_bytes: int) -> Checkpoints | None:
        """The fastest schedule within so many bytes beyond the first state; None: there is none."""
        slots = min(self._slots_in(memory_bytes), self.slots)
        length = len(self.chain.stages)
        if slots < 0 or not np.isfinite(self.seconds(0, length)[slots]):
            return None
        row = self.seconds(0, length)
        enough = int(np.flatnonzero(row == row[slots])[0])  # more is of no use
        actions: list[Action] = []
        self._enter(actions, 0, length, enough, stored=False)
        return Checkpoints(tuple(actions), float(row[slots]), self.bytes_of(enough))

    def _enter(self, actions: list[Action], first: int, stop: int, slots: int, *, stored: bool) -> None:
        decision = int(self.decisions[first, stop][slots])
        chain = self.chain
        if decision <= _TAPED:
            number, alone = _TAPED - decision, stop == first + 1
            if stored:
                actions.append(Restore(first, last=True))
            actions.append(Tape(first, alone and stop < len(chain.stages), number))
            if not alone:
                held = self._rounded(chain.held_bytes(first, chain.stages[first].modes[number]))
                self._enter(actions, first + 1, stop, slots - held, stored=False)
            actions.append(Back(first))
            return
        actions.append(Restore(first, last=False) if stored else Store(first))
        actions.append(Advance(first, decision))
        beyond = self._rounded(chain.bytes_of(chain.states[decision] - chain.states[first]))
        self._enter(actions, decision, stop, slots - beyond, stored=False)
        self._enter(actions, first, decision, slots, stored=True)


class _Taped:
    """The first stage of parts, taped in one of its modes, and the rest after it."""

    def __init__(self, table: Table, first: int, mode: Mode) -> None:
        chain = table.chain
        self.table, self.first, self.mode, self.length = table, first, mode, len(chain.stages)
        self.backward_bytes = chain.kept_bytes(first, mode) + chain.gradients[first + 1] + mode.backward_bytes
        held = table._rounded(chain.held_bytes(first, mode))
        self.left = np.maximum(np.arange(table.slots + 1) - held, -1)

    def row(self, stop: int) -> Row:
        """Seconds up to a state, by slots."""
        mode, table = self.mode, self.table
        last, alone = stop == self.length, stop == self.first + 1
        forward_s = mode.first_s if last else mode.blind_s if alone else mode.again_s
        forward_bytes = 0 if alone and not last and mode.blind_s == 0 else mode.taped_bytes
        needed = max(forward_bytes + table.chain.gradients[stop], self.backward_bytes)
        seconds = np.float32(forward_s + mode.backward_s)
        if alone:
            row: Row = np.full(table.slots + 1, seconds)
        else:
            row = table._seconds[stop][stop - self.first - 1][self.left] + seconds
        row[: table._rounded(needed)] = np.inf
        return row


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A schedule, how long it takes and how many bytes beyond the first state it needs at most."""

    actions: tuple[Action, ...]
    seconds: float
    peak_bytes: int


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
