"""A plan as one picture (SVG): the maps from left to right, who owns what, halos, and what travels.

Written by hand through ElementTree: the marks are few and simple, the bytes are the same every time, and a
plotting library would have to be taught all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import ceil, sqrt
from xml.etree import ElementTree

from manyhands.ir.geometry import Tile
from manyhands.ir.report import CutMap, PlanPicture
from manyhands.reporting.painting import FAINT, Brush, Element, path, put, words
from manyhands.reporting.solids import Block, blocks, extent
from manyhands.reporting.text import amount

WIDTH, MARGIN = 1600.0, 24.0
ARROW, CELL = 70.0, 112.0  # widths, px
LINE = 13.0  # height of a line of words
ROOM = 24  # letters in a line
MOST = 30  # segments that are drawn one by one; of more, the first two and the last of each kind are
MOST_TILES = 1000  # with many devices fewer maps are drawn, so that the file stays small

Received = tuple[tuple[str, int], ...]
Beyond = tuple[tuple[str, Tile], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A map and what is said below it; or, without a map, segments left out, or the loss."""

    title: str
    lines: tuple[str, ...]
    received: Received | None = None  # what the arrow to it carries; None: there is no arrow
    notes: tuple[str, ...] = ()  # below the arrow
    idle: tuple[str, ...] = ()
    cut: CutMap | None = None
    parts: tuple[Block, ...] = ()

    @property
    def arrow(self) -> float:
        return ARROW if self.received is not None else 0.0

    @property
    def size(self) -> tuple[float, float]:
        if self.cut is None:
            return 6.0 + 7.4 * max(len(word) for word in (self.title, *self.lines)), 40.0
        width, height = extent(self.parts)
        spoken = max(7.4 * len(self.title), *(6.0 * len(line) for line in self.lines))
        return max(width, spoken, CELL), height


def draw(picture: PlanPicture) -> str:
    """The picture as the text of an SVG file."""
    return _Page(picture).drawn()


