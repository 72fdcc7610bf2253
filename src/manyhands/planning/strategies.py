"""Plans by name and by hand: a layout, or one after another, spelled out for every segment of a graph."""

from __future__ import annotations

from math import isqrt, prod

from manyhands.errors import RequestError
from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Axis, Cut, Layout, Shape
from manyhands.ir.graph import Convolve, Deconvolve, Graph, Layer, Linear
from manyhands.ir.plan import Plan, Segment
from manyhands.planning.assignment import is_source

NAMES = ("single", "batch", "rows", "columns", "grid", "channels")
Cuts = tuple[Cut, ...]


def plan_by_name(
    graph: Graph,
    devices: tuple[str, ...],
    strategy: str,
    *,
    shares: tuple[int, ...] = (),
    fuse: tuple[str, ...] | None = None,
) -> Plan:
    """The plan that a strategy names.

    A strategy is a layout (`rows`, `batch:2,rows:2`), or several with the layer from which each holds:
    `rows; layer3.0.conv1 = batch; fc = channels`. `fuse` lists the layers after which tensors may be
    exchanged; without it every convolution is its own group. Where a map is too small for a layout,
    that segment is cut by batch, or runs on one device; the printed plan shows it.
    """
    layers = tuple(layer for layer in graph.layers if not is_source(layer))
    shares = shares or (1,) * len(devices)
    _check_shares(shares, devices)
    parts = _parts(strategy, layers, len(devices))
    ends = _ends(layers, parts, fuse)
    segments = []
    for run in _runs(layers, ends):
        cuts = next(cuts for start, cuts in reversed(parts) if start <= layers.index(run[0]))
        segments.append(Segment(tuple(layer.name for layer in run), _layout(run, cuts, devices, shares)))
    plan = Plan(graph_digest(graph), graph.layers[0].shape[0], devices, _join(segments, fuse))
    _refuse_idle(graph, plan, strategy)
    return plan


def _check_shares(shares: tuple[int, ...], devices: tuple[str, ...]) -> None:
    if len(shares) != len(devices):
        raise RequestError(f"{len(shares)} shares for {len(devices)} devices. Give one share a device.")
    if min(shares) < 0 or not sum(shares):
        raise RequestError(f"shares must be whole numbers, not all zero: {', '.join(map(str, shares))}")


