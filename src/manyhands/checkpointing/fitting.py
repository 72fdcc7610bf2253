"""Fit the training of a model on this device into a number of bytes, those of the whole process."""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from manyhands.checkpointing.asking import asked_bytes, asked_directory, asked_inputs, check_model
from manyhands.checkpointing.fitted import Fit, fitted, is_hooked
from manyhands.checkpointing.lasting import later_bytes, result_bytes, state_bytes
from manyhands.checkpointing.measuring import measure, untouched
from manyhands.consoles import busy
from manyhands.errors import RequestError, RunError
from manyhands.ir.schedule import Chain, Disk
from manyhands.planning.checkpoints import Checkpoints, Table, plain
from manyhands.profiling import system
from manyhands.reporting.text import amount
from manyhands.runtime.allocator import Room, fill_holes, return_freed_memory
from manyhands.runtime.process import current_memory, forget_peak, peak_memory
from manyhands.runtime.recipes import Convolution, Norm, is_watched, recipe_for
from manyhands.runtime.replaying import Growth, Script, run
from manyhands.runtime.shelf import measure as measure_disk
from manyhands.tracing.stages import Staged, result_names, staged

SPARE = 0.01  # of the budget: what a process needs now and then besides
STEADY = 1.005  # times the smallest that was found: what is named, since another try may find a little more
UNSTEADY = 0.06  # of the room for tensors, where freed memory is kept: the places of blocks differ by step
LOOSE = 1.6  # times the smallest schedule, from which on freed memory is kept
ROOM_TO_REUSE = (1.0, 0.8, 0.65)  # parts of the room for tensors that schedules are tried with then
TIGHT = (1.0,)
AMPLE = 2  # times what a stage takes while it is measured, to measure it although it will be refused
PLENTY = 1 << 62
WORTH_WRITING = 1.05  # times quicker than without a disk: cards wear out
REPEATS = 2
TRIES = 4
MORE = 0.02  # of the peak of the step that was tried: before one takes more, freed memory is given back
COPIES = 1.4  # of what a convolution reads and makes, while its backward is computed as a whole


def fit(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    memory: str | float,
    optimizer: torch.optim.Optimizer | None = None,
    disk: str | Path | None = None,
) -> nn.Module:
    """A module with the same weights that trains exactly as the model does, within so much memory.

    >>> model = manyhands.fit(model, images, memory="900MB")  # then train as before

    `memory` is for the whole process. `example` is a batch as large as any that follows. Some stages of the
    model are computed again in backward: gradients, buffers and random numbers are those of torch, bit for
    bit. A step is tried out on this device. The optimiser tells how much its state will take; without one,
    as much as SGD with momentum. What was found is in the module's `fit`. `disk`: a directory to which
    states may be written instead of being computed again, where that is clearly faster on this device.
    """
    budget, inputs, shelf = asked_bytes(memory), asked_inputs(example), asked_directory(disk)
    check_model(model, inputs, optimizer)
    with busy(not sys.stderr.isatty()) as status:
        fitting = _Fitting(model, inputs, budget, optimizer, shelf, lambda what: status.update(f"{what} ..."))
        return fitted(model, *fitting.found())


