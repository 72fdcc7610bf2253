"""How tensors get from one device to another: over gloo between processes, or by hand inside one."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.errors import DeviceLost
from manyhands.ir.cluster import DELAY
from manyhands.ir.plan import LEAST_IN_FLIGHT

BULK = 2  # Linux' TC_PRIO_BULK


class Pending(Protocol):
    """Something that will have happened after `wait`."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Messages by tag between named devices."""

    sent_bytes: int
    in_flight_bytes: int  # that may be on their way out before sending waits

    def send(self, tensor: Tensor, target: str, tag: int, *, patient: bool = False) -> None:
        """Start sending; the tensor is not changed by anybody afterwards. A patient one holds up no other."""

    def expect(self, buffer: Tensor, source: str, tag: int, *, patient: bool = False) -> Pending:
        """Let the message come into this contiguous buffer."""

    def flush(self) -> None:
        """Wait until everything sent has left."""


class Gloo:
    """torch.distributed with gloo; ranks are positions in the list of devices.

    Weights and their gradients are large and patient, and have connections of their own: on the usual ones
    they would hold up small messages for which somebody waits. All devices have to make theirs together.
    """

    def __init__(self, device: str, devices: tuple[str, ...], timeout_s: float) -> None:
        self.device, self.ranks = device, {name: rank for rank, name in enumerate(devices)}
        self.timeout_s, self.sent_bytes = timeout_s, 0
        self.in_flight_bytes = LEAST_IN_FLIGHT
        before = _connections()
        self.aside = dist.new_group(timeout=timedelta(seconds=timeout_s)) if devices[1:] else None
        for connection in _connections() - before:
            _let_others_pass(connection)
        self.outboxes = {patient: _Outbox(timeout_s) for patient in (False, True)}
        delay_s = float(os.environ.get(DELAY, "0"))
        self.delay = _Delay(delay_s) if delay_s else None

    def send(self, tensor: Tensor, target: str, tag: int, *, patient: bool = False) -> None:
        self.sent_bytes += tensor.nbytes
        group = self.aside if patient else None
        begin = partial(dist.isend, tensor, self.ranks[target], group=group, tag=tag)
        try:
            work = begin() if self.delay is None else self.delay.begin_later(begin)
        except RuntimeError as error:
            raise DeviceLost(target, f"the connection broke: {_first_line(error)}") from error
        assert work is not None
        self.outboxes[patient].add(tensor, target, work)
        self.outboxes[patient].wait_for_sent(self.in_flight_bytes)

    def expect(self, buffer: Tensor, source: str, tag: int, *, patient: bool = False) -> Pending:
        try:
            work = dist.irecv(buffer, self.ranks[source], group=self.aside if patient else None, tag=tag)
        except RuntimeError as error:
            raise DeviceLost(source, f"the connection broke: {_first_line(error)}") from error
        assert work is not None
        return _Work(work, source, self.timeout_s)

    def flush(self) -> None:
        for outbox in self.outboxes.values():
            outbox.wait_for_sent(0)


class _Sending(Protocol):
    """What gloo does in the background."""

    def wait(self, timeout: timedelta) -> object: ...


