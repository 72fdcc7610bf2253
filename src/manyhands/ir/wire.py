"""In which type numbers travel."""

from __future__ import annotations

from manyhands.ir.program import Content

WIRE_TYPES = ("bfloat16",)
_ROUNDED = (Content.VALUE, Content.GRADIENT, Content.SLOPES)


def wire_type(wire: str | None, content: Content, dtype: str) -> str:
    """Tiles and gradients may be rounded for their way; statistics and weights never are."""
    rounded = wire is not None and content in _ROUNDED and dtype in ("float32", "float64")
    return wire if wire is not None and rounded else dtype
