"""The region of its inputs and weights that a tile of each kind of layer needs."""

from __future__ import annotations

from math import ceil, floor

from manyhands.ir.geometry import Shape, Span, Tile, empty_like
from manyhands.ir.graph import (
    AdaptivePool,
    Along,
    BatchNorm,
    Concatenate,
    Constant,
    Convolve,
    Deconvolve,
    Dropout,
    Expand,
    GroupNorm,
    Layer,
    Linear,
    Mean,
    Mode,
    Pad,
    Parameter,
    Pointwise,
    Pool,
    Rearrange,
    Reduce,
    Resize,
    Slide,
    Take,
    Whole,
    Window,
)


def needs(layer: Layer, tile: Tile, shapes: tuple[Shape, ...]) -> tuple[Tile, ...]:
    """The region of each input (of these whole shapes) from which `tile` of the result can be computed."""
    if not tile.numel:
        return tuple(empty_like(shape) for shape in shapes)
    match layer.operation:
        case Convolve(window, groups, mode):
            channels = group_span(tile.spans[1], layer.shape[1], shapes[0][1], groups)
            return (_slid(tile, channels, window, shapes[0], mode),)
        case Deconvolve(window, groups):
            channels = group_span(tile.spans[1], layer.shape[1], shapes[0][1], groups)
            return (_unslid(tile, channels, window, shapes[0]),)
        case Pool(_, window):
            return (_slid(tile, tile.spans[1], window, shapes[0], Mode.CONSTANT),)
        case AdaptivePool():
            pairs = zip(tile.spans[2:], shapes[0][2:], layer.shape[2:], strict=True)
            return (Tile(tile.spans[:2] + tuple(_adaptive(s, size, result) for s, size, result in pairs)),)
        case Resize():
            return (_resized(layer.operation, tile, shapes[0]),)
        case Linear():
            return (tile.with_span(len(tile.spans) - 1, Span(0, shapes[0][-1])),)
        case Rearrange():
            return (rearranged(layer.operation, tile),)
        case Concatenate(dimension):
            return _concatenated(dimension, tile, shapes)
        case Take(starts, steps):
            parts = zip(tile.spans, starts, steps, strict=True)
            return (Tile(tuple(Span(a + s.start * d, a + (s.stop - 1) * d + 1) for s, a, d in parts)),)
        case Pad():
            return (_padded(layer.operation, tile, shapes[0]),)
        case Pointwise() | Expand() | Dropout() | BatchNorm() | GroupNorm():
            return tuple(broadcast(tile, shape) for shape in shapes)
        case Along(dimensions):
            return tuple(_along(dimensions, tile, shape) for shape in shapes)
        case Reduce(dimensions, keep):
            return (_reduced(dimensions, keep, tile, shapes[0]),)
        case Mean():
            spans = (*tile.spans[:2], *(Span(0, size) for size in shapes[0][2:]))
            return (Tile(spans),)
        case Whole():
            return tuple(Tile.whole(shape) for shape in shapes)
        case _:
            return ()


def with_ends(layer: Layer, need: Tile, held: Tile) -> Tile:
    """What a convolution reads, with rows and columns at the end that its stride steps over, where held.

    To leave them out would cost a copy of all the others' gradient.
    """
    operation = layer.operation
    if not isinstance(operation, Convolve) or operation.mode is not Mode.CONSTANT:
        return need
    slides = (operation.window.rows, operation.window.columns)
    spans = list(need.spans)
    for d, slide in zip((2, 3), slides, strict=True):
        start, stop = need.spans[d].start, held.spans[d].stop
        padded = start == 0 and slide.before > 0
        if not padded and stop - need.spans[d].stop < slide.stride:
            spans[d] = Span(start, stop)
    return Tile(tuple(spans))


def slide_need(slide: Slide, span: Span) -> Span:
    """Rows that the windows of `span` touch, counted from the image's first; may reach outside of it."""
    start = span.start * slide.stride - slide.before
    return Span(start, (span.stop - 1) * slide.stride - slide.before + slide.reach)


