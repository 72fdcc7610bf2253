"""Memory on paper: a chain counted by hand, what more devices and more state do to it, and the heap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph, Input, Layer, Mean, Mode, Pointwise, Pool, Saved, Slide, Window
from manyhands.planning.ledger import Block, Heap, Ledger
from manyhands.planning.memory import FIRST_STEP_BYTES, layer_bytes, peaks
from manyhands.planning.passes import NODE_BYTES
from tests.planning.plans import conv, lowered, small_net

SHAPE = (2, 16, 64, 64)
MAP, FILTERS = 2 * 16 * 64 * 64 * 4, 16 * 16 * 9 * 4


def chain() -> Graph:
    """Two convolutions and a mean: what comes out is too small to count."""
    return Graph(
        (
            Layer("x", Input(0), (), SHAPE, differentiable=False),
            conv("one", "x", SHAPE, 16),
            conv("two", "one", SHAPE, 16),
            Layer("mean", Mean(True), ("two",), (2, 16, 1, 1)),
        ),
        ("mean",),
    )


@pytest.mark.parametrize(
    ("channels_last", "maps", "filters"),
    [
        (False, 6, 5),  # images, the first result, two gradients; two maps reordered by the second's backward
        (True, 5, 7),  # images twice (as they came and reordered) ...; filters and their gradient reordered
    ],
)
def test_a_chain_counted_by_hand(channels_last: bool, maps: int, filters: int) -> None:
    """The worst moment is the second convolution's backward. Weights and momentum: four times the filters."""
    found = peaks(lowered(chain(), 1, "single"), bare_bytes=0, channels_last=channels_last)["a"]
    assert found == maps * MAP + filters * FILTERS + 3 * NODE_BYTES + FIRST_STEP_BYTES


@pytest.mark.parametrize("strategy", ["rows", "batch"])
def test_two_devices_need_less_each_than_one(strategy: str) -> None:
    alone = peaks(lowered(chain(), 1, "single"), bare_bytes=0)["a"] - FIRST_STEP_BYTES
    for found in peaks(lowered(chain(), 2, strategy), bare_bytes=0).values():
        assert found - FIRST_STEP_BYTES < 0.8 * alone


@pytest.mark.parametrize("strategy", ["rows", "batch", "channels", "batch:2,rows:2"])
def test_more_state_adds_what_each_device_owns(strategy: str) -> None:
    found = lowered(small_net(), 4 if ":" in strategy else 2, strategy)
    momentum, adam = (peaks(found, optimiser_slots=slots) for slots in (1.0, 2.0))
    for device in found.plan.devices:
        owned = sum(piece.tile.numel for piece in found.territory(device).owned)
        assert adam[device] - momentum[device] == 4 * owned


@pytest.mark.parametrize("strategy", ["rows", "channels", "batch"])
def test_what_is_kept_scattered_is_never_less(strategy: str) -> None:
    found = lowered(chain(), 2, strategy)
    thrifty, loose = (peaks(found, thrifty=thrifty) for thrifty in (True, False))
    assert all(loose[device] >= thrifty[device] for device in found.plan.devices)


def test_a_layer_adds_what_outlives_its_forward() -> None:
    tile = Tile.whole(SHAPE)
    relu = Layer("relu", Pointwise(True), ("x",), SHAPE, saved=Saved((True,), True, view=True))
    pool = Layer("pool", Pool(Mode.MAX, Window(Slide(3, 1, 1, 1), Slide(3, 1, 1, 1))), ("x",), SHAPE)
    assert layer_bytes(conv("one", "x", SHAPE, 16), tile) == MAP
    assert layer_bytes(relu, tile) == 0
    assert layer_bytes(pool, tile) == 3 * MAP


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50 << 20) | st.integers(0, 300)), max_size=80))
def test_a_heap_has_at_least_what_is_alive(actions: list[tuple[bool, int]]) -> None:
    """And nothing that is alive lies on top of something else."""
    ledger, alive = Ledger(heap := Heap()), list[Block]()
    for frees, size in actions:
        if frees and alive:
            ledger.free(alive.pop(size % len(alive)))
        else:
            alive.append(ledger.new(size))
        assert heap.resident >= ledger.alive == sum(block.num_bytes for block in alive)
        inside = sorted((b.address, b.num_bytes) for b in alive if b.address is not None)
        ends = [address + size for address, size in inside]
        assert all(end <= start for end, (start, _) in zip(ends, inside[1:], strict=False))
    assert ledger.peak >= heap.resident


def test_a_heap_uses_again_what_was_freed() -> None:
    heap = Heap()
    ledger = Ledger(heap)
    ledger.free(ledger.new(8 << 20))  # pages of its own; the threshold rises
    first, _ = ledger.new(4 << 20), ledger.new(1 << 10)
    ledger.free(first)
    before = heap.resident
    ledger.new(3 << 20)
    assert heap.resident == before
    ledger.new(4 << 20)
    assert heap.resident == before + (4 << 20)


def test_a_block_is_freed_once() -> None:
    ledger = Ledger()
    block = ledger.new(1)
    ledger.free(block)
    with pytest.raises(AssertionError, match="more often"):
        ledger.free(block)
