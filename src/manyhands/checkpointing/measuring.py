"""Time and bytes of every stage of a model, one after another: little more is held than what one needs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.checkpointing.likeness import key_of
from manyhands.checkpointing.tracking import LiveBytes
from manyhands.ir.schedule import Chain, Mode, Stage
from manyhands.runtime.allocator import keep_freed_memory, return_freed_memory
from manyhands.runtime.process import current_memory, forget_peak, peak_memory
from manyhands.runtime.recipes import AsWritten
from manyhands.runtime.replaying import Growth, Replay, Script
from manyhands.runtime.stages import Recipe
from manyhands.tracing.stages import Staged

REPEATS = 3
PARTS, PART_ROWS = 4, 32  # of an image, where the whole is too large


@dataclass
class _Meter:
    """What is found of the stages, those that are alike measured once."""

    staged: Staged
    recipes: list[Recipe]  # changed where one does not give the same bits here
    repeats: int
    resident: bool
    keeping: Chain | None  # as measured where freed memory goes back
    known: dict[Hashable, tuple[Stage, Growth, bool]]

    def measure(self, index: int, values: dict[str, Any], *, tight: bool) -> tuple[Stage, Growth]:
        code = self.staged.stages[index]
        key = key_of(code, values, self.staged.differentiable)
        if key not in self.known:
            stage = self._tight_stage(index, values) if tight else self._stage(index, values)
            growth = self._growth(index, values, stage)
            self.known[key] = stage, growth, isinstance(self.recipes[index], AsWritten)
        found, growth, as_written = self.known[key]
        if as_written:
            self.recipes[index] = AsWritten(code)
        if self.keeping is not None:
            return _with_times(self.keeping.stages[index], found), growth
        memory = self.staged.memory
        ids = [memory.get(name) for name in (*code.reads, *code.makes)]
        modes = tuple(
            replace(mode, keeps=frozenset(i for place in mode.keeps if (i := ids[place]) is not None))
            for mode in found.modes
        )
        return replace(found, name=code.name, modes=modes), growth

    def replay(self, index: int, values: dict[str, Any]) -> Replay:
        """A step that has come as far as this stage."""
        script = Script(self.staged.stages, self.recipes, self.staged.states, self.staged.differentiable, ())
        replay = Replay(script)
        replay._reached = index
        replay._present = dict(values)
        return replay

    def _tight_stage(self, index: int, values: dict[str, Any]) -> Stage:
        """There is no room to compute it as it is written: that is done with a part of the images.

        Of its modes only the last is measured as it will be; the others are foreseen from the part.
        """
        part = {name: _top_rows(value) for name, value in values.items()}
        found = self._stage(index, part)
        whole = self._stage(index, values, last_of=len(found.modes))
        times = _rows(values) / _rows(part)
        return replace(whole, modes=(*(_times(mode, times) for mode in found.modes[:-1]), *whole.modes))

    def _stage(self, index: int, values: dict[str, Any], last_of: int | None = None) -> Stage:
        """`last_of`: how many modes give the same bits, if that is known; then only the last is measured."""
        first, same = 0, last_of or 0
        if last_of is not None:
            first = last_of - 1
        elif self.keeping is None:
            same = self._alike(index, values)
        first_s, again_s = [], []
        self.times()
        for _ in range(self.repeats):
            replay = self.replay(index, values)
            first_s.append(self._timed(replay._advance, index))
            replay._present = dict(values)
            again_s.append(self._timed(replay._advance, index))
            del replay
        if self.keeping is not None:
            before = self.keeping.stages[index]
            modes = tuple(self._mode(index, values, *mode) for mode in enumerate(before.modes))
            return replace(before, first_s=min(first_s), again_s=min(again_s), modes=modes)
        modes = tuple(self._mode(index, values, mode) for mode in range(first, same))
        with LiveBytes() as live:
            replay = self.replay(index, values)
            replay._advance(index)
            most = live.peak
            replay._present = {}
            noted_bytes = live.now()
            del replay
        extra = _work_space(most, self.replay(index, values)._advance, index) if self.resident else 0
        return Stage("", min(first_s), min(again_s), most - noted_bytes + extra, noted_bytes, modes)

    def _mode(self, index: int, values: dict[str, Any], mode: int, known: Mode | None = None) -> Mode:
        first_s, again_s, backward_s = [], [], []
        self.times()
        for _ in range(self.repeats):
            replay = self.replay(index, values)
            first_s.append(self._timed(replay._tape, index, False, mode))
            replay._present = dict(values)
            again_s.append(self._timed(replay._tape, index, False, mode))
            self._give_gradients(index, replay)
            backward_s.append(self._timed(replay._back, index))
            del replay
        found = known or self._bytes(index, values, mode)
        blind_s = 0.0 if self.recipes[index].sees_blind else min(again_s)
        return replace(
            found,
            first_s=min(first_s),
            again_s=min(again_s),
            blind_s=blind_s,
            backward_s=min(backward_s),
        )

    def _alike(self, index: int, values: dict[str, Any]) -> int:
        """How many modes of a stage give the bits of the model's own calls: that depends on libraries.

        If not even the first does, the stage is computed as it is written.
        """
        own, expected = self.recipes[index], None
        for mode in range(-1, own.modes):
            self.recipes[index] = AsWritten(self.staged.stages[index]) if mode < 0 else own
            replay = self.replay(index, values)
            replay._tape(index, blind=False, mode=max(0, mode))
            self._give_gradients(index, replay)
            replay._back(index)
            weights = self.staged.stages[index].weights
            given = [*replay._gradients.values(), *(w.grad for w in weights if w.grad is not None)]
            found = [_fingerprint(tensor) for tensor in given]  # to hold the tensors could be too much
            self._clear_gradients(weights)
            del replay, given
            if expected is None:
                expected = found
            elif expected != found:
                if mode == 0:
                    self.recipes[index] = AsWritten(self.staged.stages[index])
                return max(1, mode)
        return own.modes

    def _growth(self, index: int, values: dict[str, Any], stage: Stage) -> Growth:
        """By how much the process grows, with no freed memory before; none is kept, or all."""
        if self.keeping is None:
            weights = {w for w in self.staged.stages[index].weights if w.requires_grad}
            slopes = sum(weight.nbytes for weight in weights)  # which planning counts apart
            taped_bytes = tuple(mode.taped_bytes for mode in stage.modes)
            backward_bytes = tuple(mode.backward_bytes + slopes for mode in stage.modes)
            return Growth(stage.forward_bytes + stage.noted_bytes, taped_bytes, backward_bytes)
        forward = _grown(self.replay(index, values)._advance, index)
        taped, backward = [], []
        for mode in range(len(stage.modes)):
            replay = self.replay(index, values)
            taped.append(_grown(replay._tape, index, False, mode))
            self._give_gradients(index, replay)
            backward.append(_grown(replay._back, index))
            self._clear_gradients(self.staged.stages[index].weights)
        return Growth(forward, tuple(taped), tuple(backward))

    def _timed(self, work: Callable[..., None], *args: Any) -> float:
        """Seconds of the clock where a process is fitted; else of the processor, which hears no noise."""
        clock = time.perf_counter if self.resident else time.process_time
        started = clock()
        work(*args)
        return clock() - started

    def times(self) -> None:
        if self.keeping is not None:
            keep_freed_memory()

    def _give_gradients(self, index: int, replay: Replay) -> None:
        for name in self.staged.stages[index].makes:  # others would only be held, or added to
            if name in self.staged.differentiable:
                like = replay._present[name]
                fixed = torch.Generator().manual_seed(0)
                replay._gradients[name] = torch.empty_like(like).uniform_(-1, 1, generator=fixed)
        replay._present = {}

    def _bytes(self, index: int, values: dict[str, Any], mode: int) -> Mode:
        """What is alive at most, taped and backward; and what is kept, as places among the names."""
        code = self.staged.stages[index]
        with LiveBytes() as live:
            replay = self.replay(index, values)
            kept: list[Tensor] = []

            def keep(tensor: Tensor) -> Tensor:
                kept.append(tensor.detach())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                replay._tape(index, blind=False, mode=mode)
            taped_bytes = live.peak
            places = [values.get(name, replay._present.get(name)) for name in (*code.reads, *code.makes)]
            keeps, own_bytes = _sorted_out(kept, places, code.modules)
            del places
            kept.clear()
            self._give_gradients(index, replay)
            weights = set(code.weights)
            self._lay_gradients(weights)
            start = live.begin()
            replay._back(index)
            most = live.peak - start
            own = [weight.grad for weight in weights if weight.grad is not None and self.resident]
            backward_bytes = live.peak_without(own) - start
            self._clear_gradients(weights)
            del replay, own
        if self.resident:
            replay = self.replay(index, values)
            taped_bytes += _work_space(taped_bytes, replay._tape, index, False, mode)
            self._give_gradients(index, replay)
            backward_bytes += _work_space(most, replay._back, index)
            self._clear_gradients(weights)
        return Mode(keeps, own_bytes, taped_bytes, max(0, backward_bytes), 0, 0, 0, 0)

    def _lay_gradients(self, weights: Iterable[Tensor]) -> None:
        """Where tensors are counted, gradients are there already, as they are if they are added up."""
        for weight in weights:
            weight.grad = None if self.resident else torch.zeros_like(weight)

    def _clear_gradients(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            weight.grad = None


def _top_rows(value: Any) -> Any:
    """Of images, a quarter of the rows; of small ones more."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    return value[:, :, : max(PART_ROWS, value.shape[2] // PARTS)].contiguous()


