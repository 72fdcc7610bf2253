"""Memory against time: our schedules and torch's own ways, each after a plain step, in one thread.

Memory is the most bytes of tensors at once that a step makes, without weights and their gradients; of code
that torch.compile made, by how much the process grows at most, since its tensors cannot be followed. Time is
that of the processor. Both are parts of what plain training takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._functorch.config as functorch_config
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from manyhands.benches import rotor
from manyhands.checkpointing.measuring import measure
from manyhands.checkpointing.tracking import most_alive
from manyhands.loading import load_model
from manyhands.planning.checkpoints import Table as Schedules
from manyhands.runtime.allocator import trim
from manyhands.runtime.process import current_memory, forget_peak, peak_memory
from manyhands.runtime.recipes import recipe_for
from manyhands.runtime.replaying import Script
from manyhands.runtime.replaying import run as replay
from manyhands.tracing.stages import result_names, staged

BATCH, SIZE = 4, 224
# What has to be reached: (part of plain memory, times as long).
TARGETS: dict[str, tuple[tuple[float, float], ...]] = {
    "resnet18": ((0.53, 1.20),),
    "resnet50": ((0.30, 1.30), (0.20, 1.40)),
    "resnet101": ((0.20, 1.30),),
}
OURS, THEIRS, COMPILED, ROTOR = "manyhands", "checkpoint_sequential", "torch.compile", "rotor"
COMPILED_BUDGETS = (0.7, 0.4, 0.1)  # of what it would keep


@dataclass(frozen=True, slots=True)
class Point:
    """One way to train: what it takes, as parts of plain training."""

    who: str
    what: str
    memory: float
    time: float
    exact: bool  # gradients and running statistics are those of plain training, to the bit
    room: float | None = None  # the memory that it may take
    limit: float | None = None  # of time, where something has to be reached
    rival: float | None = None  # the time of the peer that needs as much memory

    @property
    def within(self) -> bool:
        return self.fits and self.is_quick and (self.who != OURS or self.exact)

    @property
    def fits(self) -> bool:
        return self.room is None or self.memory <= self.room

    @property
    def is_quick(self) -> bool:
        return all(bound is None or self.time <= bound for bound in (self.limit, self.rival))


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    plain_bytes: int
    plain_s: float
    points: tuple[Point, ...]
    unreached: tuple[str, ...]  # memory with which there is no schedule

    @property
    def within(self) -> bool:
        return not self.unreached and all(point.within for point in self.points)


Step = Callable[[], None]
Tell = Callable[[str], None]


class _Track:
    """A network, its images, and what a step of plain training makes of them."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = load_model(name).train()
        self.images = torch.randn(BATCH, 3, SIZE, SIZE)
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.expected = self.outcome(self.plain)
        self.plain_bytes = self.bytes_of(self.plain)

    def plain(self) -> None:
        self.model(self.images).sum().backward()

    def outcome(self, step: Step) -> list[Tensor]:
        self.model.load_state_dict(self.state)
        for weight in self.model.parameters():
            weight.grad = None
        step()
        gradients = [weight.grad.clone() for weight in self.model.parameters() if weight.grad is not None]
        return gradients + [buffer.clone() for buffer in self.model.buffers()]

    def is_exact(self, step: Step) -> bool:
        found = self.outcome(step)
        return all(torch.equal(one, two) for one, two in zip(self.expected, found, strict=True))

    def bytes_of(self, step: Step) -> int:
        return most_alive(step, self.model.parameters())

    def peers(self) -> Iterator[tuple[str, Step]]:
        """By the number of segments, all that can be."""
        parts = _in_a_row(self.model)

        def steps(segments: int) -> Step:
            def step() -> None:
                result = checkpoint_sequential(parts, segments, self.images, use_reentrant=False)
                result.sum().backward()

            return step

        yield from ((f"{segments} segments", steps(segments)) for segments in range(2, len(parts) + 1))

    def by_rotor(self, module: Any) -> Iterator[tuple[str, Step]]:
        """If it is there."""
        if module is not None:
            yield from rotor.steps(module, _in_a_row(self.model), self.images)

    def compiled(self, budget: float) -> Step:
        """By torch.compile, which may keep a part of what it would."""
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=budget):
            module = torch.compile(self.model)

            def step() -> None:
                module(self.images).sum().backward()

            step()  # it is compiled with the first step
        return step

    def grown_bytes(self, step: Step) -> int:
        """By how much the process grows in a step, from when all that is free went back."""
        step()
        trim()
        before = current_memory()
        forget_peak()
        step()
        return peak_memory() - before

    def ours(self) -> Callable[[int], Step | None]:
        """A step within so many bytes, if there is one."""
        cut = staged(self.model, [self.images])
        recipes = [recipe_for(code) for code in cut.stages]
        chain, _ = measure(cut, recipes, [self.images], self.model, resident=False)
        names = result_names(cut.results)

        def within(num_bytes: int) -> Step | None:
            found = Schedules(chain, num_bytes).plan(num_bytes)
            if found is None:
                return None
            script = Script(cut.stages, recipes, cut.states, cut.differentiable, found.actions)

            def step() -> None:
                values = replay(script, {cut.inputs[0]: self.images}, names)
                values[names[0]].sum().backward()

            return step

        return within


