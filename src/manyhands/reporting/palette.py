"""A colour for every device: told apart by the colour-blind, up to sixteen; then shades of grey."""

from __future__ import annotations

# Okabe and Ito's palette without black; the eighth is a violet darker than any of them.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#5b3a8c")
GREYS = ("#4d4d4d", "#b3b3b3", "#737373", "#d9d9d9", "#939393", "#2b2b2b")


def colours(devices: tuple[str, ...]) -> dict[str, str]:
    """One colour a device. The second eight are the first ones, darker or lighter; numbers tell the rest."""
    if len(devices) > 2 * len(HUES):
        return {device: GREYS[index % len(GREYS)] for index, device in enumerate(devices)}
    second = tuple(_mix(hue, "#ffffff" if _luminance(hue) < 0.3 else "#000000", 0.5) for hue in HUES)
    return dict(zip(devices, HUES + second, strict=False))


def ink(colour: str) -> str:
    """Black or white, whichever is read better on it."""
    return "#ffffff" if _luminance(colour) < 0.3 else "#000000"


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def _luminance(colour: str) -> float:
    """0 for black, 1 for white, as the eye sees it."""
    red, green, blue = (float((value / 255) ** 2.2) for value in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mix(colour: str, other: str, part: float) -> str:
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)