class _Fitting:
    """Measure, plan, try."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Tensor, ...],
        budget: int,
        optimizer: torch.optim.Optimizer | None,
        shelf: Path | None,
        tell: Callable[[str], None],
    ) -> None:
        self.tell, self.shelf = tell, shelf
        self.disk = None if shelf is None else self._measured_disk(shelf)
        self.model, self.inputs, self.budget = model, inputs, budget
        self.most = int(budget * (1 - SPARE))
        self.within = budget  # what may be taken while it is measured
        self.staged = _staged(model, inputs)
        self.recipes = [recipe_for(code) for code in self.staged.stages]
        self.state_bytes = state_bytes(model, optimizer)  # of the optimiser, that is not there yet
        self.later_bytes = later_bytes(model, optimizer)
        gradients = (weight.grad for weight in model.parameters() if weight.grad is not None)
        self.aside_bytes = sum(gradient.nbytes for gradient in gradients)  # there while a step makes others
        self.growths: tuple[Growth, ...] = ()
        self.keep = False  # is there room to keep what is freed?
        self.cushion = 0  # bytes by which a step may then take more than another
        self.tight = False  # was there a stage with too little room to compute it as it is written?
        self.needs = [self._least(stage) for stage in range(len(self.staged.stages))]

    def found(self) -> tuple[Script, Staged, tuple[Tensor, ...], Fit]:
        """A script that was tried, and what was found."""
        tidy()
        chain = self._measured(None)
        return_freed_memory()
        base = current_memory() + self.later_bytes + result_bytes(self.staged)
        room = self.most - base
        table, planning_s = self._planned(chain, room)
        least = table.least_bytes
        if least is None or least > room:
            smallest = Table(chain, 2 * plain(chain).peak_bytes, disk=self.disk).least_bytes
            assert smallest is not None
            stage = chain.stages[_largest(chain)].name
            need = int(STEADY * with_spare(base + smallest))
            raise self._too_little(f"about {amount(need)}", base, stage, "that much")
        parts: tuple[float, ...] = TIGHT
        if room > LOOSE * least and not self.tight:  # enough to keep what is freed
            self.keep, chain = True, self._measured(chain)
            self.cushion = int(UNSTEADY * room)
            room -= self.cushion
            table, planning_s = self._planned(chain, room)
            parts = ROOM_TO_REUSE
        schedules = self._schedules(table, [int(room * part) for part in parts])
        del table  # it is large
        tidy()
        best = self._best(schedules, lambda: self._planned(chain, room)[0])
        everything = plain(chain)
        facts = replace(
            best[1],
            plain_bytes=base + everything.peak_bytes,
            plain_s=everything.seconds,
            least_bytes=with_spare(base + least),
            planning_s=planning_s,
        )
        return best[0], self.staged, self.inputs, facts

    def _measured_disk(self, shelf: Path) -> Disk:
        self.tell("measuring the disk")  # a slow card takes its time
        return measure_disk(shelf)

    def _planned(self, chain: Chain, room: int) -> tuple[Table, float]:
        started = time.perf_counter()
        most = plain(chain).peak_bytes  # more than all is of no use
        table = Table(chain, max(1, min(room, most)), disk=self.disk)
        if table.least_bytes is None and room > most:  # but for rounding up to slots
            table = Table(chain, min(room, 2 * most), disk=self.disk)
        return table, time.perf_counter() - started

    def _schedules(self, table: Table, rooms: list[int]) -> list[Checkpoints]:
        """For different room, with a disk and without."""
        ways = (True, False) if self.disk else (False,)
        found = [table.plan(room, on_disk=on_disk) for room in rooms for on_disk in ways]
        return list({each.actions: each for each in found if each is not None}.values())

    def _best(self, schedules: list[Checkpoints], plan_again: Callable[[], Table]) -> tuple[Script, Fit]:
        """Of several schedules, the one that was quickest when tried."""
        tried, refused = [], None  # the first reason
        for schedule in schedules:
            try:
                tried.append(self._tried(schedule, plan_again))
            except (RequestError, RunError) as error:
                refused = refused or error
        if not tried:
            assert refused is not None
            raise refused
        return min(tried, key=lambda each: each[1].seconds * (WORTH_WRITING if each[1].disk_bytes else 1.0))

    def _measured(self, keeping: Chain | None) -> Chain:
        chain, growths = measure(
            self.staged,
            self.recipes,
            self.inputs,
            self.model,
            1 if keeping is None else REPEATS,
            resident=True,
            keeping=keeping,
            before=self._refuse_early if keeping is None else self._told,
        )
        self.growths = growths
        return chain

    def _tried(self, schedule: Checkpoints, plan_again: Callable[[], Table]) -> tuple[Script, Fit]:
        """Run a step, and plan again with less as long as it takes more than it may."""
        limit = self.most - self.cushion
        most = self.most if self.keep else self.budget
        on_disk = bool(schedule.on_disk)
        for tries in range(TRIES):
            disk_bytes = self._disk_bytes(schedule)
            return_freed_memory()
            before = current_memory()
            seconds, peak = self._step(self._script(schedule, limit + self.aside_bytes - self.state_bytes))
            step_bytes = peak - before
            peak += self.state_bytes - self.aside_bytes
            if peak <= most:
                facts = Fit(self.budget, peak, seconds, 0, 0, 0, 0, schedule, disk_bytes)
                return self._script(schedule, limit, step_bytes + int(MORE * peak)), facts
            above = peak - most
            limit -= above
            table = plan_again()
            smaller = table.plan(less(table, schedule, above << tries), on_disk=on_disk)
            del table
            tidy()
            if smaller is None:
                raise RequestError(
                    f"a step took {amount(peak)} where {amount(self.budget)} are allowed, and no schedule "
                    "takes less. Allow more memory, or a smaller batch."
                )
            schedule = smaller
        raise RequestError(f"no schedule stayed below {amount(self.budget)}. Allow a little more memory.")

    def _disk_bytes(self, schedule: Checkpoints) -> int:
        """What a step writes. There has to be room for it."""
        given = self.staged.states[0]
        states = [self._bytes([n for n in self.staged.states[s] if n not in given]) for s in schedule.on_disk]
        if self.shelf is None or not states:
            return 0
        needed, free = sum(states), shutil.disk_usage(self.shelf).free
        if needed > free:
            raise RequestError(
                f"{amount(needed)} would be written to {self.shelf}, where {amount(free)} are free. "
                "Free some space, or fit without a disk."
            )
        return needed

    def _script(self, schedule: Checkpoints, limit_bytes: int, step_bytes: int | None = None) -> Script:
        return Script(
            self.staged.stages,
            self.recipes,
            self.staged.states,
            self.staged.differentiable,
            schedule.actions,
            self.growths,
            Room(limit_bytes, keep=self.keep, step_bytes=step_bytes),
            len(self.inputs[0]) if self.inputs[0].dim() else None,
            self.shelf,
        )

    def _step(self, script: Script) -> tuple[float, int]:
        """How long a step takes, and the peak of the process."""
        self.tell("trying a step")
        return_freed_memory()
        names = result_names(self.staged.results)
        with untouched(self.model):
            times, peaks = [], []
            for _ in range(2):
                forget_peak()
                started = time.perf_counter()
                values = run(script, dict(zip(self.staged.inputs, self.inputs, strict=True)), names)
                ends = [value for value in values.values() if value.requires_grad]
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
                times.append(time.perf_counter() - started)
                peaks.append(peak_memory())
                del values, ends
                for weight in self.model.parameters():
                    weight.grad = None
        return min(times), max(peaks)

    def _refuse_early(self, stage: int) -> bool:
        """Before a stage is measured that would not fit, or any if the largest one cannot fit.

        Whether it fits only in its own way, and not as it is written.
        """
        self.tell(f"measuring stage {stage + 1} of {len(self.staged.stages)}")
        return_freed_memory()
        there = self._bytes(self.staged.states[stage])
        base = current_memory() - there + self.later_bytes
        as_written, frugal = self._measuring(stage)
        tight = base + as_written > self.within and self.recipes[stage].modes > 1
        needs = list(self.needs)
        needs[stage] = max(needs[stage], frugal if tight else as_written)
        if stage == 0 or base + needs[stage] > self.within:
            largest = max(range(len(needs)), key=needs.__getitem__)
            if base + needs[largest] > self.within and not self._may_measure_all():
                more = result_bytes(self.staged)
                need = with_spare(base + more + needs[largest])
                name = self.staged.stages[largest].name
                raise self._too_little(f"at least {amount(need)}", base + more, name, "clearly more")
            tight &= self.within == self.budget
        self.tight |= tight
        return tight

    def _may_measure_all(self) -> bool:
        """Has this machine more memory than was allowed? Then what would be enough can be found out."""
        most = max(self._measuring(stage)[0] for stage in range(len(self.staged.stages)))
        if system.room(Path("/")).left_bytes > AMPLE * most:
            self.within = PLENTY
        return self.within == PLENTY

    def _told(self, stage: int) -> bool:
        self.tell(f"measuring stage {stage + 1} of {len(self.staged.stages)} again")
        return False

    def _measuring(self, stage: int) -> tuple[int, int]:
        """What a stage takes while it is measured, as it is written and in its last mode."""
        cut, code = self.staged, self.staged.stages[stage]
        there, made = self._bytes(cut.states[stage]), self._bytes(code.makes)
        gradients = [name for name in (*code.reads, *code.makes) if name in cut.differentiable]
        flowing, read = self._bytes(gradients), self._bytes(code.reads)
        if isinstance(self.recipes[stage], Convolution):  # libraries copy what they work on
            return there + flowing + int(COPIES * (read + made)), there + made + max(flowing, read + made)
        return there + flowing + made, there + flowing - min(made, flowing)

    def _least(self, stage: int) -> int:
        """What a stage needs at least in backward: its state, gradients after it, and of what it reads.

        A norm's gradient takes the place of the one that came.
        """
        cut = self.staged
        after = [name for name in cut.states[stage + 1] if name in cut.differentiable]
        read = [name for name in cut.stages[stage].reads if name in cut.differentiable]
        fresh = self._bytes(read)
        if isinstance(self.recipes[stage], Norm):
            fresh -= min(fresh, self._bytes(cut.stages[stage].makes))
        return self._bytes(cut.states[stage]) + self._bytes(after) + fresh

    def _bytes(self, names: Sequence[str]) -> int:
        memories = {self.staged.memory[name] for name in names if name in self.staged.memory}
        return sum(self.staged.memory_bytes[memory] for memory in memories)

    def _too_little(self, need: str, base: int, stage: str, allow: str) -> RequestError:
        return RequestError(
            f"{amount(self.budget)} are too little: the smallest schedule needs {need}, of which "
            f"{amount(base)} are the process, weights, gradients, results and the optimiser's state; "
            f"{stage} needs most of the rest. Allow {allow}, or try a smaller batch or image."
        )


def tidy() -> None:
    """Nothing is held that nobody needs (a table and its parts hold each other), nor are there holes."""
    gc.collect()
    return_freed_memory()
    fill_holes()


def less(table: Table, schedule: Checkpoints, by_bytes: int) -> int:
    """What the next schedule may take. The smallest one is tried before giving up."""
    least = table.least_bytes
    assert least is not None
    fewer = schedule.peak_bytes - by_bytes
    return max(fewer, least) if schedule.peak_bytes > least else fewer


def with_spare(num_bytes: int) -> int:
    return int(num_bytes / (1 - SPARE)) + 1


def _largest(chain: Chain) -> int:
    """The stage that needs most at once."""

    def needed(index: int) -> int:
        mode = min(chain.stages[index].modes, key=lambda m: chain.kept_bytes(index, m) + m.backward_bytes)
        after = chain.kept_bytes(index, mode) + chain.gradients[index + 1] + mode.backward_bytes
        return chain.bytes_of(chain.states[index]) + after

    return max(range(len(chain.stages)), key=needed)


def _staged(model: nn.Module, inputs: tuple[Tensor, ...]) -> Staged:
    found = staged(model, inputs)
    if len(found.inputs) != len(inputs):
        raise RequestError(f"forward takes {len(found.inputs)} inputs; the example has {len(inputs)}.")
    odd = [name for name in result_names(found.results) if name not in found.memory]
    if odd:
        raise RequestError(f"forward returns {odd[0]}, which it does not compute as a tensor.")
    called = {id(module) for code in found.stages for module in code.modules}
    for name, module in model.named_modules():
        if name and is_watched(module) and id(module) not in called:
            raise RequestError(f"{name} has hooks, and what it holds is run without it. Remove them first.")
    _refuse_hooked_and_shared(found)
    return found


def _refuse_hooked_and_shared(cut: Staged) -> None:
    """A weight of several stages gets its gradient in parts."""
    uses = [Counter(code.weights) for code in cut.stages]
    for weight in {weight for use in uses for weight in use}:
        places = [use[weight] for use in uses if weight in use]
        if len(places) > 1 and (is_hooked(weight) or max(places) > 1):
            raise RequestError(
                f"a weight of {tuple(weight.shape)} is used in several places, and has hooks or is used "
                "twice in one of them: its gradient would not be that of torch to the bit."
            )
