"""Which messages leave the zeros of a rectified layer out."""

from __future__ import annotations

from manyhands.ir.graph import Layer, Pointwise
from manyhands.ir.plan import Plan
from manyhands.ir.program import Content

LEAST_BYTES = 8 << 10  # smaller ones are on their way sooner than they are packed


def is_packed(plan: Plan, layer: Layer, content: Content, num_bytes: int) -> bool:
    """Of a plan that packs: large tiles of rectified layers, and their gradients."""
    rectified = isinstance(layer.operation, Pointwise) and layer.operation.rectifies
    tile = content in (Content.VALUE, Content.GRADIENT)
    return plan.packed and rectified and tile and num_bytes >= LEAST_BYTES