class _Page:
    def __init__(self, picture: PlanPicture) -> None:
        self.picture, self.facts = picture, picture.facts
        self.brush = Brush(self.facts.devices)
        maps = (*picture.inputs, *(segment.result for segment in picture.segments))
        self.largest = max((max(cut.shape[2:]) for cut in maps if len(cut.shape) == 4), default=1)
        self.longest = 110 + 4.0 * min(len(self.facts.devices), 16)
        self.most_received = max([_total(s.received) for s in picture.segments] + [1])

    def drawn(self) -> str:
        rows = _wrapped(self.cells())
        width = max(max(sum(cell.arrow + cell.size[0] + 14 for cell in row) for row in rows), 700.0)
        root = ElementTree.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif"}
        )
        self.brush.define(root)
        background = put(root, "rect", fill="#ffffff")
        y = self._head(root, width)
        for row in rows:
            y = self._row(root, row, y)
        size = {"width": f"{width + 2 * MARGIN:.0f}", "height": f"{y:.0f}"}
        root.attrib |= size | {"viewBox": f"0 0 {size['width']} {size['height']}"}
        background.attrib |= size
        ElementTree.indent(root, " ")
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    # ---- what is drawn ----------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        picture = self.picture
        found = [
            Cell("input", (cut.layer, _size(cut)), cut=cut, parts=self._blocks(cut)) for cut in picture.inputs
        ]
        for run in _chosen(picture):
            found.append(self._segment(run[0]) if len(run) == 1 else self._left_out(run))
        return [*found, Cell("loss", (), picture.loss_received)]

    def _segment(self, index: int) -> Cell:
        facts, drawn = self.facts.segments[index], self.picture.segments[index]
        cuts, _, shares = facts.layout.partition(" by ")
        lines = [f"by {shares}"] if shares else []
        if facts.num_layers > 1:
            lines += [f"{_elided(facts.first)} ..", f"{_elided(facts.last)} ({facts.num_layers})"]
        else:
            lines.append(_elided(facts.last))
        lines.append(_size(drawn.result))
        if facts.redundant >= 0.005:
            lines.append(f"{facts.redundant:.0%} computed twice")
        return Cell(
            f"{index} \u00b7 {cuts}",
            tuple(line if len(line) <= ROOM else f"{line[: ROOM - 1]}\u2026" for line in lines),
            drawn.received,
            tuple(f"{amount(size)} from {source}" for source, size in drawn.earlier if size),
            drawn.idle,
            drawn.result,
            self._blocks(drawn.result),
        )

    def _left_out(self, run: tuple[int, ...]) -> Cell:
        total = dict.fromkeys(self.facts.devices, 0)
        for index in run:
            for device, size in self.picture.segments[index].received:
                total[device] += size
        return Cell(f"{run[0]} to {run[-1]}", (f"{len(run)} more segments",), tuple(total.items()))

    def _blocks(self, cut: CutMap) -> tuple[Block, ...]:
        side = max(cut.shape[2:]) if len(cut.shape) == 4 else self.largest / 2
        return blocks(cut, 18 + (self.longest - 18) * sqrt(side / self.largest))

    # ---- the page ---------------------------------------------------------------------------------------

    def _head(self, root: Element, width: float) -> float:
        """Title, devices and key; comes back: where the maps may begin."""
        facts, brush = self.facts, self.brush
        exact = "exact: trains as one device would" if facts.exact else f"NOT exact: {facts.wire} on the wire"
        count = f"{len(facts.devices)} device{'s' * (len(facts.devices) > 1)}"
        title = f"{self.picture.model}, batch {facts.batch}, {count}"
        words(root, MARGIN, 36, title, font_size=20, font_weight="bold")
        words(root, MARGIN, 56, f"{exact}{self._summed()}", font_size=12, fill=FAINT)
        x, y = MARGIN, 72.0
        busy = {device for segment in self.picture.segments for device, _ in segment.result.owned}
        for device in facts.devices:
            name = f"{brush.number[device]}  {device}{'' if device in busy else ' (owns nothing)'}"
            step = 30 + 6.6 * len(name)
            if x + step > width + MARGIN:
                x, y = MARGIN, y + 18
            put(root, "rect", x=x, y=y, width=12, height=12, fill=brush.colours[device], rx=2)
            words(root, x + 17, y + 10, name, font_size=11.5, class_="legend")
            x += step
        return self._key(root, width, y + 32)

    def _summed(self) -> str:
        summed, count = self.facts.summed_bytes, len(self.facts.segments)
        drawn = sum(len(run) == 1 for run in _chosen(self.picture))
        added = f"; gradients of shared weights added up: {amount(summed)} a step" if summed else ""
        return added if drawn == count else f"{added}; {drawn} of {count} segments are drawn"

    def _key(self, root: Element, width: float, y: float) -> float:
        """What the marks mean."""
        devices, x = self.facts.devices[:1], MARGIN
        self.brush.chip(root, x, y - 9, CELL, devices[0], self.brush.hatch(devices[0]))
        text = "halo: read or computed beyond one's own tile"
        words(root, x + 14, y - 1, text, font_size=11, fill=FAINT)
        x += 34 + 5.9 * len(text)
        self.brush.hollow(root, x, y - 9, CELL, devices)
        words(root, x + 14, y - 1, "idle", font_size=11, fill=FAINT)
        x += 54
        for text in (
            "bar: shares of a map",
            "whole to, re-cut for: who reads all of it, or tiles of another cut",
            "arrow: bytes received for a segment, forward and backward, by receiver; below it, from which "
            "earlier segment",
        ):
            if x + 5.9 * len(text) > width + MARGIN:
                x, y = MARGIN, y + 16
            words(root, x, y - 1, text, font_size=11, fill=FAINT)
            x += 20 + 5.9 * len(text)
        return y + 14

    def _row(self, root: Element, row: list[Cell], y: float) -> float:
        """One row of maps; comes back: where the next may begin."""
        art = max(cell.size[1] for cell in row)
        x, low = MARGIN, y
        for cell in row:
            if cell.received is not None:
                self._arrow(root, cell, x, y + art / 2)
            x += cell.arrow
            low = max(low, self._cell(root, cell, x, y, art))
            x += cell.size[0] + 14
        return low + 26

    def _arrow(self, root: Element, cell: Cell, x: float, y: float) -> None:
        total = _total(cell.received or ())
        group = put(root, "g", class_="transfer", data_bytes=str(total))
        length = ARROW - 16
        if not total:
            put(
                group,
                "path",
                d=path((((x, y), (x + length, y)),), ""),
                stroke="#b5b5b5",
                stroke_dasharray="2 3",
            )
            return
        height = 3 + 13 * sqrt(min(total / self.most_received, 1))
        self.brush.shaft(group, x, y, length - 8, height, dict(cell.received or ()))
        tip = ((x + length - 8, y - height / 2 - 4), (x + length, y), (x + length - 8, y + height / 2 + 4))
        put(group, "path", d=path((tip,)), fill="#555555")
        middle: dict[str, str | float] = {"text_anchor": "middle"}
        words(group, x + length / 2, y - height / 2 - 7, amount(total), font_size=11, **middle)
        for index, note in enumerate(cell.notes):
            low = y + height / 2 + 14 + 11 * index
            words(group, x + length / 2, low, note, font_size=9, fill=FAINT, **middle)

    def _cell(self, root: Element, cell: Cell, x: float, y: float, art: float) -> float:
        """A map and its words; comes back: how far down they go."""
        group, middle = put(root, "g", class_="cell"), x + cell.size[0] / 2
        beyond = self._art(group, cell, x, y, art)
        y += art + 18 if cell.cut is not None else art / 2 + 4
        words(group, middle, y, cell.title, font_size=12, font_weight="bold", text_anchor="middle")
        for line in cell.lines:
            y += LINE
            words(group, middle, y, line, font_size=10.5, fill=FAINT, text_anchor="middle")
        if cell.cut is None:
            return y
        self.brush.bar(group, x + 9, y + 7, cell.size[0] - 18, cell.cut)
        y += 16
        for word, tiles in beyond.items():
            if tiles:
                word += " all" * (len(tiles) == len(self.facts.devices) > 8)
                words(group, x + 9, y + 8, word, font_size=9.5, fill=FAINT)
                start = x + 14 + 5 * len(word)
                self.brush.chips(group, start, y, x + cell.size[0] - start, tiles)
                y += LINE
        if cell.idle:
            words(group, x + 9, y + 8, "idle", font_size=9.5, fill=FAINT)
            self.brush.hollow(group, x + 32, y, cell.size[0] - 40, cell.idle)
            y += LINE
        return y

    def _art(self, group: Element, cell: Cell, x: float, y: float, art: float) -> dict[str, Beyond]:
        """The map, in the middle of its row; comes back: who reads more of it than can be hatched."""
        if cell.cut is None:
            return {}
        width, height = cell.size
        place = f"translate({x + (width - extent(cell.parts)[0]) / 2:.1f} {y + (art - height) / 2:.1f})"
        shape = "x".join(map(str, cell.cut.shape))
        inner = put(group, "g", class_="map", transform=place, data_layer=cell.cut.layer, data_shape=shape)
        left = self.brush.map(inner, cell.cut, cell.parts)
        whole = tuple(reader for reader in left if reader[1].shape == cell.cut.shape)
        return {"whole to": whole, "re-cut for": tuple(reader for reader in left if reader not in whole)}


