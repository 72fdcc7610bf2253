"""What travels of a tile: all of it or without zeros, and in which type."""

from __future__ import annotations

from manyhands.ir.graph import ITEM_BYTES, Layer, Pointwise
from manyhands.ir.plan import Plan
from manyhands.ir.program import Content
from manyhands.ir.wire import wire_type

LEAST_BYTES = 8 << 10  # smaller ones are on their way sooner than they are packed


def is_packed(plan: Plan, layer: Layer, content: Content, num_bytes: int) -> bool:
    """Of a plan that packs: large tiles of rectified layers, and their gradients."""
    rectified = isinstance(layer.operation, Pointwise) and layer.operation.rectifies
    tile = content in (Content.VALUE, Content.GRADIENT)
    return plan.packed and rectified and tile and num_bytes >= LEAST_BYTES


def item_bytes(plan: Plan, content: Content, dtype: str) -> int:
    """Of one number on its way."""
    return ITEM_BYTES[wire_type(plan.wire, content, dtype)]
