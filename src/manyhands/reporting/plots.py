"""Bars side by side, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def plot_bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """One group of bars for each label; a bar of the same name has the same colour everywhere."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / max(len(names), 1)
    figure, axes = pyplot.subplots(figsize=(max(6, 1.2 * len(groups) * max(len(names) / 3, 1)), 4))
    for number, name in enumerate(names):
        places = [i + number * width for i, values in enumerate(groups.values()) if name in values]
        heights = [values[name] for values in groups.values() if name in values]
        axes.bar_label(axes.bar(places, heights, width, label=name), fmt="%.3g", fontsize=7)
    middle = 0.4 - width / 2
    axes.set_xticks([i + middle for i in range(len(groups))], list(groups))
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
