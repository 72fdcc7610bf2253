"""Walk a model with torch.fx: calls in order, with shapes from meta tensors; no compute and no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from manyhands.errors import RequestError


class Walker(fx.Tracer):
    """A tracer that takes a module it cannot see through as one opaque call instead of giving up."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque: dict[str, str] = {}  # module path -> why it could not be seen through

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            path = self.path_of_module(m)
            self.opaque[path] = first_line(error)
            for node in list(self.graph.nodes)[before:][::-1]:
                self.graph.erase_node(node)
            return self.create_proxy("call_module", path, args, kwargs)


def walk(model: nn.Module, example: Sequence[torch.Tensor]) -> tuple[fx.Graph, dict[fx.Node, Any], dict[str, str]]:
    """The calls of a model, what each returns for this input (tensors on meta), and what stayed opaque."""
    walker = Walker()
    try:
        graph = walker.trace(model)
    except Exception as error:
        raise RequestError(
            f"{type(model).__name__} cannot be traced: {first_line(error)}. "
            "Forward must not branch on the values of tensors."
        ) from error
    return graph, _propagate(model, graph, example), walker.opaque


def _propagate(model: nn.Module, graph: fx.Graph, example: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """Run the calls on meta tensors; the model's own weights and buffers stay untouched."""
    runner = _Runner(fx.GraphModule(model, graph))
    state = {
        name: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in [*runner.named_parameters(), *runner.named_buffers()]
    }
    with torch.no_grad():
        torch.func.functional_call(runner, state, tuple(tensor.to("meta") for tensor in example))
    return runner.values


class _Runner(nn.Module):
    def __init__(self, inner: fx.GraphModule) -> None:
        super().__init__()
        self.inner = inner
        self.values: dict[fx.Node, Any] = {}

    def forward(self, *example: torch.Tensor) -> Any:
        return _Recorder(self.inner, self.values).run(*example)


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values = values

    def run_node(self, node: fx.Node) -> Any:
        try:
            result = super().run_node(node)
        except Exception as error:
            raise RequestError(f"{where(node)} does not fit its input: {first_line(error)}") from error
        if node.op == "get_attr" and isinstance(result, torch.Tensor) and not result.is_meta:
            result = result.to("meta")  # a tensor kept as a plain attribute
        self.values[node] = result
        return result


def where(node: fx.Node) -> str:
    """A name for a call that a person recognises: the module's path, or the function inside of which module."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    inside = f" in {list(stack)[-1]}" if stack else ""
    return f"{node.name}{inside}"


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
