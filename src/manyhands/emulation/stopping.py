"""Being told to end while something is made in the kernel or removed from it: then it waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

WAITING = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))


@contextmanager
def unstopped() -> Iterator[None]:
    """Signals to end take effect when this is through; what was ignored stays so. Copies that are forked
    meanwhile end at once: what they would tidy up is ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted, owner = list[int](), os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            os._exit(128 + number)
        noted.append(number)

    with ExitStack() as stack:  # whatever comes meanwhile, every handler is put back
        stack.callback(_take_effect, noted)
        for number in WAITING:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # None: not Python's, so it cannot be put back
                stack.callback(signal.signal, number, handler)
                signal.signal(number, note)
        yield


def _take_effect(noted: list[int]) -> None:
    for number in noted[:1]:
        signal.raise_signal(number)
