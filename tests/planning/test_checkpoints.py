"""The fastest schedule in a number of bytes: replayed on paper, and against brute force."""

from __future__ import annotations

import heapq
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.ir.schedule import Action, Advance, Back, Chain, Disk, Mode, Restore, Stage, Store, Tape
from manyhands.planning.checkpoints import Table, plain


@st.composite
def chains(draw: st.DrawFn, longest: int = 9, *, thorough: bool = False) -> Chain:
    """Stages with results of random sizes, some of which are read again later.

    `thorough`: each stage keeps all it reads and makes, nobody reads twice, and the last stage is computed
    again as it was the first time. Then the planner counts neither more nor less than there is.
    """
    length = draw(st.integers(1, longest))
    small = st.integers(1, 6)
    sizes = [draw(small) for _ in range(length + 1)]
    last = [n + 1 if thorough else draw(st.integers(n + 1, length + 1)) for n in range(length)]
    states = tuple(
        frozenset(n for n in range(place + 1) if n == place or (n < length and last[n] >= place + 1))
        for place in range(length + 1)
    )
    seconds = st.integers(1, 5).map(float)
    stages = []
    for n in range(length):
        around = states[n] | states[n + 1]
        modes, first = [], draw(seconds)
        for number in range(draw(st.integers(1, 2))):
            keeps = around if thorough else frozenset(t for t in around if draw(st.booleans()))
            own = draw(st.integers(0, 3))
            taped = sum(sizes[t] for t in (around | keeps) - states[n]) + own + draw(st.integers(0, 2))
            may_skip = number == 0 and not (thorough and n == length - 1)
            blind = 0.0 if may_skip and draw(st.booleans()) else first
            modes.append(Mode(keeps, own, taped, draw(st.integers(0, 4)), first, first, blind, draw(seconds)))
        made = sum(sizes[t] for t in states[n + 1] - states[n])
        stages.append(Stage(f"stage{n}", first, first, made + draw(st.integers(0, 2)), 0, tuple(modes)))
    return Chain(tuple(sizes), tuple(sizes), tuple(stages), states)


class Machine:
    """Follows a schedule on paper: what is where, what it costs, how much is held at most.

    `cautious`: the gradients of what the chain returns count from the beginning, as the planner counts.
    """

    def __init__(self, chain: Chain, *, cautious: bool = False, disk: Disk | None = None) -> None:
        self.chain, self.cautious, self.disk = chain, cautious, disk
        self.on_disk: set[int] = set()
        self.writing: int | None = None
        self.present: int | None = 0
        self.stored: set[int] = set()
        self.taped: dict[int, Mode] = {}
        self.left = len(chain.stages)
        self.reached = 0
        self.seconds = 0.0
        self.peak = 0

    def held(self) -> int:
        """Bytes beyond the first state, which somebody else holds."""
        tensors: set[int] = set()
        for state in self.stored | ({self.present} if self.present is not None else set()):
            tensors |= self.chain.states[state]
        own = 0
        for mode in self.taped.values():
            tensors |= mode.keeps
            own += mode.own_bytes
        held = self.chain.bytes_of(tensors - self.chain.states[0])
        arrived = self.cautious or self.left < len(self.chain.stages) or self.present is None
        return held + own + (self.chain.gradients[self.left] if arrived else 0)

    def own_bytes(self, state: int) -> int:
        return self.chain.bytes_of(self.chain.states[state] - self.chain.states[0])

    def use(self, more: int) -> None:
        self.peak = max(self.peak, self.held() + more)

    def act(self, action: Action) -> None:
        chain = self.chain
        match action:
            case Store(state, disk):
                assert self.present == state and state not in self.stored | self.on_disk
                self.stored.add(state)  # also while it is written
                self.writing = state if disk else None
            case Restore(state, last):
                assert state in self.stored | self.on_disk
                if state in self.on_disk:
                    assert self.disk is not None
                    self.seconds += self.own_bytes(state) / self.disk.read_bytes_per_s
                self.present = state
                self.on_disk -= {state}
                self.stored = self.stored - {state} if last else self.stored | {state}
            case Advance(start, stop):
                assert self.present == start < stop <= self.left
                seconds = 0.0
                for number in range(start, stop):
                    stage = chain.stages[number]
                    self.use(stage.forward_bytes)
                    seconds += self.first_or_again(number, stage.first_s, stage.again_s)
                    self.present = number + 1
                if self.writing is not None:
                    assert self.disk is not None and self.writing == start
                    seconds = max(seconds, self.own_bytes(start) / self.disk.write_bytes_per_s)
                    self.stored, self.on_disk, self.writing = (
                        self.stored - {start},
                        self.on_disk | {start},
                        None,
                    )
                self.seconds += seconds
            case Tape(number, blind, choice):
                mode = chain.stages[number].modes[choice]
                assert self.present == number < self.left and number not in self.taped
                skips = blind and mode.blind_s == 0
                self.use(0 if skips else mode.taped_bytes)
                again = mode.blind_s if blind else mode.again_s
                self.seconds += self.first_or_again(number, mode.first_s, again)
                self.taped[number] = mode
                self.present = None if blind else number + 1
            case Back(number):
                assert number == self.left - 1
                mode = self.taped[number]
                self.present = None
                self.use(mode.backward_bytes)
                self.seconds += mode.backward_s
                del self.taped[number]
                self.left = number

    def first_or_again(self, number: int, first: float, again: float) -> float:
        if number < self.reached:
            return again
        self.reached += 1
        return first


