"""Drawings of plans: what is in the plan is in the picture, once, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.ir.cluster import Cluster, Device, local_cluster
from manyhands.ir.geometry import Axis, Cut, Layout, Span, Tile
from manyhands.ir.program import Content, Receive
from manyhands.ir.report import CutMap, DrawnSegment, PlanPicture
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.picturing import picture
from manyhands.planning.strategies import plan_by_name
from manyhands.planning.summary import summarise
from manyhands.reporting.drawing import draw
from manyhands.reporting.palette import colours
from manyhands.reporting.solids import Polygon, blocks, boxed, without
from tests.planning.plans import small_net

CASES = [
    (2, "rows", ()),
    (3, "rows", (3, 1, 1)),
    (4, "grid", ()),
    (4, "batch:2,rows:2", ()),
    (4, "rows:2,batch:2", (3, 1, 1, 2)),  # the batch is cut differently in the upper and the lower half
    (4, "channels", ()),
    (4, "rows:2,channels:2", ()),
    (3, "rows; two = channels; fc = single", ()),
    (3, "batch", (2, 1, 1)),
    (3, "single", ()),
]
each_case = pytest.mark.parametrize(("count", "strategy", "shares"), CASES, ids=[c[1] for c in CASES])
Shares = tuple[int, ...]


def lowered(count: int, strategy: str, shares: Shares = ()) -> Lowered:
    graph = small_net()
    return lower(graph, plan_by_name(graph, local_cluster(count).names, strategy, shares=shares))


def pictured(low: Lowered) -> PlanPicture:
    return picture("net", summarise(low, local_cluster(len(low.plan.devices))), low)


def maps(low: Lowered) -> list[CutMap]:
    facts = pictured(low)
    return [*facts.inputs, *(segment.result for segment in facts.segments)]


def parsed(low: Lowered) -> ElementTree.Element:
    return ElementTree.fromstring(draw(pictured(low)))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if element.get("class") == name]


def area(polygon: Polygon) -> float:
    """By the shoelace formula."""
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairwise((*polygon, polygon[0])))) / 2


@each_case
def test_tiles_cover_every_map_once(count: int, strategy: str, shares: Shares) -> None:
    low = lowered(count, strategy, shares)
    drawn = of_class(parsed(low), "map")
    assert [element.get("data-layer") for element in drawn] == [cut.layer for cut in maps(low)]
    for element, cut in zip(drawn, maps(low), strict=True):
        shown = {(e.attrib["data-device"], e.attrib["data-tile"]) for e in of_class(element, "tile")}
        tiles = [Tile.parse(text) for _, text in shown]
        assert sum(tile.numel for tile in tiles) == prod(cut.shape)
        assert all(not (a & b).numel for a in tiles for b in tiles if a is not b)


@each_case
def test_on_paper_tiles_fill_every_face_of_a_map(count: int, strategy: str, shares: Shares) -> None:
    for cut in maps(lowered(count, strategy, shares)):
        for block in blocks(cut, 100):
            whole = block.faces(block.whole)
            found = [block.faces(boxed(tile, cut.shape)) for _, tile in cut.owned]
            filled = sum(area(polygon) for faces in found if faces for polygon in faces.polygons)
            assert whole and filled == pytest.approx(sum(map(area, whole.polygons)))
            if len(cut.shape) == 4:
                assert block.width * cut.shape[2] == pytest.approx(block.height * cut.shape[3])


@each_case
def test_a_halo_is_drawn_where_a_device_reaches_beyond_its_tile(
    count: int, strategy: str, shares: Shares
) -> None:
    low = lowered(count, strategy, shares)
    for cell in of_class(parsed(low), "cell"):
        for element in of_class(cell, "map"):
            name = element.attrib["data-layer"]
            if name == "x":
                continue
            used = [low.regions.computed[name]] + [t for (n, _), t in low.regions.needed.items() if n == name]
            home = low.regions.home[name]
            reach = {d for tiles in used for d in tiles if not home[d].covers(tiles[d])}
            assert {e.attrib["data-device"] for e in of_class(cell, "halo")} == reach


def test_devices_that_read_more_of_the_input_than_their_tile_have_a_halo_there() -> None:
    rows = of_class(parsed(lowered(2, "rows")), "map")[0]
    tiles = {e.attrib["data-device"]: e.attrib["data-tile"] for e in of_class(rows, "halo")}
    assert tiles == {"device-0": "0:4,0:2,0:6,0:8", "device-1": "0:4,0:2,4:9,0:8"}
    assert not of_class(of_class(parsed(lowered(2, "batch")), "map")[0], "halo")


@each_case
def test_the_arrows_carry_all_bytes_but_those_of_weights(count: int, strategy: str, shares: Shares) -> None:
    low = lowered(count, strategy, shares)
    steps = [step for program in low.programs for step in program.steps]
    messages = [step.message for step in steps if isinstance(step, Receive)]
    weights = (Content.SLOPES, Content.WEIGHTS)
    total = sum(message.num_bytes for message in messages if message.content not in weights)
    drawn = [int(e.attrib["data-bytes"]) for e in of_class(parsed(low), "transfer")]
    assert sum(drawn) == total and len(drawn) == len(low.plan.segments) + 1


@each_case
def test_the_same_plan_gives_the_same_bytes(count: int, strategy: str, shares: Shares) -> None:
    first, second = (draw(pictured(lowered(count, strategy, shares))) for _ in range(2))
    assert first == second


def test_every_device_is_in_the_legend_whatever_it_is_called() -> None:
    graph, names = small_net(), ("<pi & co>", 'the "old" one', "Ger\u00e4t-3")
    low = lower(graph, plan_by_name(graph, names, "rows"))
    facts = summarise(low, Cluster(tuple(Device(name) for name in names)))
    root = ElementTree.fromstring(draw(picture("net", facts, low)))
    legend = [element.text or "" for element in of_class(root, "legend")]
    assert [text.split("  ") for text in legend] == [[str(i), name] for i, name in enumerate(names)]


def test_the_title_names_model_batch_devices_and_exactness() -> None:
    said = " ".join(element.text or "" for element in parsed(lowered(3, "rows")).iter())
    assert "net, batch 4, 3 devices" in said and "exact: trains as one device would" in said


def test_nothing_is_loaded_or_run_and_the_background_is_white() -> None:
    root = parsed(lowered(3, "rows"))
    assert not {e.tag.rpartition("}")[2] for e in root.iter()} - {
        "svg",
        "defs",
        "pattern",
        "rect",
        "path",
        "g",
        "text",
    }
    values = [value for e in root.iter() for value in e.attrib.values()]
    assert not [value for value in values if "url(" in value and not value.startswith("url(#halo-")]
    background = next(element for element in root if element.tag.endswith("rect"))
    assert background.get("fill") == "#ffffff" and background.get("width") == root.get("width")


def test_devices_that_compute_nothing_of_a_segment_are_marked_idle() -> None:
    cells = of_class(parsed(lowered(3, "rows; fc = single")), "cell")
    by_layer = {
        e.get("data-layer"): len(of_class(cell, "idle")) for cell in cells for e in of_class(cell, "map")
    }
    assert by_layer["fc"] == 2 and by_layer["one"] == 0


def test_unequal_shares_are_as_wide_as_they_are() -> None:
    fc = of_class(parsed(lowered(3, "batch", (2, 1, 1))), "cell")[-2]
    widths = [float(e.attrib["width"]) for e in of_class(fc, "share")]
    assert widths == pytest.approx([2 * widths[1], widths[1], widths[1]], rel=0.01)


def deep(depth: int, count: int, *, alike: bool) -> PlanPicture:
    """A deep picture, without the minutes of planning it: rows with halos, of one size or of many."""
    small, devices = pictured(lowered(2, "rows")), local_cluster(count).names
    layout = Layout(devices, (Cut(Axis.ROWS, count),), (1,) * count)
    segments = []
    for index in range(depth):
        shape = (2, 4, 400 - (0 if alike else index), 50)
        tiles = layout.tiles(shape)
        reach = {
            d: Span(max(t.spans[2].start - 1, 0), min(t.spans[2].stop + 1, shape[2]))
            for d, t in tiles.items()
        }
        beyond = tuple((d, tiles[d].with_span(2, span)) for d, span in reach.items())
        cut = CutMap(f"layer{index}", shape, tuple(tiles.items()), beyond)
        segments.append(DrawnSegment(cut, (), tuple((d, 1000) for d in devices), ()))
    facts = replace(small.facts, devices=devices, segments=small.facts.segments[:1] * depth)
    inputs, loss = (segments[0].result,), tuple((d, 0) for d in devices)
    return PlanPicture("deep", facts, inputs, tuple(segments), loss)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("depth", "count"), [(31, 2), (160, 16), (160, 100)])
def test_a_deep_network_on_many_devices_stays_a_picture(depth: int, count: int, alike: bool) -> None:
    text = draw(deep(depth, count, alike=alike))
    root = ElementTree.fromstring(text)
    assert len(text) < 1_000_000
    assert float(root.attrib["width"]) < 2000 and float(root.attrib["height"]) < 5000
    drawn = of_class(root, "map")
    assert {drawn[1].get("data-layer"), drawn[-1].get("data-layer")} == {"layer0", f"layer{depth - 1}"}
    if len(drawn) - 1 < depth:
        assert f"{len(drawn) - 1} of {depth} segments are drawn" in text
    carried = sum(int(e.attrib["data-bytes"]) for e in of_class(root, "transfer"))
    assert carried == depth * count * 1000  # what is left out is still counted


@given(st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4).map(sorted), min_size=2, max_size=4))
def test_a_tile_is_its_owners_part_and_the_boxes_without_it(edges: list[list[int]]) -> None:
    tile = Tile(tuple(Span(a, d) for a, _, _, d in edges))
    own = Tile(tuple(Span(b, c) for _, b, c, _ in edges))
    pieces = [*without(tile, own), own]
    assert sum(piece.numel for piece in pieces) == tile.numel
    assert all(tile.covers(piece) for piece in pieces)
    assert all(not (a & b).numel for a in pieces for b in pieces if a is not b)


def test_sixteen_devices_have_sixteen_colours() -> None:
    assert len(set(colours(tuple("abcdefghijklmnop")).values())) == 16
    assert len(colours(tuple(map(str, range(40))))) == 40