def _rows(values: dict[str, Any]) -> int:
    return max(v.shape[2] for v in values.values() if isinstance(v, Tensor) and v.dim() == 4)


def _times(mode: Mode, factor: float) -> Mode:
    """What it would take of an image so many times as large."""
    seconds = (mode.first_s, mode.again_s, mode.blind_s, mode.backward_s)
    sizes = (mode.own_bytes, mode.taped_bytes, mode.backward_bytes)
    return Mode(mode.keeps, *(int(factor * size) for size in sizes), *(factor * each for each in seconds))


def _fingerprint(tensor: Tensor) -> str:
    digest = hashlib.blake2b()
    for part in tensor.split(1) if tensor.dim() else (tensor,):
        digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _work_space(tensors_bytes: int, work: Callable[..., None], *args: Any) -> int:
    """Bytes that the process has at most while it works, beyond those of tensors."""
    return_freed_memory()
    return max(0, _growth(work, *args) - tensors_bytes)


def _grown(work: Callable[..., None], *args: Any) -> int:
    return_freed_memory()
    keep_freed_memory()
    return _growth(work, *args)


def _growth(work: Callable[..., None], *args: Any) -> int:
    before = current_memory()
    forget_peak()
    work(*args)
    return peak_memory() - before


def _sorted_out(
    kept: Sequence[Tensor], places: Sequence[Any], modules: Sequence[nn.Module]
) -> tuple[frozenset[int], int]:
    """Which of the named values are among what is kept, and the bytes of others that are no weights."""
    memories = [p.untyped_storage()._cdata if isinstance(p, Tensor) else None for p in places]
    weights = {t.untyped_storage()._cdata for m in modules for t in (*m.parameters(), *m.buffers())}
    found, other = set(), {}
    for tensor in kept:
        storage = tensor.untyped_storage()
        if storage._cdata in memories:
            found.add(memories.index(storage._cdata))
        elif storage._cdata not in weights:
            other[storage._cdata] = storage.nbytes()
    return frozenset(found), sum(other.values())