def replayed(chain: Chain, actions: tuple[Action, ...], disk: Disk | None = None) -> Machine:
    machine = Machine(chain, disk=disk)
    for action in actions:
        machine.act(action)
    assert machine.left == 0 and not machine.stored | machine.on_disk and not machine.taped
    return machine


@settings(deadline=None, max_examples=150)
@given(chains(), st.floats(0.0, 1.0), st.sampled_from((0.5, 4.0, 1e9)), st.sampled_from((0.5, 4.0, 1e9)))
def test_a_schedule_with_a_disk_is_legal_fits_and_is_never_slower_than_without(
    chain: Chain, part: float, write: float, read: float
) -> None:
    most, disk = plain(chain).peak_bytes, Disk(write, read)
    least = Table(chain, most, slots=most, disk=disk).least_bytes
    memory = most if least is None else int(least + part * part * (most - least))
    table = Table(chain, memory, slots=memory, disk=disk)
    found, without = table.plan(memory), table.plan(memory, on_disk=False)
    assert without == Table(chain, memory, slots=memory).plan(memory)
    if found is None:
        assert without is None
        return
    machine = replayed(chain, found.actions, disk)
    assert machine.peak <= found.peak_bytes <= memory
    assert abs(machine.seconds - found.seconds) < 1e-3
    assert without is None or found.seconds <= without.seconds
    assert not found.on_disk or without is None or found.seconds < without.seconds


def test_a_disk_is_used_where_it_pays_and_only_there() -> None:
    """Stages of 10 seconds with results of 10 bytes that nobody has room for."""
    mode = Mode(frozenset(), 10, 20, 0, 10.0, 10.0, 10.0, 10.0)
    stages = tuple(Stage(f"stage{n}", 10.0, 10.0, 10, 0, (mode,)) for n in range(8))
    chain = Chain((10,) * 9, (10,) * 9, stages, tuple(frozenset({n}) for n in range(9)))
    memory = 60
    without = Table(chain, memory, slots=memory).plan(memory)
    quick = Table(chain, memory, slots=memory, disk=Disk(10.0, 10.0)).plan(memory)
    slow = Table(chain, memory, slots=memory, disk=Disk(0.1, 0.1)).plan(memory)
    assert without is not None and quick is not None
    assert quick.on_disk and quick.seconds < without.seconds
    assert slow == without


