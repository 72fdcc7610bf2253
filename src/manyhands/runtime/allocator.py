"""Give freed memory back: glibc keeps what small devices do not have to spare."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # from malloc.h


def return_freed_memory(threshold_bytes: int = 128 << 10) -> bool:
    """Blocks above the threshold get pages of their own and give them back when freed. False: not glibc.

    By default glibc raises its threshold to 32 MB as blocks are freed, and then keeps and scatters them.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: threshold_bytes, _TRIM_THRESHOLD: threshold_bytes, _ARENA_MAX: 2}
    return all(mallopt(key, value) == 1 for key, value in settings.items())