class _Delay:
    """Messages that leave a while after they are handed over, in the same order."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.clerk = seconds, ThreadPoolExecutor(1, "delay")

    def begin_later(self, begin: Callable[[], dist.Work | None]) -> _Sending:
        return _Begun(self.clerk.submit(self._begin_at, time.monotonic() + self.seconds, begin))

    def _begin_at(self, due: float, begin: Callable[[], dist.Work | None]) -> dist.Work | None:
        time.sleep(max(due - time.monotonic(), 0))
        return begin()


class _Begun:
    def __init__(self, begun: Future[dist.Work | None]) -> None:
        self.begun = begun

    def wait(self, timeout: timedelta) -> object:
        work = self.begun.result(timeout.total_seconds())
        return work is None or work.wait(timeout)


class _Outbox:
    """What is on its way out over some connections. (Those of weights hold up no others.)"""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.num_bytes = timeout_s, 0
        self.sending: deque[tuple[Tensor, str, _Sending]] = deque()

    def add(self, tensor: Tensor, target: str, work: _Sending) -> None:
        self.sending.append((tensor, target, work))
        self.num_bytes += tensor.nbytes

    def wait_for_sent(self, limit_bytes: int) -> None:
        """Until less than this is left. (Receivers make ready before they wait.)"""
        while self.sending and self.num_bytes >= limit_bytes:
            tensor, target, work = self.sending.popleft()
            self.num_bytes -= tensor.nbytes
            _Work(work, target, self.timeout_s).wait()


def _connections() -> set[int]:
    """The sockets that this process has open; none where the system does not show them."""
    with suppress(OSError):
        files = [int(name) for name in os.listdir("/proc/self/fd")]
        return {file for file in files if _is_socket(file)}
    return set()


def _is_socket(file: int) -> bool:
    with suppress(OSError):
        return stat.S_ISSOCK(os.fstat(file).st_mode)
    return False


def _let_others_pass(connection: int) -> None:
    """Packets of this connection wait longest in Linux' queue pfifo_fast; others are fair by themselves."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK)


class _Work:
    """A wait with a deadline that names whom it waits for."""

    def __init__(self, work: _Sending, other: str, timeout_s: float) -> None:
        self.work, self.other, self.timeout_s = work, other, timeout_s

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=self.timeout_s))
        except (RuntimeError, TimeoutError) as error:
            reason = _first_line(error)
            if "imed out" in reason or "imeout" in reason:
                reason = f"no answer within {self.timeout_s:g} s"
            raise DeviceLost(self.other, reason) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Mailroom:
    """What the devices of one process share: letters by (source, target, tag)."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.letters: defaultdict[tuple[str, str, int], list[Tensor]] = defaultdict(list)
        self.failed: str | None = None


class Loopback:
    """Devices as threads of one process: the same programs, without a network."""

    def __init__(self, device: str, mailroom: Mailroom, timeout_s: float = 60.0) -> None:
        self.device, self.mailroom, self.timeout_s, self.sent_bytes = device, mailroom, timeout_s, 0
        self.in_flight_bytes = LEAST_IN_FLIGHT

    def send(self, tensor: Tensor, target: str, tag: int, *, patient: bool = False) -> None:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        with self.mailroom.changed:
            self.mailroom.letters[self.device, target, tag].append(tensor)
            self.mailroom.changed.notify_all()

    def expect(self, buffer: Tensor, source: str, tag: int, *, patient: bool = False) -> Pending:
        return _Letter(self, buffer, source, tag)

    def flush(self) -> None:
        pass

    def wait_for(self, source: str) -> None:
        """Until something changes; called with the lock held."""
        if self.mailroom.failed:
            raise DeviceLost(self.mailroom.failed, "it failed")
        if not self.mailroom.changed.wait(self.timeout_s):
            raise DeviceLost(source, f"no answer within {self.timeout_s:g} s")


class _Letter:
    def __init__(self, home: Loopback, buffer: Tensor, source: str, tag: int) -> None:
        self.home, self.buffer, self.source, self.tag = home, buffer, source, tag

    def wait(self) -> None:
        mailroom, key = self.home.mailroom, (self.source, self.home.device, self.tag)
        with mailroom.changed:
            while not mailroom.letters[key]:
                self.home.wait_for(self.source)
            letter = mailroom.letters[key].pop(0)
        came, expected = ((tuple(t.shape), t.dtype) for t in (letter, self.buffer))
        shorter = letter.dtype == self.buffer.dtype == torch.uint8 and len(letter) <= len(self.buffer)
        assert shorter or came == expected, f"{key}: {came} came, {expected} expected"
        (self.buffer[: len(letter)] if shorter else self.buffer).copy_(letter)