def _in_a_row(model: nn.Module) -> nn.Sequential:
    """A ResNet as checkpoint_sequential takes it: stem, blocks and head, one after another.

    The stem's activation works in place, so torch cannot cut before it.
    """
    parts: list[nn.Module] = [nn.Sequential()]
    for child in model.children():
        if isinstance(child, nn.Sequential):
            parts += list(child)
        elif isinstance(child, nn.Linear):
            parts.append(nn.Sequential(nn.Flatten(), child))
        elif isinstance(child, nn.Conv2d | nn.BatchNorm2d | nn.ReLU):
            parts[0].append(child)  # type: ignore[operator]
        else:
            parts.append(child)
    return nn.Sequential(*parts)


def run(
    models: tuple[str, ...], rounds: int, compiled: bool, rotor_at: Path | None, tell: Tell
) -> tuple[Result, ...]:
    torch.set_num_threads(1)
    module = None if rotor_at is None else rotor.imported(rotor_at)
    return tuple(_race(name, rounds, compiled, module, tell) for name in models)


def _race(name: str, rounds: int, compiled: bool, rotor_module: Any, tell: Tell) -> Result:
    tell(f"{name}: measuring stages")
    track = _Track(name)
    within = track.ours()
    steps: dict[str, Step] = {}
    points: dict[str, Point] = {}

    def add(who: str, what: str, step: Step, part: float | None = None) -> str:
        key = f"{who} {what}"
        steps[key] = step
        part = part or track.bytes_of(step) / track.plain_bytes
        points[key] = Point(who, what, part, 0.0, track.is_exact(step))
        return key

    def add_ours(what: str, room: float, limit: float | None = None, rival: str | None = None) -> None:
        step = within(int(room * track.plain_bytes))
        if step is None:
            unreached.append(what)
            return
        key = add(OURS, what, step)
        points[key] = replace(points[key], room=room, limit=limit)
        if rival is not None:
            rivals[key] = rival

    rivals: dict[str, str] = {}
    unreached: list[str] = []
    for budget in COMPILED_BUDGETS if compiled else ():
        tell(f"{name}: compiling for {budget:.0%}")
        step = track.compiled(budget)
        part = track.grown_bytes(step) / track.grown_bytes(track.plain)
        peer = add(COMPILED, f"budget {budget:g}", step, part=part)
        if part < 1:
            add_ours(f"as much as {peer}", part, rival=peer)
    for who, peers in ((THEIRS, track.peers()), (ROTOR, track.by_rotor(rotor_module))):
        lowest = 1.0
        tell(f"{name}: schedules of {who}")  # rotor takes minutes for its
        for what, step in peers:
            tell(f"{name}: memory of {who}, {what}")
            part = track.bytes_of(step) / track.plain_bytes
            if part < lowest:  # another needs no more, and computes no more a second time
                lowest = part
                peer = add(who, what, step)
                add_ours(f"as much as {peer}", part, rival=peer)
    for part, limit in TARGETS.get(name, ()):
        add_ours(f"{part:.0%}", part, limit)
    plain_s, ratios = _in_turns(track.plain, steps, rounds, tell)
    found = tuple(
        replace(point, time=ratios[key], rival=ratios[rivals[key]] if key in rivals else None)
        for key, point in points.items()
    )
    return Result(name, track.plain_bytes, plain_s, found, tuple(unreached))


def _in_turns(plain: Step, steps: dict[str, Step], rounds: int, tell: Tell) -> tuple[float, dict[str, float]]:
    """Seconds of a plain step, and how many times those of the one just before it each other takes."""
    ratios: dict[str, list[float]] = {key: [] for key in steps}
    plains = []
    for number in range(rounds + 1):
        for count, (key, step) in enumerate(steps.items(), start=1):
            tell(f"round {number} of {rounds}, step {count} of {len(steps)}")
            before = _seconds(plain)
            ratio = _seconds(step) / before
            if number:  # the first one warms up
                plains.append(before)
                ratios[key].append(ratio)
    return median(plains), {key: median(found) for key, found in ratios.items()}


def _seconds(step: Step) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def to_json(results: tuple[Result, ...]) -> list[dict[str, Any]]:
    return [
        asdict(result)
        | {"points": [asdict(p) | {"within": p.within} for p in result.points], "within": result.within}
        for result in results
    ]


def table(results: tuple[Result, ...]) -> Group:
    return Group(*(_table(result) for result in results))


def _table(result: Result) -> Table:
    title = f"{result.model}: plain makes {result.plain_bytes / 2**20:.1f} MiB, {result.plain_s:.2f} s a step"
    missing = f"no schedule with {', '.join(result.unreached)} (!)" if result.unreached else None
    table = Table(title=title, caption=missing)
    for heading in ("who", "how", "memory", "time", "at most", "exact"):
        table.add_column(heading, justify="left" if heading in ("who", "how") else "right")
    for point in sorted(result.points, key=lambda point: (-point.memory, point.who)):
        bounds = [bound for bound in (point.limit, point.rival) if bound is not None]
        bound = f"x{min(bounds):.2f}" if bounds else ""
        memory = f"{point.memory:.1%}{'' if point.fits else ' (!)'}"
        time = f"x{point.time:.2f}{'' if point.is_quick else ' (!)'}"
        exact = "to the bit" if point.exact else "no" if point.who != OURS else "no (!)"
        table.add_row(point.who, point.what, memory, time, bound, exact)
    return table


def panels(results: tuple[Result, ...]) -> dict[str, dict[str, tuple[tuple[float, float], ...]]]:
    """Time by memory, a panel for each network."""
    return {
        result.model: {
            who: tuple(sorted((p.memory, p.time) for p in result.points if p.who == who))
            for who in dict.fromkeys(p.who for p in result.points)
        }
        for result in results
    }
