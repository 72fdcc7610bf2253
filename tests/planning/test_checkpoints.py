"""The fastest schedule in a number of bytes: replayed on paper, and against brute force."""

from __future__ import annotations

import heapq
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.ir.schedule import Action, Advance, Back, Chain, Mode, Restore, Stage, Store, Tape
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

    def __init__(self, chain: Chain, *, cautious: bool = False) -> None:
        self.chain, self.cautious = chain, cautious
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

    def use(self, more: int) -> None:
        self.peak = max(self.peak, self.held() + more)

    def act(self, action: Action) -> None:
        chain = self.chain
        match action:
            case Store(state):
                assert self.present == state and state not in self.stored
                self.stored.add(state)
            case Restore(state, last):
                assert state in self.stored
                self.present = state
                self.stored -= {state} if last else set()
            case Advance(start, stop):
                assert self.present == start < stop <= self.left
                for number in range(start, stop):
                    stage = chain.stages[number]
                    self.use(stage.forward_bytes)
                    self.seconds += self.first_or_again(number, stage.first_s, stage.again_s)
                    self.present = number + 1
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


def replayed(chain: Chain, actions: tuple[Action, ...]) -> Machine:
    machine = Machine(chain)
    for action in actions:
        machine.act(action)
    assert machine.left == 0 and not machine.stored and not machine.taped
    return machine


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
        for action in _possible(chain, present, stored, dict(taped), left, reached):
            machine = Machine(chain, cautious=True)
            machine.present, machine.stored, machine.left, machine.reached = (
                present,
                set(stored),
                left,
                reached,
            )
            machine.taped = {n: chain.stages[n].modes[c] for n, c in taped}
            machine.act(action)
            if machine.peak > memory:
                continue
            choices = {n: c for n, c in taped if n in machine.taped}
            if isinstance(action, Tape):
                choices[action.stage] = action.mode
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
) -> list[Action]:
    found: list[Action] = []
    turned = reached == len(chain.stages)
    if left - 1 in taped and turned:
        found.append(Back(left - 1))
    for state in stored:
        if present is None or turned:
            found += [Restore(state, last=True), Restore(state, last=False)]
    if present is not None and present < left and present not in taped:
        if present not in stored:
            found.append(Store(present))
        before_the_end = present < left - (1 if turned else 0)
        if before_the_end and (present in stored or any(state < present for state in stored)):
            found.append(Advance(present, present + 1))
        for choice in range(len(chain.stages[present].modes)):
            alone = present == left - 1 and turned
            found.append(Tape(present, alone, choice))
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