def parse_cuts(text: str, num_devices: int) -> Cuts:
    """`rows` or `batch:2,rows:2` as cuts whose product is the number of devices."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["single"]:
        return ()
    if words == ["grid"]:
        rows = next(n for n in range(isqrt(num_devices), 0, -1) if num_devices % n == 0)
        return Cut(Axis.ROWS, num_devices // rows), Cut(Axis.COLUMNS, rows)
    cuts = []
    for word in words:
        name, _, number = word.partition(":")
        if name not in {axis.value for axis in Axis} or (number and not number.isdigit()):
            raise RequestError(
                f"no strategy is called {word!r}. There are {', '.join(NAMES)} and batch:2,rows:2."
            )
        cuts.append(Cut(Axis(name), int(number) if number else num_devices))
    total = prod(cut.count for cut in cuts)
    if not cuts or total != num_devices:
        raise RequestError(
            f"{text.strip()!r} makes {total} tiles for {num_devices} devices; they must be equal."
        )
    if len({cut.axis for cut in cuts}) != len(cuts):
        raise RequestError(f"{text.strip()!r} cuts one axis twice.")
    return tuple(cuts)


def _parts(strategy: str, layers: tuple[Layer, ...], num_devices: int) -> list[tuple[int, Cuts]]:
    """(index of the first layer, cuts), in order."""
    positions = {layer.name: index for index, layer in enumerate(layers)}
    parts: list[tuple[int, Cuts]] = []
    for text in strategy.split(";"):
        name, equals, cuts = text.rpartition("=")
        name = name.strip()
        if equals and name not in positions:
            raise RequestError(f"no layer is called {name!r}; `manyhands plan` lists the layers.")
        parts.append((positions[name] if equals else 0, parse_cuts(cuts, num_devices)))
    starts = [start for start, _ in parts]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise RequestError(f"the parts of {strategy!r} must start at the first layer and go forward.")
    return parts


def _ends(layers: tuple[Layer, ...], parts: list[tuple[int, Cuts]], fuse: tuple[str, ...] | None) -> set[int]:
    """Indices after whose layer a segment ends."""
    ends = {start - 1 for start, _ in parts if start} | {len(layers) - 1}
    if fuse is not None:
        positions = {layer.name: index for index, layer in enumerate(layers)}
        if unknown := [name for name in fuse if name not in positions]:
            raise RequestError(f"cannot cut after {unknown[0]!r}: no layer is called so.")
        return ends | {positions[name] for name in fuse}
    for index, layer in enumerate(layers):
        _, cuts = next((s, c) for s, c in reversed(parts) if s <= index)
        axes = {cut.axis for cut in cuts}
        if not isinstance(layer.operation, Convolve | Deconvolve | Linear):
            continue
        if Axis.CHANNELS in axes and index:  # gather just before the weights, which are split
            ends.add(index - 1)
        elif axes & {Axis.ROWS, Axis.COLUMNS}:  # exchange the result, before norm and activation
            ends.add(index)
    return ends


def _runs(layers: tuple[Layer, ...], ends: set[int]) -> list[tuple[Layer, ...]]:
    runs, start = [], 0
    for end in sorted(ends):
        runs.append(layers[start : end + 1])
        start = end + 1
    return runs


def _layout(run: tuple[Layer, ...], cuts: Cuts, devices: tuple[str, ...], shares: tuple[int, ...]) -> Layout:
    """The cuts if every device gets a piece of the last result, else by batch, else on one device."""
    shape = run[-1].shape
    wanted = Layout(devices, cuts, shares) if cuts else _single(devices)
    by_batch = Layout(devices, (Cut(Axis.BATCH, len(devices)),), shares)
    return next((layout for layout in (wanted, by_batch) if _feeds_all(layout, shape)), _single(devices))


def _single(devices: tuple[str, ...]) -> Layout:
    return Layout(devices[:1], (), (1,))


def _feeds_all(layout: Layout, shape: Shape) -> bool:
    tiles = layout.tiles(shape)
    return all(tiles[d].numel for d, share in zip(layout.devices, layout.shares, strict=True) if share)


def _join(segments: list[Segment], fuse: tuple[str, ...] | None) -> tuple[Segment, ...]:
    """Neighbours on one device, or cut by batch alone, need no exchange between them: one segment."""
    joined: list[Segment] = []
    for segment in segments:
        free = all(cut.axis is Axis.BATCH for cut in segment.layout.cuts)
        if joined and fuse is None and free and joined[-1].layout == segment.layout:
            segment = Segment(joined.pop().layers + segment.layers, segment.layout)
        joined.append(segment)
    return tuple(joined)


def _refuse_idle(graph: Graph, plan: Plan, strategy: str) -> None:
    """A device that would own nothing anywhere is a mistake in the request, unless it was asked for."""
    if strategy.strip() == "single":
        return
    busy = {
        device
        for segment in plan.segments
        for device, share in zip(segment.layout.devices, segment.layout.shares, strict=True)
        if share
    }
    idle = [device for device in plan.devices if device not in busy]
    if len(idle) == len(plan.devices) - 1 and len(plan.devices) > 1 and plan.batch < len(plan.devices):
        raise RequestError(
            f"{strategy!r} cannot be cut among {len(plan.devices)} devices: the batch is {plan.batch} and "
            f"every map is too small. Use fewer devices or a larger batch."
        )
    if idle and strategy.strip() != "single":
        raise RequestError(f"{strategy!r} leaves {', '.join(idle)} with nothing to do. Use fewer devices.")
