"""Of the layers of a step, those that are computed in a way of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from manyhands.ir.graph import BatchNorm, Convolve, Deconvolve, GroupNorm, Layer, Mode
from manyhands.ir.program import Forward, Redo


def can_be_parted(layer: Layer) -> bool:
    """Can some rows or samples of it be computed before the others? Each window touches the image."""
    match layer.operation:
        case Convolve(window, _, Mode.CONSTANT):
            return max(window.rows.before, window.rows.after) < window.rows.reach
        case _:
            return False


def late_convolutions(names: Iterable[str], layers: Mapping[str, Layer]) -> list[str]:
    """Those of some layers whose weights' gradients can be left to a Slope."""
    found = [name for name in names if isinstance(layers[name].operation, Convolve)]
    return [name for name in found if any(p.trainable for p in layers[name].parameters)]


def unread_convolutions(step: Redo, layers: Mapping[str, Layer]) -> set[str]:
    """Those that no layer of their chunk reads: their backward needs no second result of them."""
    read = {source for name in step.layers for source in layers[name].inputs}
    return {n for n in step.layers if isinstance(layers[n].operation, Convolve)} - read


def unshared_gradients(step: Forward | Redo, layers: Mapping[str, Layer]) -> set[str]:
    """What a chunk reads of earlier ones and whose gradient it makes anew, so that nobody else holds it.

    That is what one layer of it reads, of a kind that never hands its own gradient on as its input's.
    """
    read = Counter(source for name in step.layers for source in layers[name].inputs)
    kinds = Convolve | Deconvolve | BatchNorm | GroupNorm
    makers = (layers[name] for name in step.layers if isinstance(layers[name].operation, kinds))
    return {layer.inputs[0] for layer in makers if read[layer.inputs[0]] == 1} - set(step.layers)
