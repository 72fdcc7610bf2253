"""Statistics of a shortcut travel while the way beside it is computed, and are waited for along with its."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from manyhands.ir.graph import Graph
from manyhands.ir.program import Backward, Content, Forward, Program, Receive, Send
from manyhands.planning.checking import check
from manyhands.planning.lowering import lower
from manyhands.planning.strategies import plan_by_name
from manyhands.tracing.graphs import trace


class Block(nn.Module):
    """As ResNets have it: the shortcut is written last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.short = nn.Conv2d(3, 4, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.norms[0](self.first(images)))
        inner = self.norms[1](self.second(inner))
        return torch.relu(inner + self.norms[2](self.short(images)))


class Twice(nn.Module):
    """One norm is called twice, and before another norm the second time: it must not be moved up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.shared, self.last = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        early = self.first(images)
        return torch.relu(self.shared(self.second(early))) + self.last(self.shared(early))


def block() -> Graph:
    return trace(Block(), [torch.empty(4, 3, 8, 8)]).graph


def forwards(program: Program) -> list[tuple[str, ...]]:
    return [step.layers for step in program.steps if isinstance(step, Forward)]


def test_a_shortcut_is_computed_before_the_first_wait() -> None:
    graph = block()
    found = lower(graph, plan_by_name(graph, ("a", "b"), "batch"))
    check(found)
    first = found.programs[0]
    computed = forwards(first)
    assert [set(layers) & {"first", "second", "short"} for layers in computed] == [
        {"first", "short"},
        {"second"},
        set(),
    ]
    assert {"norms.1", "norms.2"} <= set(computed[2])
    steps = list(first.steps)

    def place(kind: type[Send] | type[Receive], layer: str) -> int:
        return next(
            number
            for number, step in enumerate(steps)
            if isinstance(step, kind)
            and step.message.content is Content.MOMENTS
            and step.message.layer == layer
        )

    second = next(n for n, s in enumerate(steps) if isinstance(s, Forward) and "second" in s.layers)
    assert place(Send, "norms.2") < second < place(Receive, "norms.2")
    assert sum(isinstance(step, Backward) for step in steps) == 3


def test_a_norm_that_is_called_twice_follows_both_batches_in_their_order() -> None:
    """Its running statistics depend on that."""
    graph = trace(Twice(), [torch.empty(4, 3, 8, 8)]).graph
    uses = [
        layer.name for layer in graph.layers if any(p.name.startswith("shared.") for p in layer.parameters)
    ]
    for name in ("batch", "rows"):
        found = lower(graph, plan_by_name(graph, ("a", "b"), name))
        check(found)
        for program in found.programs:
            names = [layer for layers in forwards(program) for layer in layers]
            assert len(uses) == 2 and [each for each in names if each in uses] == uses


def test_what_is_computed_again_keeps_its_order() -> None:
    graph = block()
    plan = plan_by_name(graph, ("a", "b"), "batch")
    plan = replace(plan, segments=tuple(replace(segment, redo=4) for segment in plan.segments))
    found = lower(graph, plan)
    check(found)
    names = [name for layers in forwards(found.programs[0]) for name in layers]
    assert names == [layer.name for layer in graph.layers if layer.name in names]


def test_one_device_waits_for_nobody() -> None:
    graph = block()
    found = lower(graph, plan_by_name(graph, ("a",), "single"))
    assert len(forwards(found.programs[0])) == 1
