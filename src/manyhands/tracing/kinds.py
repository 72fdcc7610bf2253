"""One table: a call in a model's forward -> the kind of layer it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.errors import RequestError
from manyhands.ir.geometry import Shape
from manyhands.ir.graph import (
    AdaptivePool,
    Along,
    BatchNorm,
    Concatenate,
    Convolve,
    Deconvolve,
    Dropout,
    Expand,
    GroupNorm,
    Linear,
    Mean,
    Mode,
    Pad,
    Pointwise,
    Pool,
    Rearrange,
    Reduce,
    Resize,
    Slide,
    Take,
    Window,
)
from manyhands.tracing.calls import Call, Kind, Ref, Unsplittable
from manyhands.tracing.factors import (
    channel_shuffle_factors,
    permute_factors,
    pixel_shuffle_factors,
    pixel_unshuffle_factors,
    view_factors,
)


def describe(call: Call) -> Kind:
    """The kind of a call. Raises Unsplittable, with the reason, for one that has to run whole."""
    name = call.function
    if name in RANDOM and call.training:
        raise RequestError(f"{name} draws random numbers of its own, which no plan can repeat. Use Dropout.")
    if name in POINTWISE:
        return _pointwise(call)
    if handler := HANDLERS.get(name):
        return handler(call)
    raise Unsplittable(f"manyhands does not know how to cut {name}")


POINTWISE = frozenset(
    """add sub mul truediv div neg pow rsub radd rmul relu relu6 leaky_relu elu selu celu gelu silu mish
    hardswish hardsigmoid hardtanh softplus softsign logsigmoid tanhshrink softshrink hardshrink threshold
    sigmoid tanh exp log log1p sqrt rsqrt abs clamp clamp_min clamp_max clip where maximum minimum lerp square
    reciprocal sign round floor ceil erf sin cos identity contiguous clone detach float double half to type_as
    eq ne lt le gt ge logical_and logical_or logical_not addcmul addcdiv masked_fill multiply subtract
    divide negative absolute expm1 sinh cosh atan floordiv mod remainder zeros_like ones_like
    nan_to_num""".split()  # noqa: SIM905
)
RANDOM = frozenset(
    """rand_like randn_like bernoulli rrelu gumbel_softmax alpha_dropout feature_alpha_dropout rand randn
    fractional_max_pool2d stochastic_depth drop_block2d normal multinomial randint uniform exponential
    random cauchy log_normal geometric poisson randperm""".split()  # noqa: SIM905
)


def pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)):
        return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
    return value, value


def _dimensions(call: Call, value: Any) -> tuple[int, ...]:
    rank = len(call.source.shape)
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(not isinstance(v, int) for v in values):
        raise Unsplittable(f"{call.function} without a dimension")
    return tuple(sorted(v % rank for v in values))


def _pointwise(call: Call) -> Kind:
    tensors = tuple(arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, Ref))
    for tensor in tensors:
        padded = (1,) * (len(call.result) - len(tensor.shape)) + tensor.shape
        if len(padded) != len(call.result) or any(
            n not in (1, m) for n, m in zip(padded, call.result, strict=True)
        ):
            raise Unsplittable(f"{call.function} of shapes that do not broadcast to its result")
    return Kind(Pointwise(), tensors)


def _along(position: int, default: int | None = None) -> Callable[[Call], Kind]:
    """A handler for what works along the dimension given at this position of the arguments."""

    def describe_along(call: Call) -> Kind:
        value = call.get(position, "dims" if call.function == "flip" else "dim", default)
        if call.function == "flip" and isinstance(value, int):
            value = call.args[1:]
        return Kind(Along(_dimensions(call, value)), (call.source,))

    return describe_along


def _prelu(call: Call) -> Kind:
    weight = call.get(1, "weight")
    if weight.parameter is None:
        raise Unsplittable("its weights are computed in forward")
    return Kind(Pointwise(), (call.source,), (("weight", weight),))


def _image(call: Call) -> Ref:
    if len(call.source.shape) != 4:
        raise Unsplittable(f"{call.function} of a tensor that is not (batch, channels, rows, columns)")
    return call.source


def _convolve(call: Call) -> Kind:
    source, weight, bias = _image(call), call.get(1, "weight"), call.get(2, "bias")
    if weight.parameter is None or (bias is not None and bias.parameter is None):
        raise Unsplittable("its weights are computed in forward")
    stride, dilation = pair(call.get(3, "stride", 1)), pair(call.get(5, "dilation", 1))
    padding, kernel = call.get(4, "padding", 0), weight.shape[2:]
    slides = []
    for axis in (0, 1):
        if padding == "same":  # the odd one goes behind, as torch puts it
            total = dilation[axis] * (kernel[axis] - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = 0 if padding == "valid" else pair(padding)[axis]
        slides.append(Slide(kernel[axis], stride[axis], before, after, dilation[axis]))
    mode = Mode("constant" if call.kwargs.get("mode", "zeros") == "zeros" else call.kwargs["mode"])
    weights = (("weight", weight),) + ((("bias", bias),) if bias is not None else ())
    return Kind(Convolve(Window(*slides), call.get(6, "groups", 1), mode), (source,), weights)


def _deconvolve(call: Call) -> Kind:
    source, weight, bias = _image(call), call.get(1, "weight"), call.get(2, "bias")
    if weight.parameter is None or (bias is not None and bias.parameter is None):
        raise Unsplittable("its weights are computed in forward")
    stride, padding = pair(call.get(3, "stride", 1)), pair(call.get(4, "padding", 0))
    dilation = pair(call.get(7, "dilation", 1))
    slides = (Slide(weight.shape[2 + a], stride[a], padding[a], padding[a], dilation[a]) for a in (0, 1))
    weights = (("weight", weight),) + ((("bias", bias),) if bias is not None else ())
    return Kind(Deconvolve(Window(*slides), call.get(6, "groups", 1)), (source,), weights)


def _linear(call: Call) -> Kind:
    weight, bias = call.get(1, "weight"), call.get(2, "bias")
    if weight.parameter is None or (bias is not None and bias.parameter is None):
        raise Unsplittable("its weights are computed in forward")
    return Kind(
        Linear(), (call.source,), (("weight", weight),) + ((("bias", bias),) if bias is not None else ())
    )


def _pool(mode: Mode) -> Callable[[Call], Kind]:
    def describe_pool(call: Call) -> Kind:
        source, maximum = _image(call), mode is Mode.MAX
        kernel = pair(call.get(1, "kernel_size"))
        stride, padding = pair(call.get(2, "stride") or kernel), pair(call.get(3, "padding", 0))
        dilation = pair(call.get(4, "dilation", 1)) if maximum else (1, 1)
        if maximum and call.get(6, "return_indices", False):
            raise Unsplittable("it returns indices")
        include = True if maximum else call.get(5, "count_include_pad", True)
        divisor = None if maximum else call.get(6, "divisor_override")
        slides = (Slide(kernel[a], stride[a], padding[a], padding[a], dilation[a]) for a in (0, 1))
        return Kind(Pool(mode, Window(*slides), include, divisor), (source,))

    return describe_pool


def _adaptive_pool(mode: Mode) -> Callable[[Call], Kind]:
    def describe_pool(call: Call) -> Kind:
        source = _image(call)
        if call.get(2, "return_indices", False):
            raise Unsplittable("it returns indices")
        if mode is Mode.AVERAGE and call.result[2:] == (1, 1):
            return Kind(Mean(keep=True), (source,))
        return Kind(AdaptivePool(mode), (source,))

    return describe_pool


def _mean(call: Call) -> Kind:
    dimensions = _dimensions(call, call.get(1, "dim"))
    keep = len(call.result) == len(call.source.shape)
    if call.function == "mean" and dimensions == (2, 3) and len(call.source.shape) == 4:
        return Kind(Mean(keep), (call.source,))
    if call.function in ("max", "min"):
        raise Unsplittable(f"{call.function} over a dimension returns two tensors")
    return Kind(Reduce(dimensions, keep), (call.source,))


def _interpolate(call: Call) -> Kind:
    source, mode = _image(call), call.get(3, "mode", "nearest")
    align, factors = bool(call.get(4, "align_corners", False)), call.get(2, "scale_factor")
    if mode not in ("nearest", "bilinear") or call.get(6, "antialias", False):
        return Kind(Along((2, 3)), (source,))
    known = None if factors is None or call.get(5, "recompute_scale_factor") else pair(factors)
    scales = []
    for axis in (0, 1):
        size, result = source.shape[2 + axis], call.result[2 + axis]
        if size == result:  # whatever the factor, torch copies
            scales.append(1.0)
        elif align and mode == "bilinear":
            scales.append((size - 1) / (result - 1) if result > 1 else 0.0)
        else:
            scales.append(1.0 / known[axis] if known and known[axis] else size / result)
    return Kind(Resize(Mode(mode), align, (scales[0], scales[1])), (source,))


def _view(call: Call) -> Kind:
    factors = view_factors(call.source.shape, call.result)
    if factors is None:
        raise Unsplittable(f"a view from {call.source.shape} to {call.result} shares no factors")
    return Kind(factors, (call.source,))


def _permute(call: Call) -> Kind:
    shape, rank = call.source.shape, len(call.source.shape)
    if call.function == "permute":
        order = call.args[1:] if isinstance(call.get(1, "dims"), int) else tuple(call.get(1, "dims"))
    else:
        first, second = call.get(1, "dim0") % rank, call.get(2, "dim1") % rank
        order = tuple(second if d == first else first if d == second else d for d in range(rank))
    return Kind(permute_factors(shape, tuple(order)), (call.source,))


def _shuffle(factors: Callable[[Shape, int], Rearrange], keyword: str) -> Callable[[Call], Kind]:
    return lambda call: Kind(factors(_image(call).shape, call.get(1, keyword)), (call.source,))


def _concatenate(call: Call) -> Kind:
    tensors, dimension = call.get(0, "tensors"), call.get(1, "dim", 0)
    if not all(isinstance(t, Ref) and len(t.shape) == len(call.result) for t in tensors):
        raise Unsplittable("it joins tensors of different rank")
    return Kind(Concatenate(dimension % len(call.result)), tuple(tensors))


def _pad(call: Call) -> Kind:
    amounts, rank = tuple(call.get(1, "pad")), len(call.source.shape)
    before, after = [0] * rank, [0] * rank
    for axis in range(len(amounts) // 2):
        before[rank - 1 - axis], after[rank - 1 - axis] = amounts[2 * axis], amounts[2 * axis + 1]
    mode = Mode(call.get(2, "mode", "constant"))
    if min(before + after) < 0 and mode is not Mode.CONSTANT:
        raise Unsplittable("it pads by negative amounts")
    return Kind(Pad(mode, tuple(before), float(call.get(3, "value", 0.0) or 0.0)), (call.source,))


def _narrow(call: Call) -> Kind:
    rank = len(call.source.shape)
    starts = [0] * rank
    starts[call.get(1, "dim") % rank] = call.get(2, "start")
    return Kind(Take(tuple(starts), (1,) * rank), (call.source,))


def _batch_norm(call: Call) -> Kind:
    training = bool(call.get(5, "training", False))
    operation = BatchNorm(training, call.get(7, "eps", 1e-5), call.get(6, "momentum", 0.1))
    names = ("running_mean", "running_var", "weight", "bias", "num_batches_tracked")
    refs = [call.get(i + 1, name) for i, name in enumerate(names[:4])] + [call.kwargs.get(names[4])]
    if any(ref is not None and ref.parameter is None for ref in refs):
        raise Unsplittable("its weights are computed in forward")
    weights = tuple((name, ref) for name, ref in zip(names, refs, strict=True) if ref is not None)
    return Kind(operation, (call.source,), weights)


def _group_norm(call: Call) -> Kind:
    instance = call.function == "instance_norm"
    if instance and (call.get(1, "running_mean") is not None or len(call.source.shape) < 3):
        raise Unsplittable("instance norm with running statistics")
    groups = call.source.shape[1] if instance else call.get(1, "num_groups")
    at = 3 if instance else 2
    names = {"weight": call.get(at, "weight"), "bias": call.get(at + 1, "bias")}
    weights = tuple((name, ref) for name, ref in names.items() if ref is not None)
    if any(ref.parameter is None for _, ref in weights):
        raise Unsplittable("its weights are computed in forward")
    eps = call.kwargs.get("eps", call.args[7] if instance and len(call.args) > 7 else 1e-5)
    if not instance and len(call.args) > 4:
        eps = call.args[4]
    return Kind(GroupNorm(groups, eps), (call.source,), weights)


def _layer_norm(call: Call) -> Kind:
    rank = len(call.source.shape)
    count = len(call.get(1, "normalized_shape"))
    names = {"weight": call.get(2, "weight"), "bias": call.get(3, "bias")}
    inputs = (call.source, *(ref for ref in names.values() if ref is not None and ref.parameter is None))
    weights = tuple((n, ref) for n, ref in names.items() if ref is not None and ref.parameter is not None)
    return Kind(Along(tuple(range(rank - count, rank))), inputs, weights)


def _dropout(call: Call) -> Kind:
    probability = call.get(1, "p", 0.5)
    if not call.get(2, "training", True) or not probability:
        return Kind(Pointwise(), (call.source,))
    return Kind(Dropout(float(probability), call.function != "dropout"), (call.source,))


def _batched(call: Call) -> Kind:
    """Products of matrices, one for each sample: the batch may be cut, the rest is seen whole."""
    tensors = tuple(arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, Ref))
    rank = len(call.result)
    if rank < 3 or any(len(t.shape) != rank or t.shape[0] != call.result[0] for t in tensors):
        raise Unsplittable(f"{call.function} without a batch on the first dimension")
    return Kind(Along(tuple(range(1, rank))), tensors)


HANDLERS: dict[str, Callable[[Call], Kind]] = {
    "conv2d": _convolve,
    "conv_transpose2d": _deconvolve,
    "linear": _linear,
    "max_pool2d": _pool(Mode.MAX),
    "avg_pool2d": _pool(Mode.AVERAGE),
    "adaptive_max_pool2d": _adaptive_pool(Mode.MAX),
    "adaptive_avg_pool2d": _adaptive_pool(Mode.AVERAGE),
    "interpolate": _interpolate,
    "upsample": _interpolate,
    "pixel_shuffle": _shuffle(pixel_shuffle_factors, "upscale_factor"),
    "pixel_unshuffle": _shuffle(pixel_unshuffle_factors, "downscale_factor"),
    "channel_shuffle": _shuffle(channel_shuffle_factors, "groups"),
    "permute": _permute,
    "transpose": _permute,
    "swapaxes": _permute,
    "expand": lambda call: Kind(Expand(), (call.source,)),
    "expand_as": lambda call: Kind(Expand(), (call.source,)),
    "pad": _pad,
    "prelu": _prelu,
    "softmax": _along(1),
    "log_softmax": _along(1),
    "softmin": _along(1),
    "cumsum": _along(1),
    "flip": _along(1),
    "glu": _along(1, -1),
    "normalize": _along(2, 1),
    "local_response_norm": lambda call: Kind(Along((1,)), (call.source,)),
    "narrow": _narrow,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
    "dropout1d": _dropout,
    "dropout2d": _dropout,
    "dropout3d": _dropout,
    "feature_dropout": _dropout,
}
HANDLERS |= dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "std", "var", "prod"), _mean)
HANDLERS |= dict.fromkeys(("cat", "concat", "concatenate"), _concatenate)
HANDLERS |= dict.fromkeys(("matmul", "bmm", "scaled_dot_product_attention"), _batched)
HANDLERS |= dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _view)
HANDLERS |= dict.fromkeys(("ravel", "view_as", "reshape_as"), _view)
