"""Runs a model by a schedule: some stages forward more than once, and backward stage by stage.

What a stage changes besides its result (running statistics, counters, the stream of random numbers) changes
the first time only, and later times find it as the first time did. The gradient of a result belongs to
autograd alone while a stage runs backward, so that it is freed as soon as it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from manyhands.errors import RunError
from manyhands.ir.schedule import Action, Advance, Back, Restore, Store, Tape
from manyhands.runtime.allocator import Room
from manyhands.runtime.recipes import Convolution, Norm, Pool
from manyhands.runtime.shelf import Parcel
from manyhands.runtime.stages import Code, Notes, Order, Recipe, Values
from manyhands.runtime.tape import Box, Root, Source


@dataclass(frozen=True)
class Growth:
    """By how many bytes a process grows in a stage; by mode, taped and backward."""

    forward: int
    taped: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Script:
    """Stages, how each is computed, and the schedule by which they are run."""

    stages: Sequence[Code]
    recipes: Sequence[Recipe]
    states: Sequence[tuple[str, ...]]
    differentiable: frozenset[str]
    actions: tuple[Action, ...]
    growths: Sequence[Growth] = ()  # of each stage, for which room is made
    room: Room | None = None
    batch: int | None = None  # for which modes were compared to the bit
    directory: Path | None = None  # for states on disk


@dataclass
class _Taped:
    """A stage's graph: where gradients of results go in, and where those of what it read come out."""

    mode: int
    roots: list[tuple[str, Tensor, Box]] = field(default_factory=list)
    sources: dict[str, Box] = field(default_factory=dict)


@dataclass
class _Before:
    """What a stage found the first time."""

    buffers: list[tuple[nn.Module, str, Tensor]]
    random: Tensor | None