def measure(
    staged: Staged,
    recipes: list[Recipe],
    example: Sequence[Tensor],
    model: nn.Module,
    repeats: int = REPEATS,
    *,
    resident: bool,
    keeping: Chain | None = None,
    before: Callable[[int], bool] = lambda stage: False,
) -> tuple[Chain, tuple[Growth, ...]]:
    """A chain with the times and bytes of this machine. The model is left as it was found.

    `resident`: bytes are those of the process, so that the work space of torch's libraries is among them;
    otherwise of tensors only. `keeping`: a chain so measured, of which only the times are measured anew,
    with freed memory kept. With the chain comes by how much the process grows. `before` is called before
    each stage, and says whether there is too little room to compute it as it is written.
    """
    meter = _Meter(staged, recipes, repeats, resident, keeping, {})
    stages, growths = [], []
    with untouched(model):
        values: dict[str, Any] = dict(zip(staged.inputs, example, strict=True))
        for index in range(len(staged.stages)):
            stage, growth = meter.measure(index, values, tight=before(index))
            stages.append(stage)
            growths.append(growth)
            replay = meter.replay(index, values)
            values = {}
            replay._advance(index)
            values = replay._present
            del replay
    if keeping is not None:
        return replace(keeping, stages=tuple(stages)), tuple(growths)
    # Results and their gradients are held by whoever calls the model: that is the process's, not a stage's.
    return _chain(staged, stages, staged.unread if resident else frozenset()), tuple(growths)


def _with_times(stage: Stage, other: Stage) -> Stage:
    """The bytes of one and the seconds of another."""
    modes = tuple(
        replace(m, first_s=o.first_s, again_s=o.again_s, blind_s=o.blind_s, backward_s=o.backward_s)
        for m, o in zip(stage.modes, other.modes, strict=True)
    )
    return replace(stage, first_s=other.first_s, again_s=other.again_s, modes=modes)


def _chain(staged: Staged, stages: Sequence[Stage], apart: frozenset[int]) -> Chain:
    """`apart`: memory that is counted elsewhere, gradients too."""
    numbers = {memory: n for n, memory in enumerate(dict.fromkeys(staged.memory.values()))}
    sizes = tuple(0 if memory in apart else staged.memory_bytes[memory] for memory in numbers)
    with_gradient = {staged.memory[n] for n in staged.differentiable if n in staged.memory} - apart
    gradients = tuple(
        size if memory in with_gradient else 0 for memory, size in zip(numbers, sizes, strict=True)
    )
    states = tuple(
        frozenset(numbers[staged.memory[name]] for name in state if name in staged.memory)
        for state in staged.states
    )
    renumbered = tuple(
        replace(
            stage,
            modes=tuple(
                replace(mode, keeps=frozenset(numbers[m] for m in mode.keeps)) for mode in stage.modes
            ),
        )
        for stage in stages
    )
    return Chain(sizes, gradients, renumbered, states)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and the random stream are afterwards as they were. Hooks of weights do not run."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    random = torch.get_rng_state()
    hooks = [(each, dict(each)) for weight, _ in gradients for each in _hooks(weight)]
    for weight, _ in gradients:
        weight.grad = None
    for each, _ in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, whole in hooks:
            each.update(whole)
        for weight, gradient in gradients:
            weight.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(random)


def _hooks(weight: Any) -> list[dict[int, Any]]:
    return [hooks for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks) if hooks]
