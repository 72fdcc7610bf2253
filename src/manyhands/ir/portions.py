"""A chunk of layers computed portion by portion: some samples, or some rows, after others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from manyhands.ir.geometry import Span, Tile, divide, samples_at_a_time
from manyhands.ir.graph import Layer
from manyhands.ir.regions import needs

ROWS = 2  # the dimension that bands are cut from


@dataclass(frozen=True, slots=True)
class Portion:
    """One of several runs through a chunk.

    `regions`: of each layer and of what the chunk reads of others, what this run computes or reads; rows
    between two bands are in both. `own`: of what leaves the chunk (or all), the part that no other run has.
    """

    regions: Mapping[str, Tile]
    own: Mapping[str, Tile]
    banded: bool


def portions(
    names: tuple[str, ...],
    leaving: Iterable[str],
    computed: Mapping[str, Tile],
    layers: Mapping[str, Layer],
    samples: int = 0,
    bands: int = 1,
) -> tuple[Portion, ...]:
    """So many samples at a time (0: all), in so many bands of rows. Nothing, if one run is enough.

    `leaving`: the layers whose results are read outside of the chunk; `computed`: all that is computed here.
    Samples are taken of all of that, because a norm of a sample has to see all rows of it.
    """
    ends = list(names) if bands == 1 else _ends(names, leaving, layers)
    some = [tile.spans[0] for tile in samples_at_a_time(computed[ends[0]], samples)] if samples else [None]
    if len(some) * bands == 1:
        return ()
    found = []
    for span in some:
        for band in range(bands):
            own = {name: _own(computed[name], span, band, bands) for name in ends}
            if any(tile.numel for tile in own.values()):
                found.append(Portion(_regions(names, own, layers), own, bands > 1))
    return tuple(found)


def can_be_cut(
    names: tuple[str, ...],
    leaving: Iterable[str],
    computed: Mapping[str, Tile],
    layers: Mapping[str, Layer],
    bands: int,
) -> bool:
    """Does each band need something of every layer, and nothing that all rows together do not?

    A window that lies in padding alone wants any row; a layer of which only other bands read is left out.
    """
    ends = _ends(names, leaving, layers)
    whole = _regions(names, {name: computed[name] for name in ends}, layers)
    parts = portions(names, leaving, computed, layers, bands=bands)
    return all(
        whole[name].covers(tile) and (tile.numel or not whole[name].numel)
        for part in parts
        for name, tile in part.regions.items()
    )


def _ends(names: tuple[str, ...], leaving: Iterable[str], layers: Mapping[str, Layer]) -> list[str]:
    """What others read of a chunk, or nobody."""
    read, left = {source for name in names for source in layers[name].inputs}, set(leaving)
    return [name for name in names if name in left or name not in read]


def _own(tile: Tile, samples: Span | None, band: int, bands: int) -> Tile:
    if samples is not None:
        tile = tile.with_span(0, samples)
    return tile if bands == 1 else tile.with_span(ROWS, divide(tile.spans[ROWS], (1,) * bands)[band])


def _regions(names: tuple[str, ...], own: Mapping[str, Tile], layers: Mapping[str, Layer]) -> dict[str, Tile]:
    """From what is wanted of the ends back to what is read of others."""
    regions = dict(own)
    for name in reversed(names):
        layer = layers[name]
        shapes = tuple(layers[source].shape for source in layer.inputs)
        for source, need in zip(layer.inputs, needs(layer, regions[name], shapes), strict=True):
            regions[source] = regions[source].hull(need) if source in regions else need
    return regions
