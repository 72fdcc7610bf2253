"""Samples of a rehearsal -> timings of kinds of layers, and a line for each kind of other steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod
from statistics import median

import numpy as np

from manyhands.ir.profile import AXES, Factor, LayerSample, Line, StepSample, Timing

SAME = 0.02  # fractions this close to each other are one point of a curve


def fit_timings(samples: Iterable[LayerSample], batch: int) -> tuple[Timing, ...]:
    """For every kind the time of the whole, and how it shrinks with the fraction along each axis."""
    kinds: defaultdict[str, list[LayerSample]] = defaultdict(list)
    for sample in samples:
        kinds[sample.kind].append(sample)
    return tuple(_timing(kind, found, batch) for kind, found in kinds.items())


def _timing(kind: str, samples: list[LayerSample], batch: int) -> Timing:
    forward, backward = _whole(samples)
    factors = []
    for axis, name in enumerate(AXES):
        along = [s for s in samples if all(s.fractions[i] == 1.0 for i in range(3) if i != axis)]
        points = [
            Factor(
                median(s.fractions[axis] for s in group),
                _ratio(median(s.forward_s for s in group), forward),
                _ratio(median(s.backward_s for s in group), backward),
            )
            for group in _groups(along, axis)
        ]
        if points:
            factors.append((name, tuple(points)))
    return Timing(kind, batch, forward, backward, tuple(factors))


def _whole(samples: list[LayerSample]) -> tuple[float, float]:
    """Seconds of the whole result: as measured, or in proportion to the largest part that was."""
    largest = max(prod(sample.fractions) for sample in samples)
    chosen = [sample for sample in samples if prod(sample.fractions) == largest]
    return median(s.forward_s for s in chosen) / largest, median(s.backward_s for s in chosen) / largest


def _ratio(seconds: float, whole: float) -> float:
    return seconds / whole if whole else 0.0


def _groups(samples: list[LayerSample], axis: int) -> list[list[LayerSample]]:
    """Samples of about the same fraction of an axis, smallest first; the whole is known already."""
    groups: list[list[LayerSample]] = []
    for sample in sorted(samples, key=lambda sample: sample.fractions[axis]):
        fraction = sample.fractions[axis]
        if fraction == 1.0:
            continue
        if groups and fraction <= groups[-1][0].fractions[axis] * (1 + SAME):
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def fit_lines(samples: Iterable[StepSample]) -> tuple[Line, ...]:
    """A line for every name of a step, and for its first word: "send value", and "send" of any content."""
    names: defaultdict[str, list[StepSample]] = defaultdict(list)
    for sample in samples:
        names[sample.step].append(sample)
        if " " in sample.step:
            names[sample.step.split()[0]].append(sample)
    return tuple(_line(name, found) for name, found in names.items())


def _line(name: str, samples: list[StepSample]) -> Line:
    """Fixed and a byte, neither negative. Long steps count more, but do not alone decide; sums are kept."""
    seconds = np.array([max(sample.seconds, 0.0) for sample in samples])
    sizes = np.array([sample.num_bytes for sample in samples], dtype=float)
    weights = 1 / np.sqrt(seconds + 1e-6)
    scale = max(sizes.max(), 1.0)  # both columns alike, for the solver's sake
    columns = np.stack([weights, weights * sizes / scale], axis=1)
    from scipy.optimize import nnls  # 36 MB that no device needs to train

    (fixed, slope), _ = nnls(columns, weights * seconds)
    slope /= scale
    foreseen = float((fixed + slope * sizes).sum())
    stretch = float(seconds.sum()) / foreseen if foreseen else 1.0
    return Line(name, float(fixed * stretch), float(slope * stretch))
