"""How memory that is freed is kept or given back: glibc keeps what small devices do not have to spare."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # from malloc.h
_LARGEST_THRESHOLD = 32 << 20  # that glibc takes
_NEVER = 2**31 - 1
_THRESHOLD = 128 << 10


def return_freed_memory(threshold_bytes: int = _THRESHOLD) -> bool:
    """Blocks above the threshold get pages of their own and give them back when freed. False: not glibc.

    By default glibc raises its threshold to 32 MB as blocks are freed, and then keeps and scatters them.
    """
    return _set(_returning(threshold_bytes)) and trim()


def _returning(threshold_bytes: int) -> dict[int, int]:
    return {_MMAP_THRESHOLD: threshold_bytes, _TRIM_THRESHOLD: threshold_bytes, _ARENA_MAX: 2}


def keep_freed_memory() -> bool:
    """Freed blocks are kept and used again, so their pages need not be made anew. False: not glibc."""
    return _set({_MMAP_THRESHOLD: _LARGEST_THRESHOLD, _TRIM_THRESHOLD: _NEVER, _ARENA_MAX: 2})


def fill_holes() -> int:
    """Take the larger free places between blocks in use, for good: their pages are not made. How many bytes.

    glibc puts a large block into such a place before it gives it pages of its own, and keeps it there when
    it is freed; so what a process takes would depend on what was computed in it before.
    """
    malloc, free, count = _libc("malloc"), _libc("free"), _libc("mallinfo2") or _libc("mallinfo")
    if malloc is None or count is None:
        return 0
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    count.restype = _blocks(ctypes.c_int if _libc("mallinfo2") is None else ctypes.c_size_t)
    holes = size = count().fordblks
    taken = 0
    while size >= _THRESHOLD and taken < holes:
        before = count().hblks
        block = malloc(size)
        if block is None or count().hblks > before:  # there was no place: it has pages of its own
            free(block)
            size //= 2
        else:
            taken += size
    return taken


@cache
def _blocks(number: Any) -> type[ctypes.Structure]:
    """What glibc tells: how many blocks have pages of their own, and what is free among others."""
    names = ("before", number * 3), ("hblks", number), ("between", number * 4), ("fordblks", number)
    return type("Blocks", (ctypes.Structure,), {"_fields_": [*names, ("after", number)]})


def keep_all_freed_memory() -> bool:
    """The same for blocks of any size, of all threads. What a process takes may double, for lack of places
    that fit (glibc 2.36 and older). False: not glibc.
    """
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _ARENA_MAX: 1})


# What to put before a command so that it keeps all freed memory from its beginning.
KEEPING = ("env", "MALLOC_MMAP_MAX_=0", f"MALLOC_TRIM_THRESHOLD_={1 << 40}", "MALLOC_ARENA_MAX=1")


class Room:
    """Freed memory is kept for others as long as there is room, which saves making its pages anew.

    glibc 2.36 and older hardly use a freed block again for one of the same size that must be aligned, so
    what is kept grows. Before the limit would be passed, it is given back; and where even that would not
    do, blocks get pages of their own that go back at once. Without `keep` they always do, but for those
    that find a place among what was kept before: glibc looks there first, and keeps them, too.
    """

    def __init__(self, limit_bytes: int, *, keep: bool = True, step_bytes: int | None = None) -> None:
        """`step_bytes`: by how much the process may grow in a step, if the limit allows; None: up to it."""
        self.limit_bytes, self.keep, self.step_bytes = limit_bytes, keep, step_bytes
        self._most_bytes = limit_bytes  # in this step
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def __del__(self) -> None:
        os.close(self._statm)

    def enter(self) -> None:
        """At the beginning of a step."""
        if self.step_bytes is not None:
            self._most_bytes = min(self.limit_bytes, self._resident_bytes() + self.step_bytes)

    def make(self, growth_bytes: int) -> None:
        """Before something that lets the process grow by so much."""
        if not self._fits(growth_bytes):
            trim()
        if self.keep:
            keep_freed_memory() if self._fits(growth_bytes) else _set(_returning(_THRESHOLD))

    def leave(self) -> None:
        """At the end of a step: others find everything given back."""
        return_freed_memory()

    def _fits(self, growth_bytes: int) -> bool:
        return self._resident_bytes() + growth_bytes <= self._most_bytes

    def _resident_bytes(self) -> int:
        return int(os.pread(self._statm, 64, 0).split()[1]) * self._page_bytes


@cache
def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def _set(settings: dict[int, int]) -> bool:
    mallopt = _libc("mallopt")
    return mallopt is not None and all(mallopt(key, value) == 1 for key, value in settings.items())


def trim() -> bool:
    """Give back whatever is free, also between blocks in use."""
    malloc_trim = _libc("malloc_trim")
    if malloc_trim is None:
        return False
    malloc_trim(0)
    return True
