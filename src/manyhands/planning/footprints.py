"""What a layer keeps for backward, and what it needs for a moment while it computes.

The work space of convolutions is as measured of torch's own kernels. With the channels first, the library
reorders input, filters and result into blocks of its own; with the channels last, filters alone. A 1x1
convolution of stride 1 with the channels first is a plain product of matrices and reorders nothing.
"""

from __future__ import annotations

from manyhands.ir.geometry import Shape, Tile
from manyhands.ir.graph import (
    BatchNorm,
    Concatenate,
    Convolve,
    Deconvolve,
    Expand,
    GroupNorm,
    Layer,
    Linear,
    Mode,
    Pool,
    Rearrange,
    Saved,
    Statistic,
    Take,
)
from manyhands.ir.regions import slide_need

FIRST_CHANNELS = 3  # images are read as they lie


def saved_of(layer: Layer) -> Saved:
    """What torch said it keeps of a layer; where nobody asked, what its kind keeps."""
    if layer.saved is not None:
        return layer.saved
    every, none = (True,) * len(layer.inputs), (False,) * len(layer.inputs)
    match layer.operation:
        case Convolve() | Deconvolve() | Linear() | BatchNorm() | GroupNorm():
            return Saved(every, False)
        case Pool(mode=mode):
            return Saved(every, False, extra_bytes=8.0 if mode is Mode.MAX else 0.0)
        case Take() | Expand():
            return Saved(none, False, view=True)
        case Rearrange(source=source, target=target):
            in_order = [f for fs in source for f in fs] == [f for fs in target for f in fs]
            return Saved(none, False, view=in_order, passes=(in_order,))
        case Concatenate():
            return Saved(none, False, passes=every)
        case _ if layer.statistic is Statistic.MEAN:
            return Saved(none, False)
        case _:
            return Saved(none, True)


def forward_workspace(
    layer: Layer, input_bytes: int, filter_bytes: int, result_bytes: int, *, channels_last: bool
) -> tuple[int, ...]:
    """Blocks at the worst moment of a layer's forward, besides its inputs and its result."""
    read = 0 if _reads_image(layer) else input_bytes
    match layer.operation:
        case Convolve() if layer.operation.is_product and not channels_last:
            return ()
        case Convolve() | Deconvolve() if channels_last:
            return (filter_bytes,)
        case Convolve():
            return max((read, filter_bytes), (result_bytes,), key=sum)
        case Deconvolve():
            return max((read, filter_bytes), (result_bytes, result_bytes), key=sum)
        case _:
            return ()


def backward_workspace(
    layer: Layer, input_bytes: int, filter_bytes: int, result_bytes: int, *, channels_last: bool
) -> tuple[int, ...]:
    """Blocks at the worst moment of a layer's backward, besides what it keeps and the gradients it makes."""
    read = 0 if _reads_image(layer) else input_bytes
    match layer.operation:
        case Convolve() if layer.operation.is_product and not channels_last:
            return ()
        case Convolve() | Deconvolve() if channels_last:
            return filter_bytes, filter_bytes
        case Convolve() | Deconvolve():
            return max((read, result_bytes), (filter_bytes,), key=sum)
        case _:
            return ()


def _reads_image(layer: Layer) -> bool:
    weight = layer.parameter("weight")
    return isinstance(layer.operation, Convolve) and weight is not None and weight.shape[1] <= FIRST_CHANNELS


def padded_elements(layer: Layer, tile: Tile, shape: Shape) -> int:
    """Elements of the copy that a convolution makes of its input where a tile needs padding on one side.

    None (0) where the padding is alike on both sides, or as good as that: a few rows too many are computed.
    """
    operation = layer.operation
    if not isinstance(operation, Convolve):
        return 0
    if operation.mode is not Mode.CONSTANT:
        return 0
    uneven, sizes = False, []
    for slide, span, size in zip(
        (operation.window.rows, operation.window.columns), tile.spans[2:], shape[2:], strict=True
    ):
        wanted = slide_need(slide, span)
        before, after = max(-wanted.start, 0), max(wanted.stop - size, 0)
        padding = max(before, after)
        extra = (2 * padding - before - after) / slide.stride
        uneven |= bool((padding - before) % slide.stride) or extra > 0.1 * len(span)
        sizes.append(len(wanted))
    channels = operation_channels(layer, tile, shape)
    return tile.shape[0] * channels * sizes[0] * sizes[1] if uneven else 0


def operation_channels(layer: Layer, tile: Tile, shape: Shape) -> int:
    """Input channels that a tile of a convolution reads."""
    assert isinstance(layer.operation, Convolve)
    if layer.operation.groups == 1:
        return shape[1]
    return max(shape[1] * tile.shape[1] // layer.shape[1], 1)


def comes_in_place(tile: Shape, whole: Shape, *, channels_last: bool) -> bool:
    """Is a tile of what is put together one piece of memory, in the order of the wire?"""
    if len(tile) != 4:
        return tile[1:] == whole[1:]
    rows = tile[0] == 1 or tile[2] == whole[2]
    return channels_last and rows and tile[1] == whole[1] and tile[3] == whole[3]
