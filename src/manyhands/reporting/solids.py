"""A tensor on paper: a block of rows and columns with depth, one for every part of a batch that is cut."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, sqrt

from manyhands.ir.geometry import Shape, Span, Tile
from manyhands.ir.report import CutMap

Point = tuple[float, float]
Polygon = tuple[Point, ...]
Range = tuple[float, float]

LEAN = (0.8, -0.45)  # where depth goes on paper: to the right and up
SEEN = 3.0  # px; a halo thinner than this is drawn as thick as this
GAP = 7.0  # px between blocks of one map
PAGES = 16  # images of a block that are drawn one by one


@dataclass(frozen=True, slots=True)
class Faces:
    """The visible faces of a box, as far as there are any."""

    front: Polygon | None
    top: Polygon | None
    side: Polygon | None

    @property
    def polygons(self) -> tuple[Polygon, ...]:
        return tuple(face for face in (self.front, self.top, self.side) if face is not None)


@dataclass(frozen=True, slots=True)
class Block:
    """Where one part of the batch is drawn: its front face, its depth, and what the depth stands for."""

    x: float
    y: float
    width: float
    height: float
    depth: float
    images: Span
    size: tuple[int, int, int]  # of depth, rows and columns, in elements
    deep_images: bool  # depth is images, not channels

    def faces(self, box: Tile, beside: Tile | None = None) -> Faces | None:
        """The faces of a box of four spans; None where it is in another block.

        A box `beside` another one is a halo of it: drawn thick enough to be seen, and no thicker than that
        one's own part.
        """
        batch, channels, rows, columns = box.spans
        if not len(batch & self.images):
            return None
        deep = (batch & self.images).shift(-self.images.start) if self.deep_images else channels
        near, far = _scaled(deep, self.depth, self.size[0])
        top, bottom = _scaled(rows, self.height, self.size[1])
        left, right = _scaled(columns, self.width, self.size[2])
        if beside is not None:
            own_rows = _scaled(beside.spans[2], self.height, self.size[1])
            own_columns = _scaled(beside.spans[3], self.width, self.size[2])
            top, bottom = _thickened((top, bottom), own_rows, self.height)
            left, right = _thickened((left, right), own_columns, self.width)

        def at(x: float, y: float, z: float) -> Point:
            return self.x + x + z * LEAN[0], self.y + y + z * LEAN[1]

        def corners(*points: tuple[float, float, float]) -> Polygon:
            return tuple(at(*point) for point in points)

        front = ((left, top, 0), (right, top, 0), (right, bottom, 0), (left, bottom, 0))
        above = ((left, top, near), (right, top, near), (right, top, far), (left, top, far))
        side = ((right, top, near), (right, top, far), (right, bottom, far), (right, bottom, near))
        return Faces(
            corners(*front) if deep.start == 0 else None,
            corners(*above) if rows.start == 0 and self.depth else None,
            corners(*side) if columns.stop == self.size[2] and self.depth else None,
        )

    @property
    def whole(self) -> Tile:
        depth = Span(0, self.size[0])
        rows, columns = (Span(0, size) for size in self.size[1:])
        return Tile((self.images, Span(0, 1) if self.deep_images else depth, rows, columns))

    @property
    def pages(self) -> tuple[Polygon, ...]:
        """Lines between the images of a block, along its top and side."""
        count = self.size[0] if self.deep_images else 1
        if not 1 < count <= PAGES:
            return ()
        lines = []
        for index in range(1, count):
            z = self.depth * index / count
            x, y = self.x + z * LEAN[0], self.y + z * LEAN[1]
            lines.append(((x, y), (x + self.width, y), (x + self.width, y + self.height)))
        return tuple(lines)


def _scaled(span: Span, length: float, size: int) -> Range:
    return span.start * length / size, span.stop * length / size


def _thickened(halo: Range, own: Range, length: float) -> Range:
    """A strip before or after one's own part, thick enough to be seen."""
    seen = min(SEEN, 0.4 * (own[1] - own[0]))
    if halo[0] >= own[1]:
        return halo[0], min(max(halo[1], halo[0] + seen), length)
    if halo[1] <= own[0]:
        return max(min(halo[0], halo[1] - seen), 0.0), halo[1]
    return halo