def clip(span: Span, size: int) -> Span:
    """The rows of `span` inside the image, and at least one: a window may lie in the padding alone."""
    start = min(max(span.start, 0), size - 1)
    return Span(start, max(start + 1, min(span.stop, size)))


def _slid(tile: Tile, channels: Span, window: Window, shape: Shape, mode: Mode) -> Tile:
    spans = [tile.spans[0], channels]
    for slide, span, size in zip((window.rows, window.columns), tile.spans[2:], shape[2:], strict=True):
        wanted = slide_need(slide, span)
        spans.append(clip(wanted, size) if mode is Mode.CONSTANT else _folded(wanted, size, mode))
    return Tile(tuple(spans))


def unslide(slide: Slide, span: Span, size: int) -> Span:
    """Input rows that reach any of the rows of `span` in a transposed convolution."""
    start = -((slide.reach - 1 - span.start - slide.before) // slide.stride)
    stop = (span.stop - 1 + slide.before) // slide.stride + 1
    return clip(Span(start, max(start, stop)), size)


def _unslid(tile: Tile, channels: Span, window: Window, shape: Shape) -> Tile:
    pairs = zip((window.rows, window.columns), tile.spans[2:], shape[2:], strict=True)
    spans = tuple(unslide(slide, span, size) for slide, span, size in pairs)
    return Tile((tile.spans[0], channels, *spans))


def group_span(channels: Span, num_out: int, num_in: int, groups: int) -> Span:
    """Input channels of all the groups that these output channels belong to."""
    first, last = group_range(channels, num_out, groups)
    return Span(first * num_in // groups, last * num_in // groups)


def group_range(channels: Span, num_channels: int, groups: int) -> tuple[int, int]:
    size = num_channels // groups
    return channels.start // size, ceil(channels.stop / size)


def _adaptive(span: Span, size: int, result: int) -> Span:
    return Span(span.start * size // result, ceil(span.stop * size / result))


def _resized(resize: Resize, tile: Tile, shape: Shape) -> Tile:
    """One row more on each side than the formula asks for: the kernel rounds in another precision."""
    spans = list(tile.spans[:2])
    for span, size, scale in zip(tile.spans[2:], shape[2:], resize.scales, strict=True):
        spans.append(clip(Span(floor(span.start * scale) - 2, ceil(span.stop * scale) + 2), size))
    return Tile(tuple(spans))


def rearranged(operation: Rearrange, tile: Tile) -> Tile:
    """Whole factors everywhere, but for a factor that is outermost in its dimension on both sides."""
    ranges = factor_ranges(operation, tile)
    spans = []
    for factors in operation.source:
        inner = _product(operation, factors[1:])
        outer = ranges[factors[0]] if factors else Span(0, 1)
        spans.append(Span(outer.start * inner, outer.stop * inner))
    return Tile(tuple(spans))


def factor_ranges(operation: Rearrange, tile: Tile) -> dict[int, Span]:
    """The range of every factor from which `tile` of the result can be put together."""
    leading = {factors[0] for factors in operation.source if factors}
    ranges = {index: Span(0, size) for index, size in enumerate(operation.sizes)}
    for factors, span in zip(operation.target, tile.spans, strict=True):
        if factors and factors[0] in leading:
            inner = _product(operation, factors[1:])
            ranges[factors[0]] = Span(span.start // inner, ceil(span.stop / inner))
    return ranges


def _product(operation: Rearrange, factors: tuple[int, ...]) -> int:
    product = 1
    for factor in factors:
        product *= operation.sizes[factor]
    return product


def _concatenated(dimension: int, tile: Tile, shapes: tuple[Shape, ...]) -> tuple[Tile, ...]:
    tiles, offset = [], 0
    for shape in shapes:
        common = tile.spans[dimension] & Span(offset, offset + shape[dimension])
        part = tile.with_span(dimension, common.shift(-offset))
        tiles.append(part if part.numel else empty_like(shape))
        offset += shape[dimension]
    return tuple(tiles)


def _padded(pad: Pad, tile: Tile, shape: Shape) -> Tile:
    spans = []
    for span, before, size in zip(tile.spans, pad.before, shape, strict=True):
        wanted = span.shift(-before)
        spans.append(clip(wanted, size) if pad.mode is Mode.CONSTANT else _folded(wanted, size, pad.mode))
    return Tile(tuple(spans))


def fold(index: int, size: int, mode: Mode) -> int:
    """The row inside the image that stands in for a row outside of it."""
    match mode:
        case Mode.REFLECT:
            return abs(index) if index < size else 2 * (size - 1) - index
        case Mode.CIRCULAR:
            return index % size
        case _:
            return min(max(index, 0), size - 1)


def _folded(wanted: Span, size: int, mode: Mode) -> Span:
    sources = [fold(index, size, mode) for index in range(wanted.start, wanted.stop)]
    return Span(min(sources), max(sources) + 1)


def broadcast(tile: Tile, shape: Shape) -> Tile:
    """The part of an input of this shape that a tile of the broadcast result reads."""
    spans = tile.spans[len(tile.spans) - len(shape) :]
    return Tile(tuple(Span(0, 1) if n == 1 else span for span, n in zip(spans, shape, strict=True)))


def _along(dimensions: tuple[int, ...], tile: Tile, shape: Shape) -> Tile:
    part = broadcast(tile, shape)
    offset = len(tile.spans) - len(shape)
    for dimension in dimensions:
        if dimension >= offset:
            part = part.with_span(dimension - offset, Span(0, shape[dimension - offset]))
    return part


def _reduced(dimensions: tuple[int, ...], keep: bool, tile: Tile, shape: Shape) -> Tile:
    spans = list(tile.spans)
    if not keep:
        for dimension in sorted(dimensions):
            spans.insert(dimension, Span(0, 1))
    for dimension in dimensions:
        spans[dimension] = Span(0, shape[dimension])
    return Tile(tuple(spans))


def parameter_tiles(layer: Layer, tile: Tile) -> tuple[tuple[Parameter, Tile], ...]:
    """The piece of each weight and buffer that `tile` of the result needs."""
    if not tile.numel:
        return ()
    return tuple((p, _parameter_tile(layer, p, tile)) for p in layer.parameters)


def _parameter_tile(layer: Layer, parameter: Parameter, tile: Tile) -> Tile:
    whole = Tile.whole(parameter.shape)
    if not parameter.shape:
        return whole
    match layer.operation:
        case Convolve(groups=groups):
            first, last = group_range(tile.spans[1], layer.shape[1], groups)
            size = layer.shape[1] // groups
            return whole.with_span(0, tile.spans[1] if groups == 1 else Span(first * size, last * size))
        case Deconvolve(groups=groups):
            return _deconvolution_tile(layer, parameter, tile, groups)
        case Linear():
            return whole.with_span(0, tile.spans[-1])
        case BatchNorm() | GroupNorm():
            return whole.with_span(0, tile.spans[1])
        case Pointwise() if len(parameter.shape) == 1 and parameter.shape[0] == layer.shape[1] > 1:
            return whole.with_span(0, tile.spans[1])
        case Constant():
            return tile
        case _:
            return whole


def _deconvolution_tile(layer: Layer, parameter: Parameter, tile: Tile, groups: int) -> Tile:
    whole = Tile.whole(parameter.shape)
    first, last = group_range(tile.spans[1], layer.shape[1], groups)
    size = layer.shape[1] // groups
    if parameter.role == "bias":
        return whole.with_span(0, tile.spans[1] if groups == 1 else Span(first * size, last * size))
    if groups == 1:
        return whole.with_span(1, tile.spans[1])
    inputs = parameter.shape[0] // groups
    return whole.with_span(0, Span(first * inputs, last * inputs))
