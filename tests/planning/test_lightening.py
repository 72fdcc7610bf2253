"""Plans in less memory: what is computed a second time, what is set aside, and that nothing travels twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.api import choose, plan
from manyhands.ir.cluster import Cluster, local_cluster
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import (
    BatchNorm,
    Graph,
    Input,
    Layer,
    Mode,
    Parameter,
    Pointwise,
    Pool,
    Slide,
    Window,
)
from manyhands.ir.parsing import parse_program
from manyhands.ir.plan import Plan
from manyhands.ir.portions import portions
from manyhands.ir.program import Backward, Drop, Keep, Program, Redo, Rerun, Restore, sent_bytes
from manyhands.planning.checking import Flawed, check
from manyhands.planning.costs import Costs
from manyhands.planning.lightening import lightened
from manyhands.planning.lowering import Lowered, lower
from manyhands.planning.memory import FIRST_STEP_BYTES, peaks
from manyhands.planning.simulation import simulate
from manyhands.planning.summary import summarise
from manyhands.reporting.text import plan_notes
from tests.planning.plans import conv, lowered, small_net, two_convs

BARE = 100_000_000
STRATEGIES = ("rows", "columns", "batch", "channels", "batch:2,rows:2", "single")

FIRST_DEVICE = """program a
  prepare one>1[0:1,0:3,0:5,0:4]
  expect value one>1[0:1,0:3,4:5,0:4] from b #0 48
  forward 0 unkept: one
  send value one>1[0:1,0:3,3:4,0:4] to b #1 48
  place one>1[0:1,0:3,0:4,0:4]
  drop one
  receive value one>1[0:1,0:3,4:5,0:4] from b #0 48
  keep one>1[0:1,0:3,4:5,0:4]
  prepare two>2[0:1,0:2,0:8,0:4]
  expect value two>2[0:1,0:2,4:8,0:4] from b #2 128
  forward 1 unkept: two
  drop one>1
  send value two>2[0:1,0:2,0:4,0:4] to b #3 128
  place two>2[0:1,0:2,0:4,0:4]
  drop two
  receive value two>2[0:1,0:2,4:8,0:4] from b #2 128
  loss
  drop two>2
  expect gradient one>1[0:1,0:3,3:4,0:4] from b #5 48
  rerun 0: one
  prepare one>1[0:1,0:3,0:5,0:4]
  place one>1[0:1,0:3,0:4,0:4]
  drop one
  restore one>1[0:1,0:3,4:5,0:4]
  redo 1 by 1: two
  drop one>1
  send gradient one>1[0:1,0:3,4:5,0:4] to b #4 48
  return one>1[0:1,0:3,0:4,0:4]
  receive gradient one>1[0:1,0:3,3:4,0:4] from b #5 48
  redo 0 by 1: one"""


def light(graph: Graph, num_devices: int, strategy: str, *, redo: int = 1, refill: bool = True) -> Lowered:
    chosen = lowered(graph, num_devices, strategy).plan
    segments = tuple(replace(segment, redo=redo, refill=refill) for segment in chosen.segments)
    return lower(graph, replace(chosen, segments=segments))


def test_two_convolutions_that_keep_nothing() -> None:
    """The row that the other device sent is set aside and put in again; the rest is computed again."""
    assert str(light(two_convs(), 2, "rows").programs[0]).startswith(FIRST_DEVICE)


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_check_and_read_back_and_send_no_more(strategy: str, refill: bool) -> None:
    num_devices = 4 if ":2" in strategy else 2
    plain = lowered(small_net(), num_devices, strategy)
    found = light(small_net(), num_devices, strategy, refill=refill)
    check(found)
    for program, as_it_was in zip(found.programs, plain.programs, strict=True):
        assert parse_program(str(program)) == program
        assert sent_bytes(program) == sent_bytes(as_it_was)
        assert not any(isinstance(step, Backward) for step in program.steps)


@pytest.mark.parametrize(
    ("kind", "flaw"), [(Keep, "it was not set aside"), (Rerun, "is not there"), (Restore, "incomplete")]
)
def test_a_step_that_is_left_out_is_found(kind: type, flaw: str) -> None:
    found = light(two_convs(), 2, "rows")
    first, second = found.programs
    steps = tuple(step for step in first.steps if not isinstance(step, kind))
    with pytest.raises(Flawed, match=flaw):
        check(replace(found, programs=(Program(first.device, steps), second)))


def test_what_is_kept_cannot_be_redone() -> None:
    found = lowered(two_convs(), 2, "rows")
    first, second = found.programs
    steps = tuple(
        Redo(s.chunk, ("two",), 0) if s == Backward(1, later=True) else s
        for s in first.steps
        if s != Drop("one", 1)
    )
    with pytest.raises(Flawed, match="it was kept"):
        check(replace(found, programs=(Program(first.device, steps), second)))


def test_a_norm_of_the_whole_batch_is_not_cut_into_samples() -> None:
    """On one device its statistics are those of all samples; among devices they are known beforehand."""

    def samples(found: Lowered) -> dict[int, int]:
        return {s.chunk: s.samples for s in found.programs[0].steps if isinstance(s, Redo)}

    alone = light(small_net(), 1, "single")
    assert samples(alone) == {0: 0}
    among = light(small_net(), 2, "rows")
    norm = next(s.chunk for s in among.programs[0].steps if isinstance(s, Redo) and "norm" in s.layers)
    assert samples(among)[norm] == 1


def deep_net(blocks: int = 6) -> Graph:
    """Convolutions, norms and activations, all of one size: 32 MB."""
    shape = (16, 16, 176, 176)
    layers = [Layer("x", Input(0), (), shape, differentiable=False)]
    for number in range(blocks):
        weights = tuple(Parameter(role, f"norm{number}.{role}", (16,), True) for role in ("weight", "bias"))
        layers += [
            conv(f"conv{number}", layers[-1].name, shape, 16),
            Layer(f"norm{number}", BatchNorm(True, 1e-5, 0.1), (f"conv{number}",), shape, weights),
            Layer(f"relu{number}", Pointwise(), (f"norm{number}",), shape),
        ]
    return Graph(tuple(layers), (layers[-1].name,))


def plain_net() -> Graph:
    """Convolutions and activations of one large image without norms; a stride makes it a quarter."""
    layers = [Layer("x", Input(0), (), (1, 16, 704, 704), differentiable=False)]
    for number, size in enumerate((704, 704, 704, 352, 352, 352)):
        shape, stride = (1, 16, size, size), 2 if number == 3 else 1
        layers.append(conv(f"conv{number}", layers[-1].name, shape, 16, stride))
        layers.append(Layer(f"relu{number}", Pointwise(), (f"conv{number}",), shape))
    return Graph(tuple(layers), (layers[-1].name,))


@pytest.mark.parametrize(("strategy", "num_devices"), [("single", 1), ("rows", 2), ("batch", 2)])
def test_bands_of_rows_where_nothing_else_fits(strategy: str, num_devices: int) -> None:
    """The less memory, the more bands, and none where there is enough."""
    graph = plain_net()
    if strategy == "batch":
        graph = _two_of(graph)
    needed = most(graph, plan(graph, num_devices, strategy)) - BARE - FIRST_STEP_BYTES
    bands = []
    for part in (1.1, 0.8, 0.5):
        limit = int(BARE + FIRST_STEP_BYTES + part * needed)
        found = plan(graph, limited(num_devices, limit), strategy)
        assert most(graph, found) <= limit
        check(lower(graph, found))
        bands.append(max(segment.bands for segment in found.segments))
    assert bands == [1, 2, 4]


def _two_of(graph: Graph) -> Graph:
    layers = tuple(replace(layer, shape=(2, *layer.shape[1:])) for layer in graph.layers)
    return replace(graph, layers=layers)


def test_bands_overlap_by_what_windows_reach() -> None:
    graph = two_convs()
    layers = graph.by_name()
    computed = {name: Tile.whole(layer.shape) for name, layer in layers.items()}
    found = portions(("one", "two"), ["two"], computed, layers, bands=2)
    rows = [{name: str(tile.spans[2]) for name, tile in each.regions.items()} for each in found]
    assert rows == [{"two": "0:4", "one": "0:5", "x": "0:6"}, {"two": "4:8", "one": "3:8", "x": "2:8"}]
    assert [str(each.own["two"].spans[2]) for each in found] == ["0:4", "4:8"]
    assert portions(("one", "two"), ["two"], computed, layers) == ()


def test_programs_in_bands_read_back_and_a_layer_that_sees_all_rows_has_none() -> None:
    chosen = lowered(small_net(), 1, "single").plan
    (whole,) = chosen.segments
    names = whole.layers
    parts = (names[:1], names[1:2], names[2:4], names[4:])  # conv; norm; relu, conv; mean and all after it
    segments = tuple(replace(whole, layers=part, redo=1, refill=True, bands=3) for part in parts)
    found = lower(small_net(), replace(chosen, segments=segments))
    check(found)
    (program,) = found.programs
    assert parse_program(str(program)) == program
    text = str(program)
    assert "forward 0 unkept in 3: one" in text
    assert "forward 1 unkept: norm" in text
    assert "redo 2 by 1 in 3: relu two" in text
    assert "rerun 0 in 3: one" in text
    assert "redo 3 by 1: mean flat fc" in text


def test_the_largest_band_is_counted_wherever_it_lies() -> None:
    """Nine rows in eight bands: one of them, in the middle, has two rows, as most of five have."""
    slide = Slide(64, 64)
    layers = (
        Layer("x", Input(0), (), (1, 3, 576, 576), differentiable=False),
        conv("conv", "x", (1, 64, 576, 576), 3),
        Layer("pool", Pool(Mode.MAX, Window(slide, slide)), ("conv",), (1, 64, 9, 9)),
    )
    graph = Graph(layers, ("pool",))
    chosen = lowered(graph, 1, "single").plan
    (whole,) = chosen.segments
    held = {}
    for bands in (5, 8, 9):
        found = lower(graph, replace(chosen, segments=(replace(whole, redo=1, bands=bands),)))
        held[bands] = peaks(found, bare_bytes=0)["a"]
    assert abs(held[8] / held[5] - 1) < 0.02
    assert held[9] < 0.7 * held[8]


def test_where_nothing_fits_the_smallest_is_returned() -> None:
    graph = plain_net()
    chosen = plan(graph, 1, "single")
    asked: dict[Plan, float] = {}

    def fill(some: Plan) -> float:
        asked[some] = float(most(graph, some))
        return asked[some]

    cluster = local_cluster(1)
    found = lightened(graph, chosen, Costs(cluster), fill)
    assert asked[found] == min(asked.values())
    assert max(segment.bands for segment in found.segments) > 1


def test_bands_take_longer_and_hold_less() -> None:
    graph = plain_net()
    chosen = lowered(graph, 1, "single").plan
    (whole,) = chosen.segments
    cluster = replace(local_cluster(1), devices=(replace(local_cluster(1).devices[0], name="a"),))
    held, seconds = [], []
    for bands in (1, 4, 16):
        found = lower(graph, replace(chosen, segments=(replace(whole, redo=1, bands=bands),)))
        held.append(peaks(found, bare_bytes=0)["a"])
        seconds.append(simulate(found, cluster).cost.seconds)
    assert held[0] > 2 * held[1] > 2 * held[2]
    assert seconds[0] < seconds[1] < seconds[2]


def limited(num_devices: int, limit: int) -> Cluster:
    cluster = local_cluster(num_devices)
    devices = tuple(replace(d, memory_bytes=limit, bare_bytes=BARE) for d in cluster.devices)
    return replace(cluster, devices=devices)


def most(graph: Graph, chosen: Plan) -> int:
    return max(peaks(lower(graph, chosen), bare_bytes=BARE).values())


@pytest.mark.parametrize("strategy", ["rows", "batch", "single"])
def test_a_named_plan_is_made_to_fit_with_as_little_as_does(strategy: str) -> None:
    graph = deep_net()
    plain = plan(graph, 2, strategy)
    needed = most(graph, plain)
    assert plan(graph, limited(2, 2 * needed), strategy) == plain
    for part in (0.9, 0.75, 0.65):
        limit = int(BARE + FIRST_STEP_BYTES + part * (needed - BARE - FIRST_STEP_BYTES))
        found = plan(graph, limited(2, limit), strategy)
        assert most(graph, found) <= limit
        redone = [segment.redo for segment in found.segments]
        assert any(redone)
        assert part < 0.9 or not all(redone)


def test_auto_takes_what_is_computed_twice_into_account() -> None:
    graph = deep_net()
    free = choose(graph, limited(2, 10**10)).best
    assert free is not None
    limit = int(0.6 * (most(graph, free.plan) - BARE)) + BARE
    found = choose(graph, limited(2, limit)).best
    assert found is not None
    assert max(size for _, size in found.cost.peak_bytes) <= limit
    assert any(segment.redo for segment in found.plan.segments)
    assert found.cost.seconds >= free.cost.seconds


def test_computing_twice_takes_longer_and_holds_less() -> None:
    graph = deep_net()
    plain, found = lowered(graph, 2, "rows"), light(graph, 2, "rows", refill=False)
    deeper = light(graph, 2, "rows", refill=True)
    cluster = replace(local_cluster(2), devices=tuple(
        replace(device, name=name) for device, name in zip(local_cluster(2).devices, "ab", strict=True)
    ))  # fmt: skip
    costs = [simulate(each, cluster).cost for each in (plain, found, deeper)]
    assert costs[0].seconds < costs[1].seconds < costs[2].seconds
    held = [max(peaks(each, bare_bytes=0).values()) for each in (plain, found)]
    assert held[1] < 0.75 * held[0]
    assert costs[0].traffic_bytes == costs[1].traffic_bytes == costs[2].traffic_bytes


def test_the_plan_says_what_is_computed_twice_and_what_does_not_fit() -> None:
    graph = deep_net()
    needed = most(graph, plan(graph, 2, "rows"))
    cluster = limited(2, int(0.75 * needed))
    found = lower(graph, plan(graph, cluster, "rows"))
    notes = "\n".join(plan_notes(summarise(found, cluster)))
    assert "To fit, segments " in notes
    assert "NOT fit" not in notes
    tiny = limited(2, BARE + 1)
    notes = "\n".join(plan_notes(summarise(lower(graph, plan(graph, tiny, "rows")), tiny)))
    assert "Does NOT fit: device-0, device-1 would need more memory than there is." in notes
    assert "computed a second time" not in notes
