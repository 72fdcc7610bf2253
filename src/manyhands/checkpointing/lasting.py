"""What a process holds from step to step, and results: bytes that no schedule can spare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import RequestError
from manyhands.tracing.fx import first_line
from manyhands.tracing.stages import Staged


def later_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Gradients and the optimiser's state, as far as they are not there yet."""
    missing = (w for w in model.parameters() if w.requires_grad and w.grad is None)
    gradients = sum(weight.numel() * weight.element_size() for weight in missing)
    return gradients + state_bytes(model, optimizer)


def result_bytes(staged: Staged) -> int:
    """Results and their gradients, which are there from the end of forward to that of backward."""
    with_gradient = {staged.memory[n] for n in staged.differentiable if n in staged.memory}
    both = (staged.given_away, staged.given_away & with_gradient)
    return sum(staged.memory_bytes[memory] for memories in both for memory in memories)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """What the optimiser keeps from its first step on, of weights of which it has nothing yet."""
    if optimizer is None:  # as SGD with momentum
        return sum(w.numel() * w.element_size() for w in model.parameters() if w.requires_grad)
    return sum(
        int(_copies(optimizer, group) * weight.numel() * weight.element_size())
        for group in optimizer.param_groups
        for weight in group["params"]
        if weight.requires_grad and weight not in optimizer.state
    )


def _copies(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    """How many times a weight's own size an optimiser keeps of it, asked of one that has a small weight."""
    weight = nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.zeros(8, 8)
    settings = {key: value for key, value in group.items() if key != "params"}
    kind: Any = type(optimizer)
    try:
        twin = kind([{"params": [weight], **settings}])
        twin.step()
    except Exception as error:  # it wants a closure, or other arguments
        raise RequestError(
            f"what {kind.__name__} will keep cannot be asked for ({first_line(error)}). Fit without an "
            "optimizer, with as much memory less as it keeps beyond SGD with momentum."
        ) from None
    kept = [value for value in twin.state[weight].values() if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in kept if value.numel() > 1) / 256
