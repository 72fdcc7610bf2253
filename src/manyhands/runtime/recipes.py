"""How a stage is computed: as the model has it, or in a way that takes less and gives the same bits.

- A convolution whose result nobody reads is not computed for its backward, which may go in parts.
- A batch norm, with an addition and an activation behind it: its statistics are measured once, its gradient
  may take the place of the one that came, and the activation keeps its result or one bit an element.
- A max pool keeps one byte for each result, where in its window it was; torch keeps eight and the input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from manyhands.runtime.stages import Code, Notes, Order, Recipe, Values
from manyhands.runtime.thrift import (
    Activation,
    Statistics,
    gradient_of_convolution,
    gradient_of_norm,
    masked,
    packed,
    pool_gradient,
    pool_places,
    refound,
)


def recipe_for(code: Code) -> Recipe:
    """The best way there is for a stage."""
    if any(is_watched(module) or is_altered(module) for module in code.modules):
        return AsWritten(code)
    for make in (_convolution, _pool, _norm):
        found = make(code)
        if found is not None:
            return found
    return AsWritten(code)


def is_watched(module: nn.Module) -> bool:
    """Would somebody notice if its forward were not called as it is?"""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_altered(module: nn.Module) -> bool:
    """Has it a forward of its own beside its class's?"""
    return "forward" in vars(module)


@dataclass(frozen=True)
class AsWritten:
    """The model's own calls."""

    code: Code
    modes: int = 1
    sees_blind: bool = False

    def is_settled(self, values: Values) -> bool:
        return False  # nobody knows

    def run(self, values: Values, notes: Notes, order: Order) -> Values:
        return self.code.run(values)


@dataclass(frozen=True)
class Convolution:
    """One convolution as it comes; in its second mode, backward of the images in parts."""

    code: Code
    module: nn.Conv2d
    modes: int = 2
    sees_blind: bool = True

    def is_settled(self, values: Values) -> bool:
        return True

    def run(self, values: Values, notes: Notes, order: Order) -> Values:
        if not (order.blind or order.mode) or values[self.code.reads[0]].dim() != 4:
            return self.code.run(values)
        images = values.pop(self.code.reads[0])
        weights = self.module.weight, self.module.bias
        made = _Convolved.apply(images, *weights, self.module, order.blind, bool(order.mode))
        return {self.code.makes[0]: made}


def _convolution(code: Code) -> Convolution | None:
    if len(code.calls) != 1 or len(code.modules) != 1 or type(code.modules[0]) is not nn.Conv2d:
        return None
    module = code.modules[0]
    regular = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return Convolution(code, module) if regular and len(code.makes) == 1 else None


