"""Devices of several machines meet at a store, find that they want the same, and begin together.

The process of the first device hosts the store, a torch TCPStore. It listens on every interface of that
machine and has no authentication, so whoever reaches its port can join or disturb a run: use it in a network
you trust. What is read from it is JSON and nothing else.

Every device keeps a card at the store, `card/NAME`: who it is, its facts, and a count that grows while it
lives. The first device watches the cards, says who is missing, and when all are there writes one verdict that
all obey.
"""

from __future__ import annotations

import errno
import json
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from manyhands.errors import DeviceLost, RequestError
from manyhands.ir.cluster import Device
from manyhands.runtime.hosts import reason, resolve, unreachable

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Say = Callable[..., None]
JOIN_TIMEOUT_S = 300.0
POLL_S = 0.2
TELL_EVERY_S = 3.0
GONE_S = 5.0  # a card that has not changed for so long belongs to somebody who gave up waiting
KNOCK_S = 5.0  # for one attempt to reach the first device; after 3 s the system knows that nobody is there
LINGER_S = 4.0  # how long the first device keeps the store open for the others to read why it ends
NO_WAY = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM}

# How a fact is called, and what to do where it differs. Facts that are not here are called by their own name.
WORDS = {
    "version": ("manyhands", "Install the same version on both."),
    "torch": ("torch", "Install the same version on both."),
    "model": ("model", "Copy the model's file from one to the other."),
    "plan": ("plan", "Give both the same job and cluster file."),
}


@dataclass(frozen=True)
class Meeting:
    """Who meets where: all devices of a run with their addresses, the port, and what this one brings."""

    devices: tuple[str, ...]
    addresses: tuple[str, ...]
    port: int
    facts: dict[str, str]
    join_timeout_s: float = JOIN_TIMEOUT_S

    @property
    def first(self) -> str:
        return self.devices[0]

    @property
    def place(self) -> str:
        return f"{self.first} at {self.addresses[0]}, port {self.port}"


@dataclass
class Card:
    """What a device shows of itself at the store, again and again, so that the others see it live."""

    device: str
    facts: dict[str, str]
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    beat: int = 0

    def show(self, store: TCPStore) -> None:
        self.beat += 1
        text = json.dumps({"token": self.token, "facts": self.facts, "beat": self.beat})
        store.set(card_key(self.device), text)


def card_key(device: str) -> str:
    return f"card/{device}"


def meet(meeting: Meeting, device: str, say: Say) -> tuple[TCPStore, Card]:
    """The store and this device's card there, once all devices are there and want the same."""
    wait = _Wait(say, meeting.join_timeout_s)
    card = Card(device, meeting.facts)
    if device == meeting.first:
        store = _host(meeting)
        _gather(meeting, store, card, wait)
    else:
        store = _find(meeting, wait)
        try:
            _await_verdict(meeting, store, card, wait)
        except RuntimeError as error:
            raise DeviceLost(meeting.first, "it left before the run began; its console says why") from error
    return store, card


def connect(meeting: Meeting, timeout_s: float) -> TCPStore:
    """A connection to the store that exists."""
    from torch.distributed import TCPStore

    return TCPStore(meeting.addresses[0], meeting.port, None, False, timedelta(seconds=timeout_s))


class _Wait:
    """Says every few seconds who is missing, and knows when it has lasted too long."""

    def __init__(self, say: Say, limit_s: float) -> None:
        self.say, self.limit_s = say, limit_s
        self.deadline = time.monotonic() + limit_s
        self.tell_at = time.monotonic() + 1.0  # devices started together need not hear about each other

    def over(self) -> bool:
        return time.monotonic() >= self.deadline

    def pause(self, missing: list[str]) -> None:
        if time.monotonic() >= self.tell_at:
            self.say("waiting", missing=missing)
            self.tell_at = time.monotonic() + TELL_EVERY_S
        time.sleep(POLL_S)


# ---- the first device ---------------------------------------------------------------------------------


