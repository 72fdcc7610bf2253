"""What the runtime calls for a layer: the model's own call, on tiles instead of whole tensors."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from manyhands.errors import RequestError
from manyhands.tracing.calls import Kind, Ref
from manyhands.tracing.fx import where

Tiles = Sequence[torch.Tensor]
Weights = dict[str, torch.Tensor]
Function = Callable[[Tiles, Weights], Any]
Arguments = tuple[Any, dict[str, Any]]

OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "ipow": "pow"}


def plain_name(node: fx.Node) -> str:
    """The name of the function that a call calls, without the mark of working in place."""
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return OPERATORS.get(name) or name.rstrip("_")


def overwrites_by_name(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return name in OPERATORS or (name.endswith("_") and not name.startswith("_"))


def node_function(node: fx.Node, kind: Kind, refs: dict[fx.Node, Any], *, inplace: bool) -> Function:
    """A call with its tensor arguments replaced by the tiles handed in."""
    target, arguments = _target(node, inplace), _arguments(node, kind, refs)

    def run(inputs: Tiles, weights: Weights) -> Any:
        args, kwargs = arguments(inputs, weights)
        if not inplace and "inplace" in kwargs:
            kwargs["inplace"] = False
        return target(*args, **kwargs)

    return run


def module_function(
    module: nn.Module, node: fx.Node, kind: Kind, refs: dict[fx.Node, Any], *, inplace: bool
) -> Function:
    """The same for a module: its weights are replaced too. The user's own module is never touched."""
    module = _hollow(module)
    if hasattr(module, "inplace"):
        setattr(module, "inplace", inplace)  # noqa: B010  # to mypy an attribute of a module is a tensor
    arguments = _arguments(node, kind, refs)
    lock = threading.Lock()  # functional_call swaps the module's weights, and devices may be threads

    def run(inputs: Tiles, weights: Weights) -> Any:
        args, kwargs = arguments(inputs, weights)
        if not weights:
            return module(*args, **kwargs)
        with lock:
            return torch.func.functional_call(module, weights, args, kwargs)

    return run


def _hollow(module: nn.Module) -> nn.Module:
    """A copy without memory for its weights and buffers, which are handed in at every call."""
    memo: dict[int, Any] = {id(b): b.to("meta") for b in module.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _arguments(node: fx.Node, kind: Kind, refs: dict[fx.Node, Any]) -> Callable[[Tiles, Weights], Arguments]:
    """A function that puts tiles and weights where the call has its tensors."""
    order = {ref.layer: i for i, ref in enumerate(kind.inputs)}
    roles = {ref.layer: role for role, ref in kind.weights}
    known = {n: refs[n] for n in node.all_input_nodes}

    def arguments(inputs: Tiles, weights: Weights) -> Arguments:
        tiles = {layer: inputs[i] for layer, i in order.items()} | {
            n: weights[role] for n, role in roles.items() if n
        }

        def resolve(n: fx.Node) -> Any:
            return _filled(known[n], tiles)

        return fx.map_arg(node.args, resolve), dict(fx.map_arg(node.kwargs, resolve))

    return arguments


def _filled(value: Any, tiles: dict[str, torch.Tensor]) -> Any:
    """An argument with its tensors in place. (No closure: one that calls itself would keep tiles alive.)"""
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_filled(part, tiles) for part in value)
    return tiles[value.layer] if isinstance(value, Ref) else value


def _target(node: fx.Node, inplace: bool) -> Callable[..., Any]:
    """What a call calls; the form that leaves its first argument alone, unless asked otherwise."""
    if not overwrites_by_name(node) or inplace:
        if isinstance(node.target, str):
            return _method(node.target)
        return node.target
    name = plain_name(node)
    if isinstance(node.target, str):
        if not hasattr(torch.Tensor, name):
            raise RequestError(f"{where(node)} has no form that leaves its input alone. Write one that has.")
        return _method(name)
    homes = (operator,) if node.target.__name__ in OPERATORS else (torch, torch.nn.functional)
    name = node.target.__name__[1:] if homes == (operator,) else name
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def _method(name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
