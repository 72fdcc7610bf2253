"""While a run goes on over several machines, every device hears what befell another, under its right name.

A device that dies takes its neighbours along, and they theirs. So the first to see a death writes it down at
the store, where the first word stands, and all leave with that. The first device hosts the store: it leaves
last.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manyhands.errors import DeviceLost
from manyhands.runtime.meeting import LINGER_S, Card, card_key, have_read, linger

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Failure = dict[str, Any]
BEAT_S = 0.5
ANSWER_S = 5.0  # for the store to answer, before its host is taken for lost


class Watch:
    """A thread that shows this device's card, reads the others', and ends the process when one failed.

    The thread alone talks to the store: a call to a store whose host is frozen never comes back.
    """

    def __init__(
        self,
        store: TCPStore,
        card: Card,
        devices: tuple[str, ...],
        timeout_s: float,
        end: Callable[[Failure], None],
    ) -> None:
        self.store, self.card, self.devices, self.timeout_s, self.end = store, card, devices, timeout_s, end
        self.seen: dict[str, tuple[bytes, float]] = {}
        self.looked_at = time.monotonic()  # when the store last answered
        self.mine: Failure | None = None
        self.agreed: Failure | None = None
        self.finished = False
        self.wake, self.settled, self.over = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    @property
    def device(self) -> str:
        return self.card.device

    @property
    def first(self) -> str:
        return self.devices[0]

    def settle(self, failure: Failure) -> Failure:
        """What all devices agree on as the cause: this, or what another saw before."""
        lost = failure["kind"] == "lost"
        # Who waits for a frozen device does not answer either; the one without a sign of life is the cause.
        if lost and (silent := self.silent(self.timeout_s / 2)):
            failure = self._lost(silent, f"no answer within {self.timeout_s:g} s")
            if silent == self.first:
                return failure
        self.mine = failure
        self.wake.set()
        if self.settled.wait(ANSWER_S) and self.agreed is not None:
            return self.agreed
        return self._lost(self.first, "it does not answer any more") if lost else failure

    def finish(self) -> None:
        """Come back when every device has done its part. Raises DeviceLost if the first does not answer."""
        self.finished = True
        self.wake.set()
        while not self.over.wait(BEAT_S):
            if time.monotonic() - self.looked_at > self.timeout_s:
                raise DeviceLost(self.first, f"no answer within {self.timeout_s:g} s")

    def silent(self, seconds: float) -> str | None:
        """Who has given no sign of life for so long; the store's host where the store is silent."""
        if time.monotonic() - self.looked_at > seconds + BEAT_S:
            return self.first
        waited = {name: self.looked_at - when for name, (_, when) in self.seen.items()}
        longest = max(waited, key=lambda name: waited[name], default=None)
        return longest if longest is not None and waited[longest] > seconds else None

    def _watch(self) -> None:
        try:
            while not self.over.is_set():
                self._look()
                if self.agreed is not None:
                    self._leave(self.agreed)
                    return
                self.wake.wait(BEAT_S)
                self.wake.clear()
        except RuntimeError as error:  # the store is gone, and its host leaves last
            if self.agreed is None:
                self.agreed = self._lost(self.first, f"the connection broke: {str(error).splitlines()[0]}")
            self.settled.set()
            self.end(self.agreed)

    def _look(self) -> None:
        """Show that we live, see who else does, and hear whether anybody failed or all are done."""
        self.card.show(self.store)
        cards = self.store.multi_get([card_key(name) for name in self.devices])
        now = time.monotonic()
        for name, card in zip(self.devices, cards, strict=True):
            if name not in self.seen or self.seen[name][0] != card:
                self.seen[name] = card, now
        self.looked_at = now
        dead = self.silent(self.timeout_s)
        mine = self.mine or (self._lost(dead, f"no answer within {self.timeout_s:g} s") if dead else None)
        if mine is not None:
            self.agreed = json.loads(self.store.compare_set("failure", "", json.dumps(mine)))
        elif self.store.check(["failure"]):
            self.agreed = json.loads(self.store.get("failure"))
        elif self.finished:
            self._finish()

    def _finish(self) -> None:
        self.store.set(f"done/{self.device}", "")
        if self.store.check([f"done/{name}" for name in self.devices]):
            self._say_goodbye("done", len(self.devices) - 1, self.timeout_s)
            self.over.set()

    def _leave(self, failure: Failure) -> None:
        self._say_goodbye("failure", len(set(self.devices) - {self.first, failure["device"]}), LINGER_S)
        self.settled.set()
        self.end(failure)

    def _say_goodbye(self, word: str, num_readers: int, limit_s: float) -> None:
        """The store goes with its host, so the host waits until the others have read what they need."""
        if self.device == self.first:
            linger(self.store, word, num_readers, limit_s)
        else:
            have_read(self.store, word)

    def _lost(self, device: str, message: str) -> Failure:
        return {"kind": "lost", "device": device, "message": message, "by": self.device}
