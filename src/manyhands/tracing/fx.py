"""Walk a model with torch.fx: calls in order, with shapes from meta tensors; no compute and no memory."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from manyhands.errors import RequestError
from manyhands.tracing.steadiness import traced

ONE_AT_A_TIME = threading.Lock()  # torch.fx patches nn.Module while it traces


class _Proxy(fx.Proxy):
    """A proxy that tells `x += y`, which changes x for all its readers, from `x = x + y`."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class Walker(fx.Tracer):
    """A tracer that takes a module it cannot see through as one opaque call instead of giving up."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque: dict[str, str] = {}  # module path -> why it could not be seen through

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        before, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            path = self.path_of_module(m)
            self.opaque[path] = first_line(error)
            self.module_stack = stack
            for node in list(self.graph.nodes)[before:][::-1]:
                self.graph.erase_node(node)
            return self.create_proxy("call_module", path, args, kwargs)


@dataclass(frozen=True)
class Walk:
    """The calls of a model, in order, and what is known of each."""

    calls: fx.Graph
    values: dict[fx.Node, Any]  # what each returns for this input, tensors on meta
    overwrites: dict[fx.Node, tuple[fx.Node, ...]]  # which of its arguments each changes in place
    opaque: dict[str, str]  # modules that could not be seen through, and why


def walk(model: nn.Module, example: Sequence[torch.Tensor]) -> Walk:
    """Follow a model's forward for inputs of these shapes."""
    _refuse_other_inputs(model, example)
    walker = Walker()
    with ONE_AT_A_TIME:
        try:
            graph = traced(walker, model)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"{type(model).__name__} cannot be traced: {first_line(error)}. "
                "Forward must not branch on the values of tensors."
            ) from error
        runner = _propagate(model, graph, example)
        if any(runner.overwrites.values()):
            _refuse_lost_values(model, graph, example)
    graph.owning_module = None  # else every call of the graph would keep the whole model's weights alive
    return Walk(graph, runner.values, runner.overwrites, walker.opaque)


def _refuse_other_inputs(model: nn.Module, example: Sequence[torch.Tensor]) -> None:
    """Of those that are too many, fx would say nothing."""
    try:
        inspect.signature(model.forward).bind(*example)
    except TypeError as error:
        given = ", ".join(_shape(tensor) for tensor in example)
        raise RequestError(f"{type(model).__name__} cannot be given {given}: {error}.") from None


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape) or "a number"


def _propagate(model: nn.Module, graph: fx.Graph, example: Sequence[torch.Tensor]) -> _Runner:
    """Run the calls on meta tensors; the model's own weights and buffers stay untouched."""
    runner = _Runner(fx.GraphModule(model, graph))
    with torch.no_grad():
        _run(runner, example)
    return runner


def _run(runner: _Runner, example: Sequence[torch.Tensor]) -> Any:
    state = {
        name: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in [*runner.named_parameters(), *runner.named_buffers()]
    }
    with _in_one_line():
        return torch.func.functional_call(runner, state, tuple(tensor.to("meta") for tensor in example))


def _refuse_lost_values(model: nn.Module, graph: fx.Graph, example: Sequence[torch.Tensor]) -> None:
    """Refuse a model that changes in place what backward needs: torch does so, but only in backward.

    Between parts of a graph that are run one by one, nobody would notice.
    """
    with torch.enable_grad():
        result = _run(_Runner(fx.GraphModule(model, graph)), example)
        ends = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        try:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
        except Exception as error:  # a hook of one's own may fail on what is not there
            if "inplace operation" in str(error):  # whatever else fails, fails in training, too
                raise RequestError(
                    f"{type(model).__name__} changes a tensor in place that its backward needs. "
                    "Torch cannot train it either: use the operation that returns a new tensor."
                ) from error


@contextmanager
def _in_one_line() -> Iterator[None]:
    """fx adds lines of its own to an error that passes through it."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{first_line(error)}.") from error


class _Runner(nn.Module):
    def __init__(self, inner: fx.GraphModule) -> None:
        super().__init__()
        self.inner = inner
        self.values: dict[fx.Node, Any] = {}
        self.overwrites: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def forward(self, *example: torch.Tensor) -> Any:
        return _Recorder(self, " and ".join(_shape(tensor) for tensor in example)).run(*example)


class _Recorder(fx.Interpreter):
    def __init__(self, runner: _Runner, given: str) -> None:
        super().__init__(runner.inner, garbage_collect_values=False)
        self.given = given
        self.values, self.overwrites = runner.values, runner.overwrites

    def run_node(self, node: fx.Node) -> Any:
        before = {n: _version(self.values[n]) for n in node.all_input_nodes}
        try:
            result = self._run(node)
        except Exception as error:
            place = f"{where(node)} does not fit its input where the model is given {self.given}"
            raise RequestError(f"{place}: {first_line(error)}") from error
        if isinstance(result, torch.Tensor) and not result.is_meta:
            result = result.to("meta")  # a tensor kept as a plain attribute, or made in forward
        if isinstance(result, torch.device):
            result = torch.device("cpu")  # where the model will run, not where it is walked
        self.values[node] = result
        self.overwrites[node] = tuple(n for n, old in before.items() if _version(self.values[n]) != old)
        return torch.device("meta") if isinstance(result, torch.device) else result

    def _run(self, node: fx.Node) -> Any:
        try:
            result = super().run_node(node)
            return result.clone() if self._copies(node) else result
        except Exception:
            if node.op != "call_module":
                raise
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            return _run_on_zeros(self.fetch_attr(str(node.target)), args, kwargs)

    def _copies(self, node: fx.Node) -> bool:
        """Does this call copy where it runs, but return a view on meta?"""
        if node.op == "call_module":
            return isinstance(self.fetch_attr(str(node.target)), _COPYING_MODULES)
        return getattr(node.target, "__name__", None) in _COPYING_FUNCTIONS


_COPYING_MODULES = (nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle)
_COPYING_FUNCTIONS = ("channel_shuffle", "pixel_shuffle", "pixel_unshuffle")


def _version(value: Any) -> int:
    """How often a tensor was overwritten; the sum for a tuple of them."""
    if isinstance(value, torch.Tensor):
        return value._version
    return sum(_version(part) for part in value) if isinstance(value, tuple | list) else 0


def _run_on_zeros(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a module that looks at values returns; its own weights and buffers are left alone."""
    state = {n: _zeros(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
    inputs = pytree.tree_map(_zeros, args)
    result = torch.func.functional_call(module, state, inputs, kwargs)
    if _version(inputs):
        raise ValueError("it overwrites its input. Use a form that does not work in place")
    return pytree.tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, result)


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def where(node: fx.Node) -> str:
    """A name for a call that a person recognises: the module's path, or the function and its module."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    inside = f" in {list(stack)[-1]}" if stack else ""
    return f"{node.name}{inside}"


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