class Replay:
    """One step of a model forward and backward."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._left = iter(script.actions)
        self._present: Values = {}
        self._stored: dict[int, Values | Parcel] = {}
        self._held: set[int] = set()  # memory of inputs and weights, which is there anyway
        self._taped: dict[int, _Taped] = {}
        self._before: dict[int, _Before] = {}
        self._notes = [Notes() for _ in script.stages]
        self._given: list[Tensor] = []  # gradients that are not ours
        self._versions: list[tuple[Any, int]] = []
        self._smaller = False
        self._gradients: dict[str, Tensor] = {}
        self._anchor = torch.empty((), requires_grad=True)
        self._reached = 0  # stages that were run at least once

    def forward(self, inputs: Values) -> Values:
        """Up to the results."""
        if self._script.room is not None:
            self._script.room.enter()
        self._present = dict(inputs)
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        weights = [tensor for code in self._script.stages for tensor in (*code.weights, *code.constants)]
        self._held = {tensor.untyped_storage()._cdata for tensor in (*tensors, *weights)}
        self._smaller = any(len(t) != self._script.batch for t in tensors if t.dim())
        while self._reached < len(self._script.stages):
            self._act(next(self._left))
        results = [value for value in self._present.values() if isinstance(value, Tensor)]
        self._versions = [(ref(t), t._version) for t in (*tensors, *weights, *results)]
        return self._present

    def backward(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rest. Gradients of weights are added to theirs; those of the inputs come back."""
        if not self._taped:
            raise RunError("backward a second time: what it needs was let go. Call the model once more.")
        if any(t is not None and t._version != old for t, old in ((r(), v) for r, v in self._versions)):
            raise RunError(
                "an input, a weight or a result was changed in place between forward and backward, which "
                "computes with it once more. Change it after backward."
            )
        self._present = {}
        self._gradients, self._given = gradients, list(gradients.values())
        try:
            with torch.enable_grad(), _added_at_the_end(self._script.stages):
                for action in self._left:
                    self._act(action)
        finally:
            found, self._gradients = self._gradients, {}
            self._taped, self._stored, self._present, self._given = {}, {}, {}, []
            if self._script.room is not None:
                self._script.room.leave()
        return found

    def _act(self, action: Action) -> None:
        match action:
            case Store(state, disk):
                self._stored[state] = self._shelved(self._present) if disk else self._present
            case Restore(state, last):
                self._present = self._fetched(self._stored.pop(state))
                if not last:
                    self._stored[state] = self._present
            case Advance(start, stop):
                for stage in range(start, stop):
                    self._advance(stage)
                written = self._stored.get(start)
                if isinstance(written, Parcel):
                    written.settle()
            case Tape(stage, blind, mode):
                self._tape(stage, blind, mode)
            case Back(stage):
                self._back(stage)

    def _shelved(self, values: Values) -> Parcel:
        assert self._script.directory is not None, "a schedule with a disk needs a directory"
        return Parcel(values, self._script.directory, self._held)

    def _fetched(self, stored: Values | Parcel) -> Values:
        if not isinstance(stored, Parcel):
            return stored
        if self._script.room is not None:
            self._script.room.make(stored.num_bytes)
        return stored.take()

    def _advance(self, stage: int) -> None:
        code = self._script.stages[stage]
        if self._script.room is not None:
            self._script.room.make(self._script.growths[stage].forward)
        values = {name: self._present[name] for name in code.reads}
        self._present = self._carried(stage)
        with torch.no_grad():
            self._present |= self._made(stage, values, Order(taped=False))

    def _carried(self, stage: int) -> Values:
        """What of the present state is still there after a stage."""
        after = self._script.states[stage + 1]
        return {name: value for name, value in self._present.items() if name in after}

    def _tape(self, stage: int, blind: bool, mode: int = 0) -> None:
        code, taped = self._script.stages[stage], _Taped(mode)
        if self._smaller and isinstance(self._script.recipes[stage], Convolution):
            mode = 0  # its other mode was compared for whole batches
        order = Order(True, mode, blind, {name: Box() for name in code.makes})
        if self._script.room is not None and not (blind and self._script.recipes[stage].sees_blind):
            self._script.room.make(self._script.growths[stage].taped[mode])
        with torch.enable_grad():
            values = {name: self._source(taped, name) for name in code.reads}
            carried = self._carried(stage)
            once = isinstance(self._script.recipes[stage], Convolution | Norm | Pool)  # and not several times
            again = {name: values[name] for name in carried if name in taped.sources and not once}
            self._present = {}  # what nobody needs any more is freed while the stage runs
            made = self._made(stage, values, order)
            for name, value in (*made.items(), *again.items()):
                if isinstance(value, Tensor) and value.requires_grad:
                    box = order.boxes.setdefault(name, Box())
                    taped.roots.append((name, Root.apply(value, box), box))
        self._taped[stage] = taped
        if not blind:
            self._present = carried | {name: _bare(value) for name, value in made.items()}

    def _source(self, taped: _Taped, name: str) -> Any:
        value = self._present[name]
        if name not in self._script.differentiable:
            return value
        box = taped.sources[name] = Box()
        return Source.apply(self._anchor, value, box)

    def _back(self, stage: int) -> None:
        taped = self._taped.pop(stage)
        if self._script.room is not None:
            self._script.room.make(self._script.growths[stage].backward[taped.mode])
        starts = []
        for name, root, box in taped.roots:
            box.tensor = self._gradients.pop(name, None)
            if box.tensor is not None:
                box.alone = self._is_alone(box.tensor)
                starts.append(root)
        taped.roots.clear()
        if starts:
            torch.autograd.backward(starts)
        for name, box in taped.sources.items():
            gradient = box.take()
            if gradient is not None:
                self._add(name, gradient)

    def _add(self, name: str, gradient: Tensor) -> None:
        """One read in this stage, others later: in the order and so with the bits of autograd."""
        later = self._gradients.get(name)
        if later is None:
            self._gradients[name] = gradient
            return
        del self._gradients[name]
        alone = self._is_alone(later)
        self._gradients[name] = later.add_(gradient) if alone else later + gradient

    def _is_alone(self, gradient: Tensor) -> bool:
        """May it be overwritten? It has its memory for itself, and fills it, as autograd asks for, too.

        Both sides of an addition have one gradient; those of what was concatenated are parts of one.
        """
        storage = gradient.untyped_storage()
        if storage.nbytes() != gradient.numel() * gradient.element_size() or _is_viewed(storage):
            return False
        others = (*self._gradients.values(), *self._given)
        return all(other.untyped_storage()._cdata != storage._cdata for other in others)

    def _made(self, stage: int, values: Values, order: Order) -> Values:
        """What a stage makes. If it draws nothing, and changes buffers the first time only, that is all."""
        recipe, notes = self._script.recipes[stage], self._notes[stage]
        if not recipe.is_settled(values):
            with self._as_the_first_time(stage):
                return recipe.run(values, notes, order)
        made = recipe.run(values, notes, order)
        self._reached = max(self._reached, stage + 1)
        return made

    @contextmanager
    def _as_the_first_time(self, stage: int) -> Iterator[None]:
        """Changes of buffers and of the random stream are real the first time, and undone at others."""
        modules = self._script.stages[stage].modules
        if stage == self._reached:
            buffers = [(m, n, b.clone()) for m, n, b in _buffers(modules)]
            start = torch.get_rng_state()
            yield
            drawn = not torch.equal(start, torch.get_rng_state())
            self._before[stage] = _Before(buffers, start if drawn else None)
            self._reached += 1
            return
        before = self._before[stage]
        real = [(m, n, b) for m, n, b in _buffers(modules)]
        for module, name, buffer in before.buffers:
            module._buffers[name] = buffer.clone()
        present = None if before.random is None else torch.get_rng_state()
        if before.random is not None:
            torch.set_rng_state(before.random)
        try:
            yield
        finally:
            for module, name, buffer in real:
                module._buffers[name] = buffer
            if present is not None:
                torch.set_rng_state(present)