class _Convolved(Function):
    """A convolution with a backward of our own. If it is blind, nothing is computed forward."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        module, blind, ctx.in_parts = rest
        ctx.save_for_backward(images)
        ctx.module = module
        if blind:
            return images.new_empty(()).expand(_result_shape(images, module))
        result: Tensor = module._conv_forward(images, weight, bias)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (images,) = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = gradient_of_convolution(gradients[0], images, ctx.module, wanted, in_parts=ctx.in_parts)
        return *found, None, None, None


def _result_shape(images: Tensor, module: nn.Conv2d) -> tuple[int, ...]:
    def size(place: int) -> int:
        padding, window = int(module.padding[place]), module.dilation[place] * (module.kernel_size[place] - 1)
        return (images.shape[2 + place] + 2 * padding - window - 1) // module.stride[place] + 1

    return images.shape[0], module.out_channels, size(0), size(1)


@dataclass(frozen=True)
class Pool:
    """One max pool; in its second mode a byte is kept for each result."""

    code: Code
    module: nn.MaxPool2d
    modes: int = 2
    sees_blind: bool = False

    def is_settled(self, values: Values) -> bool:
        return True

    def run(self, values: Values, notes: Notes, order: Order) -> Values:
        images = values[self.code.reads[0]]
        if not (order.taped and order.mode and images.dim() == 4 and images.is_contiguous()):
            return self.code.run(values)
        return {self.code.makes[0]: _Pooled.apply(values.pop(self.code.reads[0]), self.module)}


def _pool(code: Code) -> Pool | None:
    if len(code.calls) != 1 or len(code.modules) != 1 or type(code.modules[0]) is not nn.MaxPool2d:
        return None
    module = code.modules[0]
    window = module.kernel_size if isinstance(module.kernel_size, Sequence) else (module.kernel_size,) * 2
    plain = not module.return_indices and module.dilation in (1, (1, 1)) and window[0] * window[-1] <= 256
    return Pool(code, module) if plain and len(code.makes) == 1 else None


class _Pooled(Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, module: nn.MaxPool2d) -> Tensor:
        ctx.module, ctx.shape = module, images.shape
        result, places = pool_places(images, module)
        ctx.save_for_backward(places)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (places,) = ctx.saved_tensors
        return pool_gradient(gradients[0], places, ctx.shape, ctx.module), None


@dataclass(frozen=True)
class Norm:
    """A batch norm in training, perhaps with an addition and an activation behind it.

    In its second mode its gradient takes the place of the one that came, block by block; in its third, the
    activation keeps bits besides.
    """

    code: Code
    module: nn.BatchNorm2d
    added: str | None
    activation: Activation | None
    sees_blind: bool = False

    @property
    def modes(self) -> int:
        return 2 if self.activation is None else 3

    @property
    def _images(self) -> str:
        return str(self.code.calls[0].all_input_nodes[0].name)

    def is_settled(self, values: Values) -> bool:
        """So it is computed in a way of its own, which sees to that; of some images, as it is written."""
        images = values[self._images]
        fits = images.dtype == torch.float32 and images.dim() == 4 and images.is_contiguous()
        return fits and (self.added is None or _like(values[self.added], images))

    def run(self, values: Values, notes: Notes, order: Order) -> Values:
        if not self.is_settled(values):
            return self.code.run(values)
        images = values[self._images]
        added = None if self.added is None else values[self.added]
        values.clear()
        (name,) = self.code.makes
        if not order.taped:
            return {name: self.compute(images, added, notes)}
        weights = self.module.weight, self.module.bias
        box = order.boxes[name]
        return {name: _Normed.apply(images, added, *weights, self, notes, order.mode, box)}

    def compute(self, images: Tensor, added: Tensor | None, notes: Notes) -> Tensor:
        if notes.statistics is None:
            result, notes.statistics = _first(self.module, images)
        else:
            result = refound(self.module, images, notes.statistics)
        if added is not None:
            result.add_(added)
        return result if self.activation is None else self.activation.apply_(result)


def _like(one: Tensor, two: Tensor) -> bool:
    return (one.shape, one.dtype, one.stride()) == (two.shape, two.dtype, two.stride())


def _first(module: nn.BatchNorm2d, images: Tensor) -> tuple[Tensor, Statistics]:
    """As nn.BatchNorm2d does it, its counter and running statistics included."""
    if images.numel() == images.shape[1]:  # as torch says it
        raise ValueError(f"Expected more than 1 value per channel when training, got {images.shape}")
    factor = 0.0 if module.momentum is None else module.momentum
    if module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            factor = 1.0 / float(module.num_batches_tracked)
    result, mean, inverse = torch.native_batch_norm(
        images,
        module.weight,
        module.bias,
        module.running_mean if module.track_running_stats else None,
        module.running_var if module.track_running_stats else None,
        True,
        factor,
        module.eps,
    )
    return result, Statistics(mean, inverse)


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, added: Any, weight: Any, bias: Any, *rest: Any) -> Tensor:
        recipe, notes, mode, box = rest
        result: Tensor = recipe.compute(images, added, notes)
        ctx.recipe, ctx.statistics, ctx.box = recipe, notes.statistics, box
        activation = recipe.activation
        seen = None
        if activation is not None:
            seen = packed(activation.passes(result)) if mode == 2 else result
        ctx.mode = mode
        ctx.save_for_backward(images, weight, seen)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        images, weight, seen = ctx.saved_tensors
        gradient, alone = gradients[0], ctx.box.alone
        activation = ctx.recipe.activation
        if activation is not None:
            if ctx.mode == 2:
                gradient = masked(gradient, seen, activation, in_place=alone)
            else:
                gradient = activation.backward(gradient, seen, in_place=alone)
            alone = True
        del seen
        wants_images, wants_added = ctx.needs_input_grad[:2]
        found = gradient_of_norm(
            gradient,
            images,
            weight,
            ctx.statistics,
            ctx.recipe.module.eps,
            wanted=(wants_images, *ctx.needs_input_grad[2:4]),
            in_blocks=ctx.mode > 0,
            in_place=alone and not wants_added,
        )
        return found[0], gradient if wants_added else None, *found[1:], None, None, None, None


_ADDITIONS: dict[Any, bool] = {operator.add: True, torch.add: True, operator.iadd: False}  # either way round?


def _norm(code: Code) -> Norm | None:
    """[norm], [norm, activation], [norm, addition] or [norm, addition, activation], and nothing else read."""
    calls, modules = list(code.calls), code.modules
    if len(code.makes) != 1 or code.makes[0] != calls[-1].name or calls[0].op != "call_module":
        return None
    module = modules[0]
    if type(module) is not nn.BatchNorm2d or not module.training or _weights_of_other_type(module):
        return None
    result, calls, calls_input = calls[0], calls[1:], calls[0].all_input_nodes[0]
    added = None
    if calls and calls[0].target in _ADDITIONS:
        call = calls.pop(0)
        if call.kwargs or len(call.args) != 2 or not all(isinstance(a, fx.Node) for a in call.args):
            return None
        first, second = call.args
        if calls_input in (first, second):
            return None  # it would be read twice: autograd adds up in another order
        if first is result and second is not result:
            added = second
        elif second is result and first is not result and _ADDITIONS[call.target]:
            added = first
        else:
            return None
        result = call
    activation = None
    if calls:
        call = calls.pop(0)
        activation = _activation(call, dict(zip(_paths(code), modules, strict=True)))
        if activation is None or list(call.all_input_nodes) != [result]:
            return None
    if calls:
        return None
    return Norm(code, module, None if added is None else str(added.name), activation)  # type: ignore[union-attr]


def _weights_of_other_type(module: nn.BatchNorm2d) -> bool:
    tensors = [t for t in (*module.parameters(), module.running_mean) if t is not None]
    return any(tensor.dtype != torch.float32 for tensor in tensors)


def _paths(code: Code) -> list[str]:
    return [call.name for call in code.calls if call.op == "call_module"]


_FUNCTIONS: dict[Any, Callable[[], nn.Module]] = {
    functional.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    functional.relu6: nn.ReLU6,
}


def _activation(call: fx.Node, modules: dict[str, nn.Module]) -> Activation | None:
    if call.op == "call_module":
        return Activation.of(modules[call.name])
    if call.op == "call_function" and call.target in _FUNCTIONS and len(call.args) == 1:
        return Activation.of(_FUNCTIONS[call.target]())
    return None
