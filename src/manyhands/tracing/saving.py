"""What autograd keeps of each layer, asked of torch itself: every layer once, on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from manyhands.ir.graph import (
    BatchNorm,
    Convolve,
    Deconvolve,
    Dropout,
    Graph,
    Input,
    Layer,
    Linear,
    Pointwise,
    Pool,
    Saved,
)
from manyhands.tracing.memory import same_memory

Function = Callable[[Sequence[Tensor], dict[str, Tensor]], Any]
SMALL = 0.01  # of the result: means and the like, not worth counting


def with_saved(graph: Graph, functions: dict[str, Function], inplace: dict[str, Function]) -> Graph:
    """The same graph; each layer that has a function of the model's own says what is kept of it."""
    layers = graph.by_name()
    alike: dict[Hashable, Saved | None] = {}
    asked = []
    for layer in graph.layers:
        inputs = tuple(layers[name] for name in layer.inputs)
        function = functions.get(layer.name)
        if _overwrites(layer, inputs) and layer.name in inplace:
            function = inplace[layer.name]
        key = _key(layer, inputs)
        if key not in alike:
            alike[key] = _ask(layer, inputs, function)
        asked.append(replace(layer, saved=alike[key]))
    return replace(graph, layers=tuple(asked))


def _key(layer: Layer, inputs: tuple[Layer, ...]) -> Hashable:
    """Layers that keep alike. Where the kind does not say what is computed, each is asked for itself."""
    if not isinstance(layer.operation, Convolve | Deconvolve | Linear | BatchNorm | Pool):
        return layer.name
    shapes = tuple((p.role, p.shape, p.dtype, p.trainable) for p in layer.parameters)
    return layer.operation, shapes, tuple((i.shape, i.dtype, i.differentiable) for i in inputs)


def _overwrites(layer: Layer, inputs: tuple[Layer, ...]) -> bool:
    return (
        isinstance(layer.operation, Pointwise)
        and layer.operation.inplace
        and not isinstance(inputs[0].operation, Input)
    )


def _ask(layer: Layer, inputs: tuple[Layer, ...], function: Function | None) -> Saved | None:
    if isinstance(layer.operation, Dropout):  # its mask is drawn by the runtime, in the layer's own type
        return Saved((False,), False, extra_items=1.0)
    if function is None:
        return None
    try:
        return _saved(layer, inputs, function)
    except Exception:  # it looks at values, and there are none
        return None


def _saved(layer: Layer, inputs: tuple[Layer, ...], function: Function) -> Saved:
    given = [_empty(source.shape, source.dtype, source.differentiable) for source in inputs]
    tensors = [tensor.clone() if tensor.requires_grad else tensor for tensor in given]
    weights = {p.role: _empty(p.shape, p.dtype, p.trainable) for p in layer.parameters}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(tensors, weights)
    known = [*tensors, *weights.values(), result]
    items, num_bytes = 0.0, 0.0
    for tensor in (t for t in kept if not any(same_memory(t, other) for other in known)):
        share = tensor.numel() / prod(layer.shape)
        if share >= SMALL:
            items += share if tensor.is_floating_point() else 0.0
            num_bytes += 0.0 if tensor.is_floating_point() else share * tensor.element_size()
    view = bool(tensors) and same_memory(tensors[0], result)
    held = tuple(any(same_memory(t, tensor) for t in kept) for tensor in tensors)
    of_result = any(same_memory(t, result) for t in kept)
    return Saved(held, of_result, items, num_bytes, view, _passes(given, result))


def _empty(shape: tuple[int, ...], dtype: str, differentiable: bool) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=differentiable)


def _passes(given: list[Tensor], result: Tensor) -> tuple[bool, ...]:
    """The inputs whose gradient lies in the memory of the result's."""
    wanted = [tensor for tensor in given if tensor.requires_grad]
    if not wanted or not result.requires_grad:
        return (False,) * len(given)
    gradient = torch.empty_like(result)
    found = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
    return tuple(tensor.requires_grad and same_memory(next(found), gradient) for tensor in given)
