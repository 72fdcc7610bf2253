"""Being told to end while something is made in the kernel or removed from it: then it waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WAITING = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))


@contextmanager
def unstopped() -> Iterator[None]:
    """Signals to end take effect when this is through. Copies that are forked meanwhile end at once: what
    they would tidy up is ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted, owner = list[int](), os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            os._exit(128 + number)
        noted.append(number)

    before = {number: signal.signal(number, note) for number in WAITING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in noted[:1]:
            signal.raise_signal(number)
