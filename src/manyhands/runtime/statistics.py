"""One device's part in statistics that all devices add up: putting them together, following, correcting."""

from __future__ import annotations

from torch import Tensor

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import BatchNorm, GroupNorm, Layer
from manyhands.runtime.kernels import count_batch
from manyhands.runtime.norms import Moments, combine, local_sums, mean_correction, norm_correction
from manyhands.runtime.store import Store
from manyhands.runtime.tape import Box

BLOCK_BYTES = 256 << 10  # a part of a tensor that stays in the processor's cache between two operations


def moments_of(store: Store, layer: Layer) -> Moments:
    """The whole statistics of a layer, put together when first asked for."""
    if layer.name not in store.moments:
        exchange, parts = store.territory.exchanges[layer.name], store.parts.pop(layer.name)
        mine = store.territory.device
        for share in exchange.shares:
            if share.device == mine and exchange.own is not None:
                parts[mine] = parts[mine][(slice(None), *share.tile.within(exchange.own.tile))]
        store.moments[layer.name] = combine(layer, exchange, parts, next(iter(parts.values())))
    return store.moments[layer.name]


def follow(
    store: Store, layer: Layer, operation: BatchNorm, moments: Moments, weights: dict[str, Tensor]
) -> None:
    """Running statistics follow those of this batch."""
    momentum = count_batch(weights, operation)
    if "running_mean" not in weights:
        return
    channels = store.territory.computed[layer.name].spans[1]
    mean, variance = moments.at(Tile((moments.tile.spans[0], channels)))
    total = store.territory.exchanges[layer.name].total
    weights["running_mean"].lerp_(mean[0], momentum)
    weights["running_var"].lerp_(variance[0] * (total / max(total - 1, 1)), momentum)


def keep_sums(store: Store, layer: Layer, tile: Tile, box: Box) -> None:
    """What flowed back into a layer's statistics here, from this tile of its result and others before."""
    exchange, mine = store.territory.exchanges[layer.name], store.territory.device
    sums = local_sums(layer, exchange, tile, box, store.moments[layer.name].mean)
    held = store.sums[layer.name]
    held[mine] = held[mine] + sums if mine in held else sums


def correct(store: Store, layer: Layer) -> None:
    """Add what flows back through everybody's statistics to the gradient of the layer's input."""
    name, source, mine = layer.name, layer.inputs[0], store.territory.device
    exchange, home = store.territory.exchanges[name], store.territory.home[source]
    parts = store.sums.pop(name, {})
    if mine in parts:
        tile = next((s.tile for s in exchange.readers if s.device == mine), None)
        assert exchange.known is not None
        sums = parts.pop(mine)
        if tile is not None:
            parts[mine] = sums[(slice(None), *tile.within(exchange.known))]
    if not parts:
        return
    own = store.own_gradient(source)[home.within(store.territory.computed[source])]
    if not isinstance(layer.operation, BatchNorm | GroupNorm):
        own += mean_correction(exchange, parts, own.dim())
        return
    offset, slope = norm_correction(exchange, parts, moments_of(store, layer), layer.operation.eps, own.dim())
    x = store.own_inputs.pop(name, None)
    _add_line(own, store.own(source, home) if x is None else x, offset, slope)


def _add_line(own: Tensor, x: Tensor, offset: Tensor, slope: Tensor) -> None:
    """own += offset + slope * x, some samples or rows at a time, so that memory is read once."""
    if own.dim() < 3 or not own.numel():
        own.addcmul_(slope, x).add_(offset)
        return
    samples = max(1, BLOCK_BYTES // own[0].nbytes)
    rows = max(1, BLOCK_BYTES * own.shape[2] // own[0].nbytes)
    for first in range(0, len(own), samples):
        some = slice(first, first + samples)
        line = some if len(offset) > 1 else slice(None)  # of each sample, or of all
        for top in range(0, own.shape[2], rows):
            where = some, slice(None), slice(top, top + rows)
            own[where].addcmul_(slope[line], x[where]).add_(offset[line])
