"""Marks on a page: SVG elements for tiles, halos, bars, chips and words. Same facts, same bytes."""

from __future__ import annotations

from xml.etree import ElementTree

from manyhands.ir.geometry import Tile
from manyhands.ir.report import CutMap
from manyhands.reporting.palette import colours, ink
from manyhands.reporting.solids import Block, Polygon, boxed, without

Element = ElementTree.Element
INK, FAINT = "#222222", "#6b6b6b"
CHIP = 9.0


def put(parent: Element, tag: str, /, **attributes: str | float) -> Element:
    """A new element; `stroke_width=2` becomes stroke-width="2"."""
    named = {name.rstrip("_").replace("_", "-"): written(value) for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, named)


def written(value: str | float) -> str:
    """A number to a hundredth of a pixel, or words as they are."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def words(parent: Element, x: float, y: float, text: str, **attributes: str | float) -> None:
    put(parent, "text", x=x, y=y, **({"fill": INK} | attributes)).text = text


def path(polygons: tuple[Polygon, ...], close: str = "Z") -> str:
    """The outlines as one path."""
    return "".join(
        "M" + "L".join(f"{written(x)} {written(y)}" for x, y in polygon) + close for polygon in polygons
    )


class Brush:
    """Paints for the devices of a plan, each in its colour and under its number."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.colours = colours(devices)
        self.number = {device: index for index, device in enumerate(devices)}

    def define(self, root: Element) -> None:
        """The hatch of every device: stripes of its colour on white, which lets the owner shine through."""
        definitions = put(root, "defs")
        for device, colour in self.colours.items():
            pattern = put(
                definitions,
                "pattern",
                id=f"halo-{self.number[device]}",
                width=4,
                height=4,
                patternUnits="userSpaceOnUse",
                patternTransform=f"rotate({45 if self.number[device] % 2 else -45})",
            )
            put(pattern, "rect", width=4, height=4, fill="#ffffff", fill_opacity=0.6)
            put(pattern, "rect", width=2.4, height=4, fill=colour)

    def hatch(self, device: str) -> str:
        return f"url(#halo-{self.number[device]})"

    # ---- maps -------------------------------------------------------------------------------------------

    def map(self, parent: Element, cut: CutMap, parts: tuple[Block, ...]) -> tuple[tuple[str, Tile], ...]:
        """Paint a map. Comes back: what reaches beyond one's own but is no halo, or nowhere to be seen."""
        owned = dict(cut.owned)
        for block in parts:
            tiles = put(parent, "g", stroke="#ffffff", stroke_width=0.7, stroke_linejoin="round")
            for device, tile in cut.owned:
                self._tile(tiles, block, device, tile, cut)
            self._shade(parent, block)
        left = []
        for device, tile in cut.beyond:
            halo = device in owned and tile.covers(owned[device]) and tile != Tile.whole(cut.shape)
            if not halo or not self._halo(parent, parts, device, tile, cut):
                left.append((device, tile))
        labels = put(
            parent,
            "g",
            text_anchor="middle",
            stroke_width=3,
            stroke_linejoin="round",
            paint_order="stroke",
        )
        for block in parts:
            for device, tile in cut.owned:
                self._label(labels, block, device, boxed(tile, cut.shape))
        return tuple(left)

    def _tile(self, parent: Element, block: Block, device: str, tile: Tile, cut: CutMap) -> None:
        faces = block.faces(boxed(tile, cut.shape))
        if faces is None or not faces.polygons:
            return
        put(
            parent,
            "path",
            d=path(faces.polygons),
            fill=self.colours[device],
            class_="tile",
            data_device=device,
            data_tile=str(tile),
        )

    def _halo(self, parent: Element, parts: tuple[Block, ...], device: str, tile: Tile, cut: CutMap) -> bool:
        """Hatch what a tile is more than the device's own; False where no face shows it."""
        own = boxed(dict(cut.owned)[device], cut.shape)
        found = [
            block.faces(box, beside=own) for box in without(boxed(tile, cut.shape), own) for block in parts
        ]
        polygons = tuple(polygon for faces in found if faces for polygon in faces.polygons)
        if polygons:
            put(
                parent,
                "path",
                d=path(polygons),
                fill=self.hatch(device),
                class_="halo",
                data_device=device,
                data_tile=str(tile),
            )
        return bool(polygons)

    def _shade(self, parent: Element, block: Block) -> None:
        """Light from above, and lines between images."""
        faces = block.faces(block.whole)
        if faces is None or faces.top is None or faces.side is None:
            return
        put(parent, "path", d=path((faces.top,)), fill="#ffffff", fill_opacity=0.35)
        put(parent, "path", d=path((faces.side,)), fill="#000000", fill_opacity=0.18)
        if block.pages:
            put(parent, "path", d=path(block.pages, ""), fill="none", stroke="#ffffff", stroke_width=0.6)

    def _label(self, parent: Element, block: Block, device: str, box: Tile) -> None:
        """The number of the owner, where there is room for it."""
        faces = block.faces(box)
        face = faces and (faces.front or faces.side)
        if not face:
            return
        left, right = min(x for x, _ in face), max(x for x, _ in face)
        top, bottom = min(y for _, y in face), max(y for _, y in face)
        text = str(self.number[device])
        size = min(11.0, 0.72 * (bottom - top), 0.9 * (right - left) / len(text))
        if size >= 5:
            words(
                parent,
                (left + right) / 2,
                (top + bottom) / 2 + 0.36 * size,
                text,
                font_size=size,
                fill=ink(self.colours[device]),
                stroke=self.colours[device],
            )

    # ---- small marks ------------------------------------------------------------------------------------

    def bar(self, parent: Element, x: float, y: float, width: float, cut: CutMap) -> None:
        """Everybody's share of a map, side by side."""
        total = sum(tile.numel for _, tile in cut.owned)
        for device, tile in cut.owned:
            part = width * tile.numel / total
            put(parent, "rect", x=x, y=y, width=part, height=5, fill=self.colours[device], class_="share")
            x += part

    def chip(
        self, parent: Element, x: float, y: float, pitch: float, device: str, fill: str, **more: str | float
    ) -> None:
        """A small square, or where there is less room a stripe, that stands for a device."""
        outline: dict[str, str | float] = {"stroke": self.colours[device], "stroke_width": 1}
        size = {"width": min(CHIP, pitch - 2), "height": CHIP - 1}
        put(parent, "rect", x=x, y=y, fill=fill, **(size | outline | more))

    def chips(
        self, parent: Element, x: float, y: float, room: float, tiles: tuple[tuple[str, Tile], ...]
    ) -> None:
        """The readers of tiles that are no halos."""
        pitch = min(CHIP + 2, room / len(tiles))
        for index, (device, tile) in enumerate(tiles):
            marked: dict[str, str | float] = {
                "class_": "halo",
                "data_device": device,
                "data_tile": str(tile),
            }
            self.chip(parent, x + index * pitch, y, pitch, device, self.hatch(device), **marked)

    def hollow(self, parent: Element, x: float, y: float, room: float, devices: tuple[str, ...]) -> None:
        """Devices that have nothing to do."""
        pitch = min(CHIP + 2, room / len(devices))
        for index, device in enumerate(devices):
            self.chip(
                parent, x + index * pitch, y, pitch, device, "none", stroke_dasharray="2 1.5", class_="idle"
            )

    def shaft(
        self, parent: Element, x: float, y: float, length: float, height: float, received: dict[str, int]
    ) -> None:
        """The shaft of an arrow, divided among those who receive."""
        total = sum(received.values())
        y -= height / 2
        for device, num_bytes in received.items():
            part = height * num_bytes / total
            if part:
                put(parent, "rect", x=x, y=y, width=length, height=part, fill=self.colours[device])
            y += part