def _wrapped(cells: list[Cell]) -> list[list[Cell]]:
    """Rows of cells that are not wider than the page."""
    rows: list[list[Cell]] = [[]]
    used = 0.0
    for cell in cells:
        room = cell.arrow + cell.size[0] + 14
        if used + room > WIDTH and cell is not cells[-1]:  # the loss has room at the end of any row
            rows.append([])
            used = 0.0
        rows[-1].append(cell)
        used += room
    return rows


def _chosen(picture: PlanPicture) -> list[tuple[int, ...]]:
    """Segments in order: those to draw one by one, and between them runs to leave out."""
    count = len(picture.segments)
    runs = [tuple(alike) for _, alike in groupby(range(count), key=lambda index: _look(picture, index))]
    short = 4 if count > MOST else count
    shown = [i for run in runs for i in (run if len(run) <= short else (*run[:2], run[-1]))]
    most = min(2 * MOST, max(MOST_TILES // len(picture.facts.devices), 8))
    kept = {*shown[:: ceil(len(shown) / most)], count - 1}
    return [tuple(run) for _, run in groupby(range(count), key=lambda i: i if i in kept else -1)]


def _look(picture: PlanPicture, index: int) -> tuple[object, ...]:
    shape = picture.segments[index].result.shape
    return picture.facts.segments[index].layout, len(shape), shape[2:], picture.segments[index].idle


def _total(received: Received) -> int:
    return sum(size for _, size in received)


def _size(cut: CutMap) -> str:
    return "\u00d7".join(map(str, cut.shape[1:])) or "one number"


def _elided(name: str) -> str:
    """A long name without its middle, and room left for a count behind it."""
    half = ROOM // 2 - 3
    return name if len(name) <= 2 * half + 1 else f"{name[:half]}\u2026{name[-half:]}"
