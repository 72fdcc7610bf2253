"""Arithmetic of torch's own that holds fewer tensors at once, and gives the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BANDS = 8  # of rows, into which a large sample is cut
BAND_ELEMENTS = 1 << 18  # of a band at least: for small images torch takes other ways, with other bits
BLOCK_BYTES = 1 << 19  # of a tensor that is worked on at a time


@dataclass(frozen=True)
class Statistics:
    """Mean and inverse standard deviation of each channel of a batch."""

    mean: Tensor
    inverse: Tensor


def refound(module: nn.BatchNorm2d, images: Tensor, statistics: Statistics) -> Tensor:
    """The norm of a batch whose statistics are known: the bits of the first time, without measuring again.

    That is torch's norm for evaluation, for which the variance is 1 and the weights are what torch would
    multiply by: it rounds the inverse of a variance otherwise than in training.
    """
    scale = statistics.inverse if module.weight is None else statistics.inverse * module.weight
    ones = torch.ones_like(scale)
    return torch.native_batch_norm(images, scale, module.bias, statistics.mean, ones, False, 0.0, 0.0)[0]


def gradient_of_norm(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor | None,
    statistics: Statistics,
    eps: float,
    wanted: tuple[bool, bool, bool],
    *,
    in_blocks: bool,
    in_place: bool,
) -> tuple[Any, Any, Any]:
    """Gradients of what was normed, of weight and bias.

    `in_blocks`: a few channels at a time, which do not mix, in place if that may be.
    """

    def of(gradient: Tensor, images: Tensor, part: slice) -> list[Any]:
        found = torch.ops.aten.native_batch_norm_backward(
            gradient,
            images,
            None if weight is None else weight[part],
            None,
            None,
            statistics.mean[part],
            statistics.inverse[part],
            True,
            eps,
            list(wanted),
        )
        return [tensor if wants else None for tensor, wants in zip(found, wanted, strict=True)]

    channels = images.shape[1]
    count = max(1, images.numel() * images.element_size() // BLOCK_BYTES)
    contiguous = images.is_contiguous() and gradient.is_contiguous()
    if not in_blocks or count == 1 or not contiguous or not wanted[0]:
        first, second, third = of(gradient, images, slice(None))
        return first, second, third
    result = gradient if in_place else torch.empty_like(images)
    size = -(-channels // count)
    others = []
    for start in range(0, channels, size):
        part = slice(start, start + size)
        result[:, part], *other = of(gradient[:, part].contiguous(), images[:, part].contiguous(), part)
        others.append(other)
    weights, biases = zip(*others, strict=True)
    return result, torch.cat(weights) if wanted[1] else None, torch.cat(biases) if wanted[2] else None


@dataclass(frozen=True)
class Activation:
    """An activation that lets gradients pass where its result is between two bounds, else a part of them."""

    low: float
    high: float
    slope: float

    @classmethod
    def of(cls, module: nn.Module) -> Activation | None:
        if type(module) is nn.ReLU:
            return cls(0.0, float("inf"), 0.0)
        if type(module) is nn.ReLU6:
            return cls(0.0, 6.0, 0.0)
        if type(module) is nn.LeakyReLU and module.negative_slope > 0:
            return cls(0.0, float("inf"), module.negative_slope)
        return None

    def apply_(self, images: Tensor) -> Tensor:
        if self.slope:
            return torch.nn.functional.leaky_relu_(images, self.slope)
        return images.relu_() if self.high == float("inf") else images.clamp_(self.low, self.high)

    def passes(self, result: Tensor) -> Tensor:
        if self.slope:
            return result > self.low
        stops = result <= self.low  # so that what is no number passes, as torch has it
        if self.high != float("inf"):
            stops.logical_or_(result >= self.high)
        return stops.logical_not_()

    def backward(self, gradient: Tensor, result: Tensor, *, in_place: bool) -> Tensor:
        target = gradient if in_place else torch.empty_like(gradient)
        if self.slope:
            found = torch.ops.aten.leaky_relu_backward.grad_input(
                gradient, result, self.slope, True, grad_input=target
            )
        elif self.high == float("inf"):
            found = torch.ops.aten.threshold_backward.grad_input(gradient, result, 0, grad_input=target)
        else:
            found = torch.ops.aten.hardtanh_backward.grad_input(
                gradient, result, self.low, self.high, grad_input=target
            )
        assert isinstance(found, Tensor)
        return found


def packed(mask: Tensor) -> Tensor:
    """One bit an element."""
    return torch.from_numpy(np.packbits(mask.contiguous().view(-1).numpy()))


def masked(gradient: Tensor, bits: Tensor, activation: Activation, *, in_place: bool) -> Tensor:
    """The gradient where the bits are set, and a part of it elsewhere; some samples at a time."""
    result = gradient if in_place else gradient.clone(memory_format=torch.contiguous_format)
    if not result.is_contiguous():
        result = result.contiguous()
    flat = result.view(-1)
    step = BLOCK_BYTES  # elements, a multiple of eight
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        unpacked = np.unpackbits(bits[start // 8 : (start + step) // 8].numpy(), count=part.numel())
        stops = torch.from_numpy(unpacked).view(torch.bool).logical_not_()
        if activation.slope:
            part.mul_(torch.where(stops, activation.slope, 1.0))
        else:
            part.masked_fill_(stops, 0.0)
    return result


def pool_places(images: Tensor, module: nn.MaxPool2d) -> tuple[Tensor, Tensor]:
    """The result of a max pool, and a byte for each: where in its window it was."""
    results, places = [], []
    for image in images.split(1):
        result, indices = torch.ops.aten.max_pool2d_with_indices(image, *_pool_settings(module))
        results.append(result)
        width, columns = image.shape[3], _pair(module.kernel_size)[1]
        rows, offsets = _window_starts(result, module)
        indices = indices.to(torch.int32)
        row = torch.div(indices, width, rounding_mode="floor")
        indices.sub_(row * width).sub_(offsets)
        places.append(row.sub_(rows).mul_(columns).add_(indices).to(torch.uint8))
    return torch.cat(results), torch.cat(places)


def pool_gradient(gradient: Tensor, places: Tensor, shape: torch.Size, module: nn.MaxPool2d) -> Tensor:
    """The gradient of what was pooled, sample by sample."""
    result = gradient.new_empty(shape)
    columns = _pair(module.kernel_size)[1]
    for number, (part, place) in enumerate(zip(gradient.split(1), places.split(1), strict=True)):
        rows, offsets = _window_starts(part, module)
        row = torch.div(place, columns, rounding_mode="floor")
        indices = (place - row * columns).to(torch.int64).add_(offsets)
        indices.add_(row.to(torch.int32).add_(rows).mul_(shape[3]))
        target = result[number : number + 1]
        torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
            part.contiguous(), target, *_pool_settings(module), indices, grad_input=target
        )
    return result


def _window_starts(result: Tensor, module: nn.MaxPool2d) -> tuple[Tensor, Tensor]:
    strides, paddings = _pair(module.stride), _pair(module.padding)
    rows = torch.arange(result.shape[2], dtype=torch.int32) * strides[0] - paddings[0]
    columns = torch.arange(result.shape[3], dtype=torch.int32) * strides[1] - paddings[1]
    return rows[:, None], columns


def _pool_settings(module: nn.MaxPool2d) -> tuple[Any, ...]:
    pairs = (_pair(v) for v in (module.kernel_size, module.stride, module.padding, module.dilation))
    return *pairs, module.ceil_mode


def _pair(value: Any) -> list[int]:
    return list(value) if isinstance(value, tuple | list) else [value, value]


def gradient_of_convolution(
    gradient: Tensor, images: Tensor, module: nn.Conv2d, wanted: list[bool], *, in_parts: bool
) -> tuple[Any, ...]:
    """Gradients of images, weight and bias.

    `in_parts`: torch's libraries copy what they work on, so that of the images is computed sample by sample,
    or of one sample by bands of rows, and after the others, which would find it in the way. It depends on the
    libraries whether that gives the same bits.
    """
    if not (in_parts and wanted[0]):
        found = _gradient_of_convolution(gradient, images, module, wanted)
        return tuple(g if w else None for g, w in zip(found, wanted, strict=True))
    others = [False, *wanted[1:]]
    found = _gradient_of_convolution(gradient, images, module, others) if any(others) else (None,) * 3
    of_images = torch.empty_like(images)
    for number in range(len(images)) if len(images) > 1 else ():
        one = slice(number, number + 1)
        of_images[one] = _gradient_of_convolution(gradient[one], images[one], module, [True, False, False])[0]
    if len(images) == 1:
        height = images.shape[2]
        count = max(1, min(BANDS, images.numel() // BAND_ELEMENTS))
        for number in range(count):
            band = slice(number * height // count, (number + 1) * height // count)
            of_images[:, :, band] = _band(gradient, images, module, band.start, band.stop)
    return of_images, *(g if w else None for g, w in zip(found[1:], wanted[1:], strict=True))


def _band(gradient: Tensor, images: Tensor, module: nn.Conv2d, first: int, stop: int) -> Tensor:
    """The gradient of some rows of the images, from those rows of the result's that they have a part in."""
    (padding, columns), (stride, _), (dilation, _) = _pair(module.padding), module.stride, module.dilation
    reach = dilation * (module.kernel_size[0] - 1)
    low = max(0, -(-(first + padding - reach) // stride))
    high = min(gradient.shape[2], (stop - 1 + padding) // stride + 1)
    if low >= high:  # rows that no window touches
        return torch.zeros_like(images[:, :, first:stop])
    start = low * stride - padding  # the row of the images at which those windows begin
    touched = (high - 1 - low) * stride + reach + 1
    unread = images.new_empty(1, images.shape[1], touched, images.shape[3])
    settings = module.stride, (0, columns), module.dilation, False, [0, 0], module.groups
    wanted = [True, False, False]
    found = torch.ops.aten.convolution_backward(
        gradient[:, :, low:high], unread, module.weight, None, *settings, wanted
    )[0]
    begin, end = max(first - start, 0), min(stop - start, touched)
    inside: Tensor = found[:, :, begin:end]
    before, after = max(start - first, 0), max(stop - start - touched, 0)  # rows that no window touches
    return torch.nn.functional.pad(inside, (0, 0, before, after)) if before or after else inside


def _gradient_of_convolution(
    gradient: Tensor, images: Tensor, module: nn.Conv2d, wanted: list[bool]
) -> tuple[Any, ...]:
    sizes = None if module.bias is None else [module.out_channels]
    settings = module.stride, module.padding, module.dilation, False, [0, 0], module.groups
    found: tuple[Any, ...] = torch.ops.aten.convolution_backward(
        gradient, images, module.weight, sizes, *settings, wanted
    )
    return found
