"""nn.Module -> Graph, and beside it the functions that the runtime calls for layers it does not know by kind."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx, nn

from manyhands.errors import RequestError
from manyhands.ir.graph import Constant, Dropout, Graph, Input, Layer, Operation, Parameter, Pointwise
from manyhands.ir.graph import Concatenate, Expand, Rearrange, Take, Whole
from manyhands.tracing.factors import view_factors
from manyhands.tracing.fx import walk, where
from manyhands.tracing.kinds import Call, Kind, Ref, Unsplittable, describe
from manyhands.tracing.modules import POINTWISE_MODULES, as_function

Function = Callable[[Sequence[torch.Tensor], dict[str, torch.Tensor]], Any]


@dataclass(frozen=True)
class Traced:
    """A graph and what it takes to run it: one function a layer (inputs, weights by role) -> result."""

    graph: Graph
    functions: dict[str, Function]
    inplace: dict[str, Function] = field(default_factory=dict)  # the same, overwriting its first input


def trace(model: nn.Module, example: Sequence[torch.Tensor]) -> Traced:
    """The graph of a model for inputs of these shapes. The example's values are never looked at."""
    calls, values, opaque = walk(model, example)
    builder = _Builder(model, values, opaque)
    for node in calls.nodes:
        builder.visit(node)
    return builder.finish()


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tuple of tensors that a call returned: each element is made when it is picked."""

    node: fx.Node


@dataclass
class _Builder:
    model: nn.Module
    values: dict[fx.Node, Any]
    opaque: dict[str, str]
    layers: dict[str, Layer] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    inplace: dict[str, Function] = field(default_factory=dict)
    refs: dict[fx.Node, Any] = field(default_factory=dict)  # Ref, _Parts or a plain value
    outputs: list[str] = field(default_factory=list)
    num_inputs: int = 0

    def __post_init__(self) -> None:
        named = [*self.model.named_parameters(remove_duplicate=False)]
        named += [*self.model.named_buffers(remove_duplicate=False)]
        first: dict[int, str] = {}
        self.canonical = {name: first.setdefault(id(tensor), name) for name, tensor in named}
        self.tensors = dict(named)

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self._output(node.args[0])
        elif node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "get_attr":
            self.refs[node] = self._constant(str(node.target), self.values[node])
        elif isinstance(self.values[node], torch.Tensor):
            self.refs[node] = self._tensor(node)
        elif _has_tensor(self.values[node]):
            self.refs[node] = _Parts(node)
        else:
            self.refs[node] = self.values[node]

    def _placeholder(self, node: fx.Node) -> None:
        value = self.values[node]
        if not isinstance(value, torch.Tensor):
            self.refs[node] = value
            return
        self._add(Layer(node.name, Input(self.num_inputs), (), tuple(value.shape), (), _dtype(value), False))
        self.refs[node] = Ref(node.name, tuple(value.shape))
        self.num_inputs += 1

    def _constant(self, path: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        parameter = self._parameter("value", path, value)
        if path not in self.layers:
            self._add(Layer(path, Constant(), (), tuple(value.shape), (parameter,), _dtype(value), False))
            self.layers[path] = replace(self.layers[path], differentiable=parameter.trainable)
        return Ref(path, tuple(value.shape), parameter)

    def _parameter(self, role: str, path: str, value: torch.Tensor) -> Parameter:
        name = self.canonical.get(path, path)
        trainable = isinstance(self.tensors.get(name), nn.Parameter) and self.tensors[name].requires_grad
        buffer = not isinstance(self.tensors.get(name), nn.Parameter)
        return Parameter(role, name, tuple(value.shape), trainable, buffer, _dtype(value))

    def _tensor(self, node: fx.Node) -> Ref:
        """The layer of a call that returns a tensor."""
        if node.target is operator.getitem:
            source = self.refs[node.args[0]]
            return self._pick(node, source.node) if isinstance(source, _Parts) else self._getitem(node, source)
        function, args, kwargs, inplace = self._call(node)
        call = Call(function, args, kwargs, tuple(self.values[node].shape), self.model.training)
        if function == "stack":
            return self._stack(node, call)
        try:
            if node.op == "call_module" and str(node.target) in self.opaque:
                raise Unsplittable(f"it cannot be traced: {self.opaque[str(node.target)]}")
            kind = describe(call)
        except Unsplittable as reason:
            kind = Kind(Whole(str(reason)), tuple(_refs((args, kwargs))), self._module_weights(node))
        except RequestError as error:
            raise RequestError(f"{where(node)}: {error}") from None
        return self._layer(node, kind, inplace)

    def _call(self, node: fx.Node) -> tuple[str, tuple[Any, ...], dict[str, Any], bool]:
        """Name, arguments and whether it overwrites its first argument."""
        args = fx.map_arg(node.args, lambda n: self.refs[n])
        kwargs = dict(fx.map_arg(node.kwargs, lambda n: self.refs[n]))
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            known = as_function(module)
            weights = {role: ref for role, ref in self._module_weights(node)}
            if known is None:
                return type(module).__name__, args, kwargs, False
            return known[0], args, kwargs | known[1] | weights, bool(getattr(module, "inplace", False))
        name = node.target if isinstance(node.target, str) else node.target.__name__
        plain = _OPERATORS.get(name) or name.rstrip("_")
        overwrites = bool(kwargs.pop("inplace", False)) or (name.endswith("_") and not name.startswith("_"))
        return plain, args, kwargs, overwrites or name in _INPLACE_OPERATORS

    def _module_weights(self, node: fx.Node) -> tuple[tuple[str, Ref], ...]:
        if node.op != "call_module":
            return ()
        module = self.model.get_submodule(str(node.target))
        named = [*module.named_parameters(), *module.named_buffers()]
        return tuple(
            (
                role,
                Ref("", tuple(value.shape), self._parameter(role, f"{node.target}.{role}", value)),
            )
            for role, value in named
        )

    def _layer(self, node: fx.Node, kind: Kind, inplace: bool) -> Ref:
        value = self.values[node]
        name = str(node.target) if node.op == "call_module" else node.name
        name = self._unique(name)
        weights = tuple(replace(ref.parameter, role=role) for role, ref in kind.weights if ref.parameter)
        operation = kind.operation
        if inplace and isinstance(operation, Pointwise | Dropout):
            self._refuse_overwriting_a_view(node, kind.inputs[0])
            operation = replace(operation, inplace=True)
        differentiable = value.dtype.is_floating_point and (
            any(p.trainable for p in weights) or any(self.layers[r.layer].differentiable for r in kind.inputs)
        )
        differentiable = differentiable and node.target not in ("detach", torch.detach)
        inputs = tuple(ref.layer for ref in kind.inputs)
        self._add(Layer(name, operation, inputs, tuple(value.shape), weights, _dtype(value), differentiable))
        self._bind(node, name, kind)
        ref = Ref(name, tuple(value.shape))
        if inplace and isinstance(operation, Pointwise | Dropout):  # whoever reads the input later reads this
            self.refs = {n: ref if r == kind.inputs[0] else r for n, r in self.refs.items()}
        return ref

    def _refuse_overwriting_a_view(self, node: fx.Node, source: Ref) -> None:
        views = (Take, Rearrange, Expand)
        layer = self.layers[source.layer]
        if isinstance(layer.operation, views) and any(
            isinstance(reader, fx.Node) and reader is not node
            for other, ref in self.refs.items()
            if isinstance(ref, Ref) and ref.layer in layer.inputs
            for reader in _later(other, node)
        ):
            raise RequestError(
                f"{where(node)} overwrites a view of {layer.inputs[0]}, which is read again later. "
                "Use the form that does not work in place."
            )

    def _bind(self, node: fx.Node, name: str, kind: Kind) -> None:
        """Keep the function to call for this layer, with its tensors as arguments."""
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            self.functions[name] = _module_function(module, inplace=False)
            if isinstance(module, POINTWISE_MODULES) and getattr(module, "inplace", False):
                self.inplace[name] = _module_function(module, inplace=True)
            return
        self.functions[name] = self._node_function(node, kind, inplace=False)
        if isinstance(kind.operation, Pointwise):
            self.inplace[name] = self._node_function(node, kind, inplace=True)

    def _node_function(self, node: fx.Node, kind: Kind, *, inplace: bool) -> Function:
        """The call with its tensor arguments replaced, in order, by the tiles handed in."""
        order = {ref.layer: i for i, ref in enumerate(kind.inputs)}
        roles = {ref.layer: role for role, ref in kind.weights}
        refs = {n: self.refs[n] for n in node.all_input_nodes}
        target, kwargs = _target(node, inplace), dict(node.kwargs)
        if not inplace and "inplace" in kwargs:
            kwargs["inplace"] = False

        def run(inputs: Sequence[torch.Tensor], weights: dict[str, torch.Tensor]) -> Any:
            def resolve(n: fx.Node) -> Any:
                ref = refs[n]
                if not isinstance(ref, Ref):
                    return ref
                return inputs[order[ref.layer]] if ref.layer in order else weights[roles[ref.layer]]

            return target(*fx.map_arg(node.args, resolve), **fx.map_arg(kwargs, resolve))

        return run

    def _pick(self, node: fx.Node, source: fx.Node) -> Ref:
        """One element of a tuple of tensors: a slice where the tuple is one, else a whole layer."""
        function, args, kwargs, _ = self._call(source)
        index = node.args[1]
        elements = self.values[source]
        if function in ("chunk", "split", "tensor_split") and isinstance(args[0], Ref):
            rank = len(args[0].shape)
            dimension = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % rank
            start = sum(element.shape[dimension] for element in elements[: index % len(elements)])
            starts = tuple(start if d == dimension else 0 for d in range(rank))
            return self._emit(node, Take(starts, (1,) * rank), (args[0],), tuple(self.values[node].shape))
        inputs, weights = tuple(_refs((args, kwargs))), self._module_weights(source)
        kind = Kind(Whole(f"{function} returns several tensors"), inputs, weights)
        ref = self._layer(node, kind, inplace=False)
        if source.op == "call_module":
            whole = _module_function(self.model.get_submodule(str(source.target)), inplace=False)
        else:
            whole = self._node_function(source, kind, inplace=False)
        self.functions[ref.layer] = lambda inputs, weights: whole(inputs, weights)[index]
        return ref

    def _getitem(self, node: fx.Node, source: Ref) -> Ref:
        """x[...] with slices, integers and None; anything else runs whole."""
        index = fx.map_arg(node.args[1], lambda n: self.refs[n])
        index = index if isinstance(index, tuple) else (index,)
        if not all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index):
            inputs = tuple(_refs((source, index)))
            return self._layer(node, Kind(Whole("it is indexed by a tensor"), inputs), inplace=False)
        given = sum(part is not None and part is not Ellipsis for part in index)
        fill = (slice(None),) * (len(source.shape) - given)
        where_fill = index.index(Ellipsis) if Ellipsis in index else len(index)
        index = index[:where_fill] + fill + index[where_fill + 1 :]
        starts, steps, sizes = [], [], []
        for part, size in zip((p for p in index if p is not None), source.shape, strict=True):
            chosen = range(size)[part] if isinstance(part, slice) else range(part % size, part % size + 1)
            starts.append(chosen.start), steps.append(chosen.step), sizes.append(len(chosen))
        if min(steps) < 0 or min(sizes) < 1:
            raise RequestError(f"{where(node)} takes an empty or backward slice.")
        taken = source
        if tuple(sizes) != source.shape:
            taken = self._emit(node, Take(tuple(starts), tuple(steps)), (source,), tuple(sizes))
        return self._viewed(node, taken, tuple(self.values[node].shape))

    def _viewed(self, node: fx.Node, source: Ref, shape: tuple[int, ...]) -> Ref:
        if source.shape == shape:
            return source
        factors = view_factors(source.shape, shape)
        assert factors is not None, "dimensions of size 1 always share factors"
        return self._emit(node, factors, (source,), shape)

    def _stack(self, node: fx.Node, call: Call) -> Ref:
        rank = len(call.result)
        dimension = call.get(1, "dim", 0) % rank
        shape = tuple(1 if d == dimension else size for d, size in enumerate(call.result))
        parts = tuple(self._viewed(node, ref, shape) for ref in call.get(0, "tensors"))
        return self._emit(node, Concatenate(dimension), parts, call.result)

    def _emit(
        self, node: fx.Node, operation: Operation, inputs: tuple[Ref, ...], shape: tuple[int, ...]
    ) -> Ref:
        """A layer whose kind says everything: it needs no function of its own."""
        name = self._unique(node.name)
        differentiable = any(self.layers[ref.layer].differentiable for ref in inputs)
        names = tuple(ref.layer for ref in inputs)
        self._add(Layer(name, operation, names, shape, (), _dtype(self.values[node]), differentiable))
        return Ref(name, shape)

    def _output(self, value: Any) -> None:
        leaves: list[Any] = []
        fx.map_arg(value, lambda n: leaves.append(self.refs[n]))
        for leaf in leaves:
            if not isinstance(leaf, Ref):
                raise RequestError("the model returns something that is not a tensor.")
            self.outputs.append(leaf.layer)

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.layers:
            count += 1
            candidate = f"{name}@{count}"
        return candidate

    def _add(self, layer: Layer) -> None:
        if not prod(layer.shape):
            raise RequestError(f"{layer.name} has an empty result {layer.shape}: the input is too small.")
        self.layers[layer.name] = layer

    def finish(self) -> Traced:
        """Layers that nobody reads are left out, but for batch norms: they learn by being computed."""
        wanted = set(self.outputs)
        for layer in reversed(self.layers.values()):
            if layer.name in wanted or (layer.statistic and layer.parameter("running_mean")):
                wanted |= {layer.name, *layer.inputs}
            wanted |= {layer.name} if isinstance(layer.operation, Input) else set()
        layers = tuple(layer for layer in self.layers.values() if layer.name in wanted)
        return Traced(Graph(layers, tuple(self.outputs)), self.functions, self.inplace)


_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "ipow": "pow"}
_INPLACE_OPERATORS = frozenset(_OPERATORS)


def _target(node: fx.Node, inplace: bool) -> Callable[..., Any]:
    """What a call calls; the form that leaves its first argument alone, unless asked otherwise."""
    if isinstance(node.target, str):
        name = node.target if inplace else node.target.rstrip("_")
        return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
    name = node.target.__name__
    if inplace or not (name in _INPLACE_OPERATORS or name.endswith("_")):
        return node.target
    if name in _INPLACE_OPERATORS:
        return getattr(operator, name[1:])
    return getattr(torch, name.rstrip("_"), None) or getattr(torch.nn.functional, name.rstrip("_"))


def _module_function(module: nn.Module, *, inplace: bool) -> Function:
    if hasattr(module, "inplace") and module.inplace != inplace:
        module = copy.copy(module)
        module.inplace = inplace

    lock = threading.Lock()  # functional_call swaps the module's weights, and devices may be threads

    def run(inputs: Sequence[torch.Tensor], weights: dict[str, torch.Tensor]) -> Any:
        if not weights:
            return module(*inputs)
        with lock:
            return torch.func.functional_call(module, weights, tuple(inputs))

    return run


def _has_tensor(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value)


def _refs(value: Any) -> list[Ref]:
    """Every tensor among some arguments, once each, in order."""
    found: list[Ref] = []
    if isinstance(value, Ref):
        found.append(value)
    elif isinstance(value, tuple | list):
        found += [ref for part in value for ref in _refs(part)]
    elif isinstance(value, dict):
        found += [ref for part in value.values() for ref in _refs(part)]
    return [ref for ref in dict.fromkeys(found) if ref.layer]


def _later(node: fx.Node, than: fx.Node) -> list[fx.Node]:
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    return [user for user in node.users if order[user] > order[than]]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
