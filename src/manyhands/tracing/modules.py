"""One table: a torch.nn module -> the functional call it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from manyhands.errors import RequestError
from manyhands.ir.graph import Operation, Pointwise

Arguments = dict[str, Any]


def as_function(module: nn.Module) -> tuple[str, Arguments] | None:
    """Name and arguments of the function a module calls, or None for a module we do not know."""
    if module._forward_hooks or module._forward_pre_hooks:  # it does more than its type says
        return None
    describe = MODULES.get(type(module))
    return describe(module) if describe else None


def refuse_hooks(model: nn.Module) -> None:
    """Nobody runs the model as such, and devices have parts of gradients: what hangs on it would be lost."""
    if model._forward_hooks or model._forward_pre_hooks:
        raise RequestError(f"{type(model).__name__} has a hook on its forward, which no plan would call.")
    for path, module in model.named_modules():
        name = path or type(model).__name__
        if module._backward_hooks or module._backward_pre_hooks:
            raise RequestError(f"{name} has a hook on its backward: devices have parts of gradients.")
        if "forward" in vars(module):
            raise RequestError(f"{name} has a forward of its own beside its class's. Make it a class.")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise RequestError(f"{name} has a hook on its gradient, of which devices have parts.")


def rectified(operation: Operation, node: fx.Node, model: nn.Module) -> Operation:
    """The operation of a call; of one of torch's own rectifiers, as nothing else, with that said."""
    if not isinstance(operation, Pointwise):
        return operation
    if node.op == "call_module":
        rectifies = type(model.get_submodule(str(node.target))) in (nn.ReLU, nn.ReLU6)
    else:
        rectifies = node.target in RECTIFIERS.get(node.op, ())
    return replace(operation, rectifies=rectifies)


def draws_random(module: nn.Module) -> bool:
    """Does a module that is to run whole contain dropout or the like, switched on?"""
    return any(
        inner.training and (isinstance(inner, RANDOM_MODULES) or _dropout_of(inner) > 0)
        for inner in module.modules()
    )


def _dropout_of(module: nn.Module) -> float:
    """Probability with which a module drops what it computes."""
    probability = getattr(module, "p" if isinstance(module, DROPOUTS) else "dropout", 0.0)
    return probability if isinstance(probability, float) else 0.0


def _named(function: str, *attributes: str, **renamed: str) -> Callable[[nn.Module], tuple[str, Arguments]]:
    """Arguments taken from the module's attributes, under the same or another name."""
    pairs = {name: name for name in attributes} | renamed

    def describe(module: nn.Module) -> tuple[str, Arguments]:
        return function, {argument: getattr(module, attribute) for argument, attribute in pairs.items()}

    return describe


def _batch_norm(module: nn.Module) -> tuple[str, Arguments]:
    training = module.training or module.running_mean is None
    return "batch_norm", {"training": training, "momentum": module.momentum, "eps": module.eps}


def _instance_norm(module: nn.Module) -> tuple[str, Arguments]:
    return "instance_norm", {"eps": module.eps}


def _pad(module: nn.Module) -> tuple[str, Arguments]:
    kind = type(module).__name__
    modes = {"Ref": "reflect", "Rep": "replicate", "Cir": "circular"}
    return "pad", {
        "pad": module.padding,
        "mode": modes.get(kind[:3], "constant"),
        "value": getattr(module, "value", 0.0),
    }


def _dropout(function: str) -> Callable[[nn.Module], tuple[str, Arguments]]:
    return lambda module: (function, {"p": module.p, "training": module.training})


RECTIFIERS: dict[str, tuple[Any, ...]] = {
    "call_function": (torch.relu, torch.relu_, F.relu, F.relu6),
    "call_method": ("relu", "relu_"),
}
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
RANDOM_MODULES = (nn.RReLU, nn.FractionalMaxPool2d)
_CONVOLUTION = ("stride", "padding", "dilation", "groups")

MODULES: dict[type, Callable[[Any], tuple[str, Arguments]]] = {
    nn.Conv2d: _named("conv2d", *_CONVOLUTION, mode="padding_mode"),
    nn.ConvTranspose2d: _named("conv_transpose2d", *_CONVOLUTION),
    nn.Linear: _named("linear"),
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.SyncBatchNorm: _batch_norm,
    nn.GroupNorm: _named("group_norm", "num_groups", "eps"),
    nn.InstanceNorm2d: _instance_norm,
    nn.LayerNorm: _named("layer_norm", "normalized_shape", "eps"),
    nn.MaxPool2d: _named("max_pool2d", "kernel_size", "stride", "padding", "dilation", "return_indices"),
    nn.AvgPool2d: _named(
        "avg_pool2d", "kernel_size", "stride", "padding", "count_include_pad", "divisor_override"
    ),
    nn.AdaptiveAvgPool2d: _named("adaptive_avg_pool2d"),
    nn.AdaptiveMaxPool2d: _named("adaptive_max_pool2d", "return_indices"),
    nn.PixelShuffle: _named("pixel_shuffle", "upscale_factor"),
    nn.PixelUnshuffle: _named("pixel_unshuffle", "downscale_factor"),
    nn.ChannelShuffle: _named("channel_shuffle", "groups"),
    nn.Flatten: _named("flatten"),
    nn.Unflatten: _named("unflatten"),
    nn.Dropout: _dropout("dropout"),
    nn.Dropout1d: _dropout("dropout1d"),
    nn.Dropout2d: _dropout("dropout2d"),
    nn.Dropout3d: _dropout("dropout3d"),
    nn.AlphaDropout: _dropout("alpha_dropout"),
    nn.FeatureAlphaDropout: _dropout("feature_alpha_dropout"),
    nn.RReLU: _named("rrelu"),
    nn.Softmax: _named("softmax", "dim"),
    nn.LogSoftmax: _named("log_softmax", "dim"),
    nn.Softmax2d: lambda module: ("softmax", {"dim": -3}),
    nn.GLU: _named("glu", "dim"),
    nn.LocalResponseNorm: _named("local_response_norm"),
    nn.PReLU: _named("prelu"),
}
for _module in (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d):
    MODULES[_module] = _named("interpolate", "size", "scale_factor", "mode", "align_corners")
for _padding in (nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d):
    MODULES[_padding] = _pad
POINTWISE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish),
    *(nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink),
    *(nn.Hardshrink, nn.Threshold, nn.Sigmoid, nn.Tanh, nn.Identity),
)
for _pointwise in POINTWISE_MODULES:
    MODULES[_pointwise] = lambda module: ("identity", {})
