"""Random layouts, shares and fused groups for a graph."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from manyhands.ir.graph import Constant, Graph, Input

AXES = ("batch", "rows", "columns", "channels")


@dataclass(frozen=True)
class Wish:
    """What is asked of the planner."""

    num_devices: int
    strategy: str
    shares: tuple[int, ...]
    fuse: tuple[str, ...] | None


def random_wish(rng: Random, graph: Graph) -> Wish:
    names = [layer.name for layer in graph.layers if not isinstance(layer.operation, Input | Constant)]
    num_devices = rng.choice([1, 2, 2, 2, 3, 3, 4, 4, 5, 6])
    parts = [_layout(rng, num_devices)]
    if rng.random() < 0.35 and len(names) > 2:
        starts = sorted(rng.sample(range(1, len(names)), min(rng.randint(1, 3), len(names) - 1)))
        parts += [f"{names[start]} = {_layout(rng, num_devices)}" for start in starts]
    return Wish(num_devices, "; ".join(parts), _shares(rng, num_devices), _fuse(rng, names))


def _layout(rng: Random, num_devices: int) -> str:
    if rng.random() < 0.07:
        return "single"
    if rng.random() < 0.1:
        return "grid"
    counts = _factors(rng, num_devices)
    axes = rng.sample(AXES, len(counts))
    return ",".join(f"{axis}:{count}" for axis, count in zip(axes, counts, strict=True))


def _factors(rng: Random, number: int) -> list[int]:
    """A random product, of three factors at most, that makes the number."""
    choices = [[number]] + [[a, number // a] for a in range(2, number) if number % a == 0]
    return rng.choice(choices) + ([1] if rng.random() < 0.05 else [])


def _shares(rng: Random, num_devices: int) -> tuple[int, ...]:
    if rng.random() < 0.4:
        return (1,) * num_devices
    shares = [rng.randint(1, 5) for _ in range(num_devices)]
    if rng.random() < 0.2 and num_devices > 1:
        shares[rng.randrange(num_devices)] = 0
    return tuple(shares)


def _fuse(rng: Random, names: list[str]) -> tuple[str, ...] | None:
    kind = rng.randrange(5)
    if kind == 0:
        return None
    if kind == 1:
        return ()
    if kind == 2:
        return tuple(names)
    return tuple(name for name in names if rng.random() < rng.choice([0.2, 0.5]))
