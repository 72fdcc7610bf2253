"""Tables and figure of the paper on training on the edge, by its own accounting and by torch's real one.

N. Kukreja et al., Training on the Edge: The why and the how, PAISE 2019, hal-02069728.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn

from manyhands.loading import load_model
from manyhands.planning.revolve import fewest_slots, recompute_factor

DEPTHS = (18, 34, 50, 101, 152)
MIB, GIB = 1 << 20, 1 << 30
NUMBER_BYTES = 4
OFF = 0.01  # of what the paper prints
TITLES = {"I": "images of 224x224, MB", "II": "batch 1, MB", "III": "batch 8, GB"}
UNITS = {"I": MIB, "II": MIB, "III": GIB}
# What the paper prints, by table: (image size, batch) and one figure for each depth.
PRINTED: dict[str, dict[tuple[int, int], tuple[float, ...]]] = {
    "I": {
        (224, 1): (230.05, 413.00, 620.27, 1027.21, 1410.62),
        (224, 3): (340.05, 580.42, 1091.11, 1732.33, 2405.14),
        (224, 5): (450.06, 747.85, 1561.94, 2437.45, 3399.67),
        (224, 10): (725.07, 1166.42, 2739.04, 4200.25, 5885.98),
        (224, 30): (1825.13, 2840.70, 7447.42, 11251.43, 15831.23),
        (224, 50): (2925.18, 4514.97, 12155.79, 18302.62, 25776.48),
    },
    "II": {
        (224, 1): (230.05, 413.00, 620.27, 1027.21, 1410.62),
        (350, 1): (309.83, 534.96, 964.66, 1543.72, 2139.75),
        (500, 1): (449.21, 749.73, 1570.93, 2472.72, 3458.50),
        (650, 1): (639.07, 1039.08, 2387.54, 3682.00, 5161.76),
        (1100, 1): (1496.10, 2346.95, 6073.06, 9208.30, 12961.96),
        (1500, 1): (2628.70, 4075.07, 10944.42, 16515.11, 23277.27),
    },
    "III": {
        (224, 8): (0.60, 0.98, 2.22, 3.41, 4.78),
        (350, 8): (1.22, 1.93, 4.90, 7.45, 10.47),
        (500, 8): (2.31, 3.60, 9.63, 14.69, 20.76),
        (650, 8): (3.79, 5.86, 15.99, 24.13, 34.06),
    },
}
LIMIT_BYTES = 2 * GIB  # of the paper's boards
PANELS = ((224, 1), (224, 8), (500, 1), (500, 8))  # of figure 1
CLAIM = (500, 8)  # "all models fit into the 2GB memory with rho > 1.6"
CLAIMED = 1.605  # the factor of the deepest, from the paper's tables


@dataclass(frozen=True, slots=True)
class Counted:
    """A network at one image size: bytes of weights and of one sample's activations, by either accounting."""

    weights_bytes: int  # one copy
    paper_weights_bytes: int
    paper_sample_bytes: int
    kept_sample_bytes: int  # what autograd keeps

    def paper_bytes(self, batch: int) -> int:
        return self.paper_weights_bytes + batch * self.paper_sample_bytes

    def real_bytes(self, batch: int) -> int:
        return self.weights_bytes + batch * self.kept_sample_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    table: str
    depth: int
    size: int
    batch: int
    printed: float  # in the unit of the table
    counted: float
    real: float

    @property
    def error(self) -> float:
        return self.counted / self.printed - 1


@dataclass(frozen=True, slots=True)
class Curve:
    """A chain of equal stages, as deep as a network and as large: bytes by the time that may be taken."""

    depth: int
    size: int
    batch: int
    points: tuple[tuple[float, float], ...]  # (recompute factor, bytes)
    limit_factor: float | None  # with which it fits into the limit


@dataclass(frozen=True, slots=True)
class Result:
    entries: tuple[Entry, ...]
    curves: tuple[Curve, ...]

    @property
    def worst(self) -> float:
        return max(abs(entry.error) for entry in self.entries)

    @property
    def claim(self) -> dict[int, float | None]:
        return {c.depth: c.limit_factor for c in self.curves if (c.size, c.batch) == CLAIM}

    @property
    def within(self) -> bool:
        deepest = self.claim[DEPTHS[-1]]
        return self.worst <= OFF and deepest is not None and abs(deepest - CLAIMED) < 5e-4


