"""What is said to be kept of a model for backward is what torch really keeps of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands
from manyhands.ir.codec import graph_digest
from manyhands.ir.program import Forward
from manyhands.planning.holding import Holding
from manyhands.planning.ledger import Ledger
from manyhands.planning.passes import NODE_BYTES


class Model(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, *between: nn.Module, then: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.between, self.then = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*between), then
        self.last = nn.LazyConv2d(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.then(self.between(self.first(x))))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Model(nn.BatchNorm2d(8), nn.ReLU()),
    "relu in place": lambda: Model(nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    "relu6 in place": lambda: Model(nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
    "silu": lambda: Model(nn.SiLU(), nn.Conv2d(8, 8, 3)),
    "hard swish in place": lambda: Model(nn.BatchNorm2d(8), nn.Hardswish(inplace=True)),
    "max pool": lambda: Model(nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    "average pool": lambda: Model(nn.ReLU(), nn.AvgPool2d(2)),
    "shortcut": lambda: Model(nn.BatchNorm2d(8), then=lambda x: F.relu(x) + x),
    "product": lambda: Model(nn.Sigmoid(), then=lambda x: x * x.sigmoid()),
    "joined": lambda: Model(nn.ReLU(), then=lambda x: torch.cat([x, x.tanh()], 1)),
    "view": lambda: Model(nn.ReLU(), then=lambda x: x.flatten(2).unflatten(2, (16, 16))),
    "group norm": lambda: Model(nn.GroupNorm(2, 8), nn.GELU()),
}
X = torch.randn(2, 3, 16, 16)


def kept_by_torch(model: nn.Module) -> int:
    """Bytes of all tensors that a plain forward keeps, but for weights."""
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(X)
    kept[output.untyped_storage()._cdata] = output
    kept[X.untyped_storage()._cdata] = X
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_to_be_kept_is_kept(name: str) -> None:
    model = MODELS[name]()
    model(X)
    traced = manyhands.trace(model, X)
    lowered = manyhands.lower(traced.graph, manyhands.plan(traced.graph, 1, "single"))
    territory = lowered.territory("device-0")
    holding = Holding(lowered, "device-0", territory, Ledger(), channels_last=False)
    holding.begin(optimiser_slots=0.0, optimiser_copies=0.0)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    (forward,) = (step for step in lowered.program("device-0").steps if isinstance(step, Forward))
    holding.step(forward)
    found = holding.ledger.alive - weights - NODE_BYTES * len(forward.layers)
    alike = MODELS["relu in place"]() if name == "relu6 in place" else model  # torch copies, this does not
    alike(X)
    assert found == pytest.approx(kept_by_torch(alike), rel=0.02)


def test_the_digest_of_a_graph_does_not_depend_on_what_is_kept() -> None:
    model = MODELS["max pool"]()
    model(X)
    graph = manyhands.trace(model, X).graph
    unasked = replace(graph, layers=tuple(replace(layer, saved=None) for layer in graph.layers))
    assert graph != unasked
    assert graph_digest(graph) == graph_digest(unasked)
    assert graph_digest(graph) == graph_digest(manyhands.trace(model.double(), X.double()).graph)


def test_tracing_lets_go_of_the_weights() -> None:
    """A device cuts its pieces out of a model; the rest has to go."""
    model = MODELS["relu"]()
    model(X)
    weight = weakref.ref(model.first.weight)
    traced = manyhands.trace(model, X)
    del model
    gc.collect()
    assert traced.functions and weight() is None
