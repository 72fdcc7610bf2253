"""Peak memory of each device, foreseen, and what a layer adds to it."""

from __future__ import annotations

from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Layer
from manyhands.ir.profile import BARE_BYTES
from manyhands.planning.footprints import saved_of
from manyhands.planning.holding import Holding
from manyhands.planning.ledger import Heap, Ledger
from manyhands.planning.lowering import Lowered

FIRST_STEP_BYTES = 11_000_000  # what the first step adds for good: code that is now in use
SCATTERING_STEPS = 3  # after which a heap does not grow any more
SCATTERED = 1.08  # over what best-fitting gaps would need: where blocks come to lie is a matter of chance


def peaks(
    lowered: Lowered,
    *,
    optimiser_slots: float = 1.0,
    optimiser_copies: float = 0.0,
    bare_bytes: int = BARE_BYTES,
    thrifty: bool = True,
    channels_last: bool | None = None,
) -> dict[str, int]:
    """The most memory that each device's process has resident in a run, in bytes."""
    return {
        device: peak(
            lowered,
            device,
            optimiser_slots=optimiser_slots,
            optimiser_copies=optimiser_copies,
            bare_bytes=bare_bytes,
            thrifty=thrifty,
            channels_last=channels_last,
        )
        for device in lowered.plan.devices
    }


def peak(
    lowered: Lowered,
    device: str,
    *,
    optimiser_slots: float = 1.0,
    optimiser_copies: float = 0.0,
    bare_bytes: int = BARE_BYTES,
    thrifty: bool = True,
    channels_last: bool | None = None,
) -> int:
    """The same of one device.

    `optimiser_slots`: numbers of state for each weight (momentum 1, Adam 2); `optimiser_copies`: of a weight
    while it is changed (weight decay 1, Adam 2). `thrifty`: freed memory goes back at once. `channels_last`:
    the order in which the device computes; None: it will choose, and the greater of both is foreseen.
    """
    territory, found = lowered.territory(device), []
    for order in (False, True) if channels_last is None else (channels_last,):
        ledger = Ledger() if thrifty else Ledger(Heap())
        holding = Holding(lowered, device, territory, ledger, channels_last=order)
        found.append(holding.slopes.starting_bytes())
        needed = holding.run(1 if thrifty else SCATTERING_STEPS, optimiser_slots, optimiser_copies)
        found.append(int(needed * (1 if thrifty else SCATTERED)) + FIRST_STEP_BYTES)
    return bare_bytes + max(found)


def layer_bytes(layer: Layer, tile: Tile) -> int:
    """Bytes that stay alive from a layer's forward to its backward when a device computes this tile of it.

    Additive over layers: what a reader keeps of a result is counted with the layer that made it, so a view
    or a layer that works in place adds nothing but what it keeps besides.
    """
    saved = saved_of(layer)
    if not layer.differentiable or not tile.numel:
        return 0
    own = 0 if saved.view else layer.item_bytes
    return int(tile.numel * (own + saved.extra_items * layer.item_bytes + saved.extra_bytes))
