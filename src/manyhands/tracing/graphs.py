"""nn.Module -> Graph, and the functions that the runtime calls for layers it does not know by kind."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx, nn

from manyhands.errors import RequestError
from manyhands.ir.graph import (
    BatchNorm,
    Concatenate,
    Constant,
    Dropout,
    Graph,
    Input,
    Layer,
    Operation,
    Parameter,
    Pointwise,
    Take,
    Whole,
)
from manyhands.tracing.calls import Call, Kind, Ref, Unsplittable, refs_in
from manyhands.tracing.clamping import Clamp, clamping, copying_nothing
from manyhands.tracing.factors import view_factors
from manyhands.tracing.functions import (
    Function,
    module_function,
    node_function,
    overwrites_by_name,
    plain_name,
)
from manyhands.tracing.fx import Walk, walk, where
from manyhands.tracing.kinds import describe
from manyhands.tracing.memory import makes_own_memory, refuse_stale_views, same_memory, same_view
from manyhands.tracing.modules import POINTWISE_MODULES, as_function, draws_random, rectified, refuse_hooks
from manyhands.tracing.saving import with_saved


@dataclass(frozen=True)
class Traced:
    """A graph and what it takes to run it: one function a layer (inputs, weights by role) -> result."""

    graph: Graph
    functions: dict[str, Function]
    inplace: dict[str, Function] = field(default_factory=dict)  # the same, overwriting its first input


def trace(model: nn.Module, example: Sequence[torch.Tensor]) -> Traced:
    """The graph of a model for inputs of these shapes. The example's values are never looked at."""
    refuse_hooks(model)
    builder = _Builder(model, walk(model, example))
    for node in builder.walked.calls.nodes:
        builder.visit(node)
    return builder.finish()


