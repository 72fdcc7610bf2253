"""Bars side by side and curves, as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Points = Sequence[tuple[float, float]]


def plot_steps(
    path: Path, panels: Mapping[str, Mapping[str, Points]], x: str, y: str, limit: tuple[float, str]
) -> None:
    """Curves that fall in steps, four panels to a picture; a limit is drawn across each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(-(-len(panels) // 2), 2, figsize=(10, 7), squeeze=False)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for name, points in curves.items():
            axes.step([a for a, _ in points], [b for _, b in points], where="post", label=name)
        axes.axhline(limit[0], color="black", linestyle=":", linewidth=1)
        axes.annotate(limit[1], (1, limit[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        axes.set(title=title, xlabel=x, ylabel=y, yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_points(path: Path, panels: Mapping[str, Mapping[str, Points]], x: str, y: str) -> None:
    """Points joined by lines, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, row = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False)
    for axes, (title, curves) in zip(row[0], panels.items(), strict=True):
        for name, points in curves.items():
            axes.plot([a for a, _ in points], [b for _, b in points], marker="o", label=name)
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