def count(depth: int, size: int) -> Counted:
    """Nothing is computed: tensors have shapes and no numbers.

    The paper's figures come out within 1 % if weights are counted once in every module that has them below
    it, and activations are twice what the calls of innermost modules return, and the image; but for those
    on a shortcut with a stride. For that there is no reason but that it fits.
    """
    with torch.device("meta"):
        model = load_model(f"resnet{depth}")
        image = torch.empty(1, 3, size, size)
    strided = {
        id(inner)
        for name, module in model.named_modules()
        if name.endswith("downsample") and any(getattr(m, "stride", 1) == (2, 2) for m in module.modules())
        for inner in module.modules()
    }
    returned: list[int] = []

    def note(module: nn.Module, _: Any, result: Tensor) -> None:
        if id(module) not in strided:
            returned.append(result.numel())

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(note)
    kept = _kept_bytes(model, image)
    weights = {id(module): sum(p.numel() for p in module.parameters()) for module in model.modules()}
    return Counted(
        NUMBER_BYTES * weights[id(model)],
        NUMBER_BYTES * sum(weights.values()),
        NUMBER_BYTES * (2 * sum(returned) + image.numel()),
        kept,
    )


def _kept_bytes(model: nn.Module, image: Tensor) -> int:
    """What autograd keeps of one sample until backward, each piece of memory once, without the weights."""
    kept: dict[int, Tensor] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights and tensor.dim() > 1:  # statistics are no samples'
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model.train()(image)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del result
    return found


def run(tell: Callable[[str], None]) -> Result:
    sizes = sorted({size for rows in PRINTED.values() for size, _ in rows})
    counted: dict[tuple[int, int], Counted] = {}
    for depth in DEPTHS:
        for size in sizes:
            tell(f"ResNet-{depth} at {size}")
            counted[depth, size] = count(depth, size)
    entries = tuple(
        Entry(
            table,
            depth,
            size,
            batch,
            printed,
            counted[depth, size].paper_bytes(batch) / UNITS[table],
            counted[depth, size].real_bytes(batch) / UNITS[table],
        )
        for table, rows in PRINTED.items()
        for (size, batch), figures in rows.items()
        for depth, printed in zip(DEPTHS, figures, strict=True)
    )
    curves = tuple(
        _curve(depth, size, batch, counted[depth, size]) for size, batch in PANELS for depth in DEPTHS
    )
    return Result(entries, curves)


def _curve(depth: int, size: int, batch: int, counted: Counted) -> Curve:
    """The paper's chain: one copy of the weights, and the rest of its table's figure in equal parts."""
    state_bytes = (counted.paper_bytes(batch) - counted.weights_bytes) / depth
    factors = [1 + step / 50 for step in range(101)]
    points = tuple((f, counted.weights_bytes + fewest_slots(depth, f) * state_bytes) for f in factors)
    slots = int((LIMIT_BYTES - counted.weights_bytes) // state_bytes)
    return Curve(depth, size, batch, points, recompute_factor(depth, slots) if slots > 0 else None)


def to_json(result: Result) -> dict[str, Any]:
    entries = [asdict(entry) | {"error": entry.error} for entry in result.entries]
    return {
        "entries": entries,
        "worst": result.worst,
        "curves": [asdict(curve) for curve in result.curves],
        "within": result.within,
    }


def table(result: Result) -> Group:
    tables = [_table(name, [e for e in result.entries if e.table == name]) for name in PRINTED]
    claim = ", ".join(f"ResNet-{depth} {factor:.3f}" for depth, factor in result.claim.items() if factor)
    size, batch = CLAIM
    tables[-1].caption = (
        f"printed / counted as the paper does (worst error {result.worst:.1%}) / one copy of the weights and "
        f"what torch really keeps. In 2 GB at {size}x{size}, batch {batch}, by Revolve, a step of its "
        f"chain takes so many times as long: {claim}"
    )
    return Group(*tables)


def _table(name: str, entries: list[Entry]) -> Table:
    table = Table(title=f"Table {name}: weights and activations, {TITLES[name]}")
    table.add_column("image, batch")
    for depth in DEPTHS:
        table.add_column(f"ResNet-{depth}", justify="right")
    digits = 2 if UNITS[name] == GIB else 0
    for size, batch in PRINTED[name]:
        row = [e for e in entries if (e.size, e.batch) == (size, batch)]
        cells = (f"{e.printed:.{digits}f} / {e.counted:.{digits}f} / {e.real:.{digits}f}" for e in row)
        table.add_row(f"{size}, {batch}", *cells)
    return table


def panels(result: Result) -> dict[str, dict[str, tuple[tuple[float, float], ...]]]:
    """Figure 1, in GB."""
    return {
        f"{size}x{size}, batch {batch}": {
            f"ResNet-{curve.depth}": tuple((factor, num_bytes / GIB) for factor, num_bytes in curve.points)
            for curve in result.curves
            if (curve.size, curve.batch) == (size, batch)
        }
        for size, batch in PANELS
    }