@dataclass
class _Builder:
    model: nn.Module
    walked: Walk
    layers: dict[str, Layer] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    inplace: dict[str, Function] = field(default_factory=dict)
    clamps: dict[str, Clamp] = field(default_factory=dict)
    refs: dict[fx.Node, Any] = field(default_factory=dict)  # Ref, tuple of them, or a plain value
    own_memory: set[str] = field(default_factory=set)  # layers whose result may be overwritten
    outputs: list[str] = field(default_factory=list)
    num_inputs: int = 0

    def __post_init__(self) -> None:
        self.values = self.walked.values
        named: list[tuple[str, torch.Tensor]] = [*self.model.named_parameters(remove_duplicate=False)]
        named += self.model.named_buffers(remove_duplicate=False)
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
            self.refs[node] = self._tuple(node)
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
        source: Any = self.refs[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(source, tuple) and node.target in (operator.getitem, getattr):
            return self._picked(node, source)
        if node.target is operator.getitem:
            return self._getitem(node, source)
        function, args, kwargs = self._call(node)
        call = Call(function, args, kwargs, tuple(self.values[node].shape), self.model.training)
        if function == "stack":
            return self._stack(node, call)
        try:
            kind = self._kind(node, call)
        except RequestError as error:
            raise RequestError(f"{where(node)}: {error}") from None
        return self._layer(node, kind, self.values[node])

    def _kind(self, node: fx.Node, call: Call) -> Kind:
        try:
            if node.op == "call_module" and str(node.target) in self.walked.opaque:
                raise Unsplittable(f"it cannot be traced: {self.walked.opaque[str(node.target)]}")
            return describe(call)
        except Unsplittable as reason:
            if node.op == "call_module" and draws_random(self.model.get_submodule(str(node.target))):
                raise RequestError(
                    f"{call.function} draws random numbers inside and cannot be cut: no plan can repeat it."
                ) from None
            inputs = tuple(refs_in((call.args, call.kwargs)))
            return Kind(Whole(str(reason)), inputs, self._module_weights(node))

    def _call(self, node: fx.Node) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Name and arguments of a call, tensors as Ref."""
        args = fx.map_arg(node.args, lambda n: self.refs[n])
        kwargs = dict(fx.map_arg(node.kwargs, lambda n: self.refs[n]))
        if node.op != "call_module":
            kwargs.pop("inplace", None)
            return plain_name(node), args, kwargs
        module = self.model.get_submodule(str(node.target))
        known = as_function(module)
        if known is None:
            return type(module).__name__, args, kwargs
        return known[0], args, kwargs | known[1] | dict(self._module_weights(node))

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

    def _layer(self, node: fx.Node, kind: Kind, value: torch.Tensor) -> Ref:
        name = self._unique(str(node.target) if node.op == "call_module" else node.name)
        weights = tuple(replace(ref.parameter, role=role) for role, ref in kind.weights if ref.parameter)
        operation = rectified(kind.operation, node, self.model)
        overwrites = bool(self.walked.overwrites[node]) and not isinstance(operation, BatchNorm)
        overwrites = overwrites or (node.op != "call_module" and overwrites_by_name(node))
        own = not overwrites or self._is_alone(kind.inputs[0].layer)
        if overwrites and own and isinstance(operation, Pointwise | Dropout):
            operation = replace(operation, inplace=True)
        if own and makes_own_memory(operation, self._function_name(node)):
            self.own_memory.add(name)
        differentiable = value.dtype.is_floating_point and (
            any(p.trainable for p in weights) or any(self.layers[r.layer].differentiable for r in kind.inputs)
        )
        differentiable = differentiable and node.target not in ("detach", torch.detach)
        inputs = tuple(ref.layer for ref in kind.inputs)
        self._add(Layer(name, operation, inputs, tuple(value.shape), weights, _dtype(value), differentiable))
        self._bind(node, name, kind)
        ref = Ref(name, tuple(value.shape))
        if overwrites:
            self._overwritten(node, ref)
        return ref

    def _is_alone(self, name: str) -> bool:
        """May a layer's memory be written to? Only if no reader so far can have made a view of it."""
        readers = [layer.name for layer in self.layers.values() if name in layer.inputs]
        return name in self.own_memory and self.own_memory.issuperset(readers)

    def _function_name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self.model.get_submodule(str(node.target))).__name__
        return plain_name(node)

    def _overwritten(self, node: fx.Node, result: Ref) -> None:
        """Whoever reads the overwritten tensor later reads the result."""
        first: Any = node.args[0] if node.args else node.kwargs.get("input")
        if not self._may_overwrite(node, first):
            raise RequestError(
                f"{where(node)} overwrites a weight, a buffer or what is not its first argument."
            )
        refuse_stale_views(node, self.values[first], self.values)
        for other in self.refs:
            if same_view(self.values[other], self.values[first]):
                self.refs[other] = result

    def _may_overwrite(self, node: fx.Node, first: Any) -> bool:
        if not isinstance(first, fx.Node) or not isinstance(self.refs[first], Ref):
            return False
        constant = isinstance(self.layers[self.refs[first].layer].operation, Constant)
        changed = [self.values[n] for n in self.walked.overwrites[node]]
        return not constant and all(same_memory(value, self.values[first]) for value in changed)

    def _bind(self, node: fx.Node, name: str, kind: Kind) -> None:
        """Keep the function to call for this layer, with its tensors as arguments."""
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            self.functions[name] = module_function(module, node, kind, self.refs, inplace=False)
            if isinstance(module, POINTWISE_MODULES) and getattr(module, "inplace", False):
                self.inplace[name] = module_function(module, node, kind, self.refs, inplace=True)
                if clamp := clamping(module):
                    self.clamps[name] = clamp
            return
        self.functions[name] = node_function(node, kind, self.refs, inplace=False)
        if isinstance(kind.operation, Pointwise):
            self.inplace[name] = node_function(node, kind, self.refs, inplace=True)

    def _tuple(self, node: fx.Node) -> tuple[Any, ...]:
        """The elements of a tuple of tensors: slices where the tuple is made of them, else whole layers."""
        function, args, kwargs = self._call(node)
        if node.target in (operator.getitem, operator.add):  # a part of a tuple, or two joined
            return tuple(node.target(*args))
        elements, refs, start = tuple(self.values[node]), [], 0
        if function in ("chunk", "split", "tensor_split") and isinstance(args[0], Ref):
            rank = len(args[0].shape)
            dimension = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % rank
            for element in elements:
                starts = tuple(start if d == dimension else 0 for d in range(rank))
                refs.append(
                    self._emit(node.name, Take(starts, (1,) * rank), (args[0],), tuple(element.shape))
                )
                start += element.shape[dimension]
            return tuple(refs)
        call = Call(function, args, kwargs, (), self.model.training)
        kind = replace(self._kind(node, call), operation=Whole(f"{function} returns several tensors"))
        for index, element in enumerate(elements):
            refs.append(self._layer(node, kind, element) if isinstance(element, torch.Tensor) else element)
            if isinstance(element, torch.Tensor):
                self.functions[refs[-1].layer] = _element(self.functions[refs[-1].layer], index)
        return tuple(refs)

    def _picked(self, node: fx.Node, source: tuple[Any, ...]) -> Ref:
        tensors, index = node.args
        if node.target is getattr:
            assert isinstance(tensors, fx.Node)
            index = type(self.values[tensors]).__match_args__.index(index)
        assert isinstance(index, int)
        return source[index]

    def _getitem(self, node: fx.Node, source: Ref) -> Ref:
        """x[...] with slices, integers and None; anything else runs whole."""
        index = fx.map_arg(node.args[1], lambda n: self.refs[n])
        index = index if isinstance(index, tuple) else (index,)
        if not all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index):
            inputs = tuple(refs_in((source, index)))
            kind = Kind(Whole("it is indexed by a tensor"), inputs)
            return self._layer(node, kind, self.values[node])
        given = sum(part is not None and part is not Ellipsis for part in index)
        fill = (slice(None),) * (len(source.shape) - given)
        where_fill = index.index(Ellipsis) if Ellipsis in index else len(index)
        index = index[:where_fill] + fill + index[where_fill + 1 :]
        starts, steps, sizes = [], [], []
        for part, size in zip((p for p in index if p is not None), source.shape, strict=True):
            chosen = range(size)[part] if isinstance(part, slice) else range(part % size, part % size + 1)
            starts.append(chosen.start)
            steps.append(chosen.step)
            sizes.append(len(chosen))
        if min(steps) < 0 or min(sizes) < 1:
            raise RequestError(f"{where(node)} takes an empty or backward slice.")
        taken = source
        if tuple(sizes) != source.shape:
            taken = self._emit(node.name, Take(tuple(starts), tuple(steps)), (source,), tuple(sizes))
        return self._viewed(node, taken, tuple(self.values[node].shape))

    def _viewed(self, node: fx.Node, source: Ref, shape: tuple[int, ...]) -> Ref:
        if source.shape == shape:
            return source
        factors = view_factors(source.shape, shape)
        assert factors is not None, "dimensions of size 1 always share factors"
        return self._emit(node.name, factors, (source,), shape)

    def _stack(self, node: fx.Node, call: Call) -> Ref:
        rank = len(call.result)
        dimension = call.get(1, "dim", 0) % rank
        shape = tuple(1 if d == dimension else size for d, size in enumerate(call.result))
        parts = tuple(self._viewed(node, ref, shape) for ref in call.get(0, "tensors"))
        return self._emit(node.name, Concatenate(dimension), parts, call.result)

    def _emit(self, base: str, operation: Operation, inputs: tuple[Ref, ...], shape: tuple[int, ...]) -> Ref:
        """A layer whose kind says everything: it needs no function of its own."""
        name = self._unique(base)
        differentiable = any(self.layers[ref.layer].differentiable for ref in inputs)
        names = tuple(ref.layer for ref in inputs)
        dtype = self.layers[names[0]].dtype
        self._add(Layer(name, operation, names, shape, (), dtype, differentiable))
        return Ref(name, shape)

    def _output(self, value: Any) -> None:
        leaves: list[Any] = []
        fx.map_arg(value, lambda n: leaves.extend(_flat(self.refs[n])))
        for leaf in leaves:
            if not isinstance(leaf, Ref):
                raise RequestError("the model returns something that is not a tensor.")
            if isinstance(self.layers[leaf.layer].operation, Input | Constant):  # a layer gives it owners
                rank = len(leaf.shape)
                leaf = self._emit("output", Take((0,) * rank, (1,) * rank), (leaf,), leaf.shape)
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
        layers = _without_dead_ends(
            [layer for layer in self.layers.values() if layer.name in wanted], self.outputs
        )
        graph = Graph(layers, tuple(self.outputs))
        inplace = self.inplace | copying_nothing(graph, self.clamps)
        return Traced(with_saved(graph, self.functions, inplace), self.functions, inplace)


def _without_dead_ends(layers: list[Layer], outputs: list[str]) -> tuple[Layer, ...]:
    """Where no output can be reached, nothing is trained: torch leaves such weights without a gradient."""
    alive = set(outputs)
    for layer in reversed(layers):
        alive |= set(layer.inputs) if layer.name in alive else set()
    trained = {p.name for layer in layers if layer.name in alive for p in layer.parameters if p.trainable}
    return tuple(
        replace(
            layer,
            parameters=tuple(replace(p, trainable=p.name in trained) for p in layer.parameters),
            differentiable=layer.differentiable and layer.name in alive,
        )
        for layer in layers
    )


def _has_tensor(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value)


def _flat(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _flat(part)] if isinstance(value, tuple | list) else [value]


def _element(function: Function, index: int) -> Function:
    return lambda inputs, weights: function(inputs, weights)[index]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