@settings(deadline=None, max_examples=150)
@given(chains(), st.floats(0.2, 1.2))
def test_a_schedule_is_legal_fits_and_costs_what_it_says(chain: Chain, part: float) -> None:
    memory = int(part * plain(chain).peak_bytes) + 1
    table = Table(chain, memory, slots=memory)
    found = table.plan(memory)
    if found is None:
        assert table.least_bytes is None
        return
    machine = replayed(chain, found.actions)
    assert machine.peak <= found.peak_bytes <= memory
    assert abs(machine.seconds - found.seconds) < 1e-3


@settings(deadline=None, max_examples=50)
@given(chains())
def test_with_room_for_everything_nothing_is_computed_again(chain: Chain) -> None:
    everything = plain(chain)
    machine = replayed(chain, everything.actions)
    assert machine.peak <= everything.peak_bytes
    found = Table(chain, 4 * everything.peak_bytes).plan(4 * everything.peak_bytes)
    assert found is not None and found.seconds <= everything.seconds + 1e-3


@settings(deadline=None, max_examples=50)
@given(chains())
def test_more_memory_never_takes_longer(chain: Chain) -> None:
    memory = 2 * plain(chain).peak_bytes
    row = Table(chain, memory, slots=memory).seconds
    assert all(later <= earlier for earlier, later in zip(row, row[1:], strict=False))


def quickest(chain: Chain, memory: int) -> float | None:
    """Every legal order of actions, the quickest first; a state is stored until its stage is taped."""
    start = (0, frozenset(), frozenset(), len(chain.stages), 0)
    ties = count()
    queue = [(0.0, next(ties), start)]
    seen = set()
    while queue:
        seconds, _, place = heapq.heappop(queue)
        if place in seen:
            continue
        seen.add(place)
        present, stored, taped, left, reached = place
        if left == 0:
            return seconds
        for actions in _possible(chain, present, stored, dict(taped), left, reached):
            machine = Machine(chain, cautious=True)
            machine.present, machine.stored, machine.left, machine.reached = (
                present,
                set(stored),
                left,
                reached,
            )
            machine.taped = {n: chain.stages[n].modes[c] for n, c in taped}
            for action in actions:
                machine.act(action)
            if machine.peak > memory:
                continue
            choices = {n: c for n, c in taped if n in machine.taped}
            choices |= {action.stage: action.mode for action in actions if isinstance(action, Tape)}
            after = (
                machine.present,
                frozenset(machine.stored),
                frozenset(choices.items()),
                machine.left,
                machine.reached,
            )
            heapq.heappush(queue, (seconds + machine.seconds, next(ties), after))
    return None


def _possible(
    chain: Chain, present: int | None, stored: frozenset[int], taped: dict[int, int], left: int, reached: int
) -> list[tuple[Action, ...]]:
    """A stored state is let go when its stage is taped, and not before: those two are one step."""
    found: list[tuple[Action, ...]] = []
    turned = reached == len(chain.stages)

    def tapes(stage: int) -> list[Tape]:
        alone = stage == left - 1 and turned
        return [Tape(stage, alone, choice) for choice in range(len(chain.stages[stage].modes))]

    if left - 1 in taped and turned:
        found.append((Back(left - 1),))
    for state in stored:
        if present is None or turned:
            found.append((Restore(state, last=False),))
            found += [(Restore(state, last=True), tape) for tape in tapes(state)]
    if present is not None and present < left and present not in taped:
        if present not in stored:
            found.append((Store(present),))
            found += [(tape,) for tape in tapes(present)]
        before_the_end = present < left - (1 if turned else 0)
        if before_the_end and (present in stored or any(state < present for state in stored)):
            found.append((Advance(present, present + 1),))
    return found


@settings(deadline=None, max_examples=60)
@given(chains(longest=4, thorough=True), st.floats(0.3, 1.1))
def test_no_legal_order_of_actions_is_quicker(chain: Chain, part: float) -> None:
    memory = int(part * plain(chain).peak_bytes) + 1
    found = Table(chain, memory, slots=memory).plan(memory)
    best = quickest(chain, memory)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert abs(found.seconds - best) < 1e-3
