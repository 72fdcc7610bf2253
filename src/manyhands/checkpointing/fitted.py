"""A model that was fitted: its own class with another forward, which notices what has changed since."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyhands.errors import RequestError
from manyhands.planning.checkpoints import Checkpoints
from manyhands.runtime.recipes import is_altered, is_watched
from manyhands.runtime.replaying import Script, run
from manyhands.tracing.stages import Staged, assembled, result_names


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found out about a model and a budget. Bytes are of the whole process, seconds of a step."""

    memory_bytes: int
    foreseen_bytes: int  # its peak, as a step on this device had it
    seconds: float  # without the optimiser
    plain_bytes: int  # estimated, with everything kept
    plain_s: float
    least_bytes: int  # with the smallest schedule there is
    planning_s: float
    schedule: Checkpoints
    disk_bytes: int = 0  # written in a step


class Fitted:
    """Put before a model's own class: forward by a schedule."""

    fit: Fit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        how: _How = self.__dict__["_how"]
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        how.check(cast(nn.Module, self), args, kwargs)
        values = run(how.script, dict(zip(how.staged.inputs, args, strict=True)), how.names)
        return assembled(how.staged.results, values)

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of its own weights has no schedule: it is plain."""
        twin = copy.deepcopy(self.__dict__["_how"].plain, memo)
        twin.training = cast(nn.Module, self).training
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a fitted model is of this process. Save its state_dict(), or the original model.")


@dataclass(frozen=True)
class _How:
    """By which script a fitted module runs, and what must not have changed since."""

    plain: nn.Module
    script: Script
    staged: Staged
    inputs: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    names: tuple[str, ...]
    called: frozenset[int]  # modules that are called as they are, and what is in them
    likeness: tuple[Any, ...]

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs or len(args) != len(self.inputs):
            raise RequestError(f"a fitted model takes its {len(self.inputs)} inputs by position.")
        for given, (shape, dtype, with_gradient) in zip(args, self.inputs, strict=True):
            if not isinstance(given, Tensor):
                raise RequestError(f"a fitted model takes tensors, not {type(given).__name__}.")
            if not given.is_contiguous():
                raise RequestError("a fitted model takes contiguous inputs: give images.contiguous().")
            if given.requires_grad != with_gradient:
                wanted = "with" if with_gradient else "without"
                raise RequestError(
                    f"fitted for an input {wanted} a gradient of its own (requires_grad): this differs. "
                    "Fit the original model with an example of it."
                )
            if given.shape[1:] != shape[1:] or given.dtype != dtype or given.shape[:1] > shape[:1]:
                raise RequestError(
                    f"fitted for inputs of {tuple(shape)} ({dtype}), or fewer samples; this has "
                    f"{tuple(given.shape)} ({given.dtype}). Fit the original model with an example of it."
                )
        if torch.is_autocast_enabled("cpu"):
            raise RequestError("a fitted model does not run under autocast: it was measured without.")
        if _likeness(module, self.called) != self.likeness:
            raise RequestError(
                "the model has changed since it was fitted: a module, its mode, its hooks or a number in it, "
                "or which weights are trained. Fit the original model again, in the mode in which it will be "
                "trained; to evaluate, use torch.no_grad()."
            )


def _likeness(module: nn.Module, called: frozenset[int]) -> tuple[Any, ...]:
    """Equal as long as a script holds for a model.

    Modules that are called find by themselves what they hold; of others it was found when they were traced.
    """
    held = tuple(_plain(inner) for inner in module.modules() if id(inner) not in called)
    inner = list(module.modules())[1:]
    modules = tuple((id(m), m.training, is_watched(m), is_altered(m)) for m in inner)
    weights = tuple((id(w), w.requires_grad, is_hooked(w)) for w in module.parameters())
    return module.training, modules, weights, held


def _plain(module: nn.Module) -> tuple[Any, ...]:
    """Numbers and words among a module's attributes."""
    values = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    return tuple(sorted((name, repr(value)) for name, value in values.items()))


def is_hooked(weight: nn.Parameter) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def fitted(
    model: nn.Module, script: Script, cut: Staged, inputs: tuple[Tensor, ...], facts: Fit
) -> nn.Module:
    """The model under another class, with the same weights and names."""
    twin = copy.copy(model)
    twin.__class__ = type(f"Fitted{type(model).__name__}", (Fitted, type(model)), {})
    shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in inputs)
    called = frozenset(id(inner) for code in cut.stages for top in code.modules for inner in top.modules())
    names, likeness = result_names(cut.results), _likeness(model, called)
    twin.__dict__["_how"] = _How(model, script, cut, shapes, names, called, likeness)
    twin.__dict__["fit"] = facts
    return twin