def boxed(tile: Tile, shape: Shape) -> Tile:
    """A tile of any rank as a box of images, channels, rows and columns.

    Vectors are drawn as one sheet: a feature is a row of it, an image a column.
    """
    one = Span(0, 1)
    if len(shape) == 4:
        return tile
    if len(shape) == 2:
        return Tile((one, one, tile.spans[1], tile.spans[0]))
    return Tile((tile.spans[0] if shape else one, one, one, one))


def without(tile: Tile, own: Tile) -> tuple[Tile, ...]:
    """The boxes that make up a tile without the part of it that is one's own."""
    common = tile & own
    if not common.numel:
        return (tile,) if tile.numel else ()
    boxes, rest = [], tile
    for dimension, (outer, inner) in enumerate(zip(tile.spans, common.spans, strict=True)):
        for span in (Span(outer.start, inner.start), Span(inner.stop, outer.stop)):
            if len(span):
                boxes.append(rest.with_span(dimension, span))
        rest = rest.with_span(dimension, inner)
    return tuple(boxes)


def blocks(cut: CutMap, longest: float) -> tuple[Block, ...]:
    """The blocks of a map, from (0, 0) on; `longest` is the longer side of an uncut one's face, in px."""
    boxes = [boxed(tile, cut.shape) for _, tile in cut.owned]
    size = tuple(max(box.spans[dimension].stop for box in boxes) for dimension in range(4))
    edges = sorted({edge for box in boxes for edge in (box.spans[0].start, box.spans[0].stop)})
    groups = [Span(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    slices = len({box.spans[1] for box in boxes})
    across = 1 if len(groups) <= 3 else ceil(sqrt(len(groups)))
    side = longest * (1 if len(groups) == 1 else max(0.25, 1.05 / sqrt(len(groups))))
    width, height = _face(cut.shape, size, side)
    deep_images = len(groups) > 1 and slices == 1 and len(cut.shape) == 4
    largest = max(len(group) for group in groups)
    page = min(4.0, 0.7 * side / largest)
    channels_depth = _depth(size[1], slices, side) if len(cut.shape) == 4 else 0.0
    most = largest * page if deep_images else channels_depth
    found = []
    for index, group in enumerate(groups):
        column, row = index % across, index // across
        x = column * (width + most * LEAN[0] + GAP)
        y = row * (height - most * LEAN[1] + GAP) - most * LEAN[1]
        depth, deep = (len(group) * page, len(group)) if deep_images else (channels_depth, size[1])
        found.append(Block(x, y, width, height, depth, group, (deep, size[2], size[3]), deep_images))
    return tuple(found)


def _face(shape: Shape, size: tuple[int, ...], side: float) -> Point:
    """Width and height, in the proportion of columns and rows; vectors are an upright sheet."""
    if len(shape) == 2:
        return min(max(6.0 * size[3], 14.0), 0.5 * side), 0.8 * side
    if len(shape) != 4:
        return 0.4 * side, 0.4 * side
    rows, columns = size[2], size[3]
    return max(side * columns / max(rows, columns), 5.0), max(side * rows / max(rows, columns), 5.0)


def _depth(channels: int, slices: int, side: float) -> float:
    """Channels that are cut need room to be told apart; others only hint at their number."""
    return min(max(9.0 * slices, 0.5 * side), 0.7 * side + 40) if slices > 1 else 1 + 1.7 * log2(channels)


def extent(parts: tuple[Block, ...]) -> Point:
    """Width and height that blocks take."""
    right = max(block.x + block.width + block.depth * LEAN[0] for block in parts)
    return right, max(block.y + block.height for block in parts)