def _is_viewed(storage: torch.UntypedStorage) -> bool:
    """Does another tensor lie in this memory, such as a weight's gradient that is a view of it?"""
    holders = torch._C._storage_Use_Count(storage._cdata)
    return bool(holders > 2)  # the tensor, and this object


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _buffers(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in modules:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    yield inner, name, buffer


@contextmanager
def _added_at_the_end(stages: Sequence[Code]) -> Iterator[None]:
    """A weight of several stages: torch adds up their gradients first, and adds that to what was there."""
    seen: set[Tensor] = set()
    shared: set[Tensor] = set()
    for stage in stages:
        weights = set(stage.weights)
        shared |= weights & seen
        seen |= weights
    earlier = {weight: weight.grad for weight in shared if weight.grad is not None}
    for weight in earlier:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in earlier.items():
            weight.grad = gradient if weight.grad is None else gradient.add_(weight.grad)


class _Boundary(Function):
    """A whole step as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, replay: Replay, names: Any, outcome: Any, *inputs: Any) -> Any:
        ctx.replay, ctx.names, ctx.inputs = replay, outcome, names
        ctx.set_materialize_grads(False)
        values = replay.forward(dict(zip(names, inputs, strict=True)))
        # Not the very tensors that the schedule goes on with: theirs would be the history of a whole step.
        results = tuple(_bare(values[name]) for name in outcome)
        ctx.mark_non_differentiable(
            *(v for n, v in zip(outcome, results, strict=True) if n not in replay._script.differentiable)
        )
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = {n: g for n, g in zip(ctx.names, gradients, strict=True) if g is not None}
        found = ctx.replay.backward(given)
        return None, None, None, None, *(found.get(name) for name in ctx.inputs)


def run(script: Script, inputs: Values, results: tuple[str, ...]) -> Values:
    """The results of a model, by name; whoever calls backward on them runs the rest of the schedule."""
    anchor = torch.empty((), requires_grad=True)
    tensors = tuple(dict.fromkeys(results))
    found = _Boundary.apply(anchor, Replay(script), tuple(inputs), tensors, *inputs.values())
    return dict(zip(tensors, found, strict=True))