def _host(meeting: Meeting) -> TCPStore:
    from torch.distributed import TCPStore

    limit = timedelta(seconds=meeting.join_timeout_s)
    try:
        return TCPStore(meeting.addresses[0], meeting.port, None, True, limit, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        other = meeting.port + 1 if meeting.port < 65535 else meeting.port - 1
        raise RequestError(
            f"port {meeting.port} is taken on {meeting.first}, where the devices meet. Is another run still "
            f"going on? Else write a free one under [network] in everybody's cluster file: port = {other}."
        ) from None


def _gather(meeting: Meeting, store: TCPStore, card: Card, wait: _Wait) -> None:
    """Wait for all cards, then let all begin or refuse all. Raises RequestError when refusing."""
    seen: dict[str, tuple[dict[str, Any], float]] = {}
    while True:
        card.show(store)
        _look(store, meeting.devices, seen)
        missing = [name for name in meeting.devices if not _lives(seen.get(name))]
        store.set("missing", json.dumps(missing))
        if not missing or wait.over():
            break
        wait.pause(missing)
    cards = {name: seen[name][0] for name in meeting.devices if name in seen}
    message = _late(missing, wait) if missing else difference(meeting.first, cards)
    tokens = {name: found["token"] for name, found in cards.items()}
    store.set("verdict", json.dumps({"refused": message, "tokens": tokens}))
    if message:
        linger(store, "verdict", len(meeting.devices) - len(missing) - 1)
        raise RequestError(message)


def _look(store: TCPStore, devices: tuple[str, ...], seen: dict[str, tuple[dict[str, Any], float]]) -> None:
    """Note every card that has changed, and when."""
    for name in devices:
        if store.check([card_key(name)]):
            card = json.loads(store.get(card_key(name)))
            if name not in seen or card != seen[name][0]:
                seen[name] = card, time.monotonic()


def _lives(sighting: tuple[dict[str, Any], float] | None) -> bool:
    return sighting is not None and time.monotonic() - sighting[1] < GONE_S


def difference(first: str, cards: dict[str, dict[str, Any]]) -> str:
    """Nothing if all want the same, else who wants what: "pi-2 has manyhands 0.2.0, pi-0 has 0.1.0."."""
    wanted = cards[first]["facts"]
    for fact in sorted(
        {fact for card in cards.values() for fact in card["facts"]},
        key=lambda fact: (list(WORDS).index(fact) if fact in WORDS else len(WORDS), fact),
    ):
        word, way_out = WORDS.get(fact, (fact, "Make them the same."))
        ours = wanted.get(fact, "none")
        others = {name: card["facts"].get(fact, "none") for name, card in cards.items()}
        if differing := [f"{name} has {word} {theirs}" for name, theirs in others.items() if theirs != ours]:
            return f"{', '.join(differing)}, {first} has {ours}. {way_out}"
    return ""


def linger(store: TCPStore, word: str, num_readers: int, limit_s: float = LINGER_S) -> None:
    """Keep the store open until so many have read a word, or are not going to."""
    limit = time.monotonic() + limit_s
    while store.add(f"read/{word}", 0) < num_readers and time.monotonic() < limit:
        time.sleep(POLL_S / 4)


def have_read(store: TCPStore, word: str) -> None:
    """Tell the first device that it need not stay for us."""
    store.add(f"read/{word}", 1)


def _late(missing: list[str], wait: _Wait) -> str:
    who = f"{', '.join(missing)} did not come within {wait.limit_s:g} s."
    return f"{who} Start the same command there with --as {missing[0]}."


# ---- the others ---------------------------------------------------------------------------------------


def _find(meeting: Meeting, wait: _Wait) -> TCPStore:
    """Knock until the first device is there."""
    missing, said = [meeting.first], "nobody answered"
    first = Device(meeting.first, meeting.addresses[0])
    while not wait.over():
        family, sockaddr = resolve(first)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as knock:
                knock.settimeout(KNOCK_S)
                knock.connect((sockaddr[0], meeting.port, *sockaddr[2:]))
            return connect(meeting, KNOCK_S)
        except OSError as error:
            if error.errno in NO_WAY:
                raise unreachable(first, meeting.port, error) from None
            said = "nobody answered" if error.errno is None else reason(error)
        except RuntimeError:
            said = "something else than manyhands answers there"
        wait.pause(missing)
    raise RequestError(
        f"{meeting.place}, could not be reached within {wait.limit_s:g} s: {said}. "
        f"Start the same command there with --as {meeting.first}, and let its firewall pass this port."
    )


def _await_verdict(meeting: Meeting, store: TCPStore, card: Card, wait: _Wait) -> None:
    """Show the card until the first device says begin. Raises RequestError when refused or too late."""
    missing: list[str] = []
    while not store.check(["verdict"]):
        if card.beat and json.loads(store.get(card_key(card.device)))["token"] != card.token:
            time.sleep(POLL_S)  # the verdict may be on its way, and for us
            if store.check(["verdict"]):
                break
            raise RequestError(f"another process has joined as {card.device} since. Start each device once.")
        card.show(store)
        missing = json.loads(store.get("missing")) if store.check(["missing"]) else []
        if wait.over():
            raise RequestError(_late(missing or [meeting.first], wait))
        wait.pause(missing)
    verdict = json.loads(store.get("verdict"))
    have_read(store, "verdict")
    if verdict["tokens"].get(card.device) != card.token:
        raise RequestError(
            f"{meeting.place}, is busy with a run in which {card.device} is another process or has no part. "
            "Wait for its end, or write another port under [network] in this run's cluster file."
        )
    if verdict["refused"]:
        raise RequestError(verdict["refused"])
