"""How tensors get from one device to another: over gloo between processes, or by hand inside one."""

from __future__ import annotations

import threading
from collections import defaultdict
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.errors import DeviceLost
from manyhands.ir.program import ring_bytes


class Pending(Protocol):
    """Something that will have happened after `wait`."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Messages by tag between named devices, and sums among some of them."""

    sent_bytes: int

    def send(self, tensor: Tensor, target: str, tag: int) -> None:
        """Start sending; the tensor is not changed by anybody afterwards."""

    def expect(self, buffer: Tensor, source: str, tag: int) -> Pending:
        """Let the message come into this contiguous buffer."""

    def sum(self, tensor: Tensor, among: tuple[str, ...]) -> Pending:
        """Start replacing the tensor by its sum over these devices."""

    def flush(self) -> None:
        """Wait until everything sent has left."""


class Gloo:
    """torch.distributed with gloo; ranks are positions in the list of devices."""

    def __init__(self, device: str, devices: tuple[str, ...], timeout_s: float) -> None:
        self.device, self.ranks = device, {name: rank for rank, name in enumerate(devices)}
        self.timeout_s, self.sent_bytes = timeout_s, 0
        self.sending: list[tuple[Tensor, str, dist.Work]] = []
        self.groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def join(self, sets: list[tuple[str, ...]]) -> None:
        """Make a group of processes for every set of devices that will sum; all devices call this alike."""
        for among in sets:
            if among not in self.groups:
                self.groups[among] = dist.new_group(
                    [self.ranks[name] for name in among], timeout=timedelta(seconds=self.timeout_s)
                )

    def send(self, tensor: Tensor, target: str, tag: int) -> None:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        try:
            work = dist.isend(tensor, self.ranks[target], tag=tag)
        except RuntimeError as error:
            raise DeviceLost(target, f"the connection broke: {_first_line(error)}") from error
        assert work is not None
        self.sending.append((tensor, target, work))

    def expect(self, buffer: Tensor, source: str, tag: int) -> Pending:
        try:
            work = dist.irecv(buffer, self.ranks[source], tag=tag)
        except RuntimeError as error:
            raise DeviceLost(source, f"the connection broke: {_first_line(error)}") from error
        assert work is not None
        return _Work(work, (source,), self.timeout_s)

    def sum(self, tensor: Tensor, among: tuple[str, ...]) -> Pending:
        self.sent_bytes += ring_bytes(tensor.numel() * tensor.element_size(), len(among))
        others = tuple(name for name in among if name != self.device)
        work = dist.all_reduce(tensor, group=self.groups[among], async_op=True)
        assert work is not None
        return _Work(work, others, self.timeout_s)

    def flush(self) -> None:
        for _, target, work in self.sending:
            _Work(work, (target,), self.timeout_s).wait()
        self.sending.clear()


class _Work:
    """A wait with a deadline that names whom it waits for."""

    def __init__(self, work: dist.Work, others: tuple[str, ...], timeout_s: float) -> None:
        self.work, self.others, self.timeout_s = work, others, timeout_s

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            reason = _first_line(error)
            if "imed out" in reason or "imeout" in reason:
                reason = f"no answer within {self.timeout_s:g} s"
            raise DeviceLost(" or ".join(self.others), reason) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Mailroom:
    """What the devices of one process share: letters by (source, target, tag), and sums in the making."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.letters: defaultdict[tuple[str, str, int], list[Tensor]] = defaultdict(list)
        self.sums: defaultdict[tuple[tuple[str, ...], int], dict[str, Tensor]] = defaultdict(dict)
        self.failed: str | None = None


class Loopback:
    """Devices as threads of one process: the same programs, without a network."""

    def __init__(self, device: str, mailroom: Mailroom, timeout_s: float = 60.0) -> None:
        self.device, self.mailroom, self.timeout_s, self.sent_bytes = device, mailroom, timeout_s, 0
        self.sums_started: defaultdict[tuple[str, ...], int] = defaultdict(int)

    def send(self, tensor: Tensor, target: str, tag: int) -> None:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        with self.mailroom.changed:
            self.mailroom.letters[self.device, target, tag].append(tensor)
            self.mailroom.changed.notify_all()

    def expect(self, buffer: Tensor, source: str, tag: int) -> Pending:
        return _Letter(self, buffer, source, tag)

    def sum(self, tensor: Tensor, among: tuple[str, ...]) -> Pending:
        self.sent_bytes += ring_bytes(tensor.numel() * tensor.element_size(), len(among))
        key = among, self.sums_started[among]
        self.sums_started[among] += 1
        with self.mailroom.changed:
            self.mailroom.sums[key][self.device] = tensor.clone()
            self.mailroom.changed.notify_all()
        return _Total(self, tensor, key)

    def flush(self) -> None:
        pass

    def wait_until(self, arrived: bool, waiting_for: str) -> None:
        """Called with the lock held; `arrived` was just looked at."""
        if self.mailroom.failed:
            raise DeviceLost(self.mailroom.failed, "it failed")
        if not arrived and not self.mailroom.changed.wait(self.timeout_s):
            raise DeviceLost(waiting_for, f"no answer within {self.timeout_s:g} s")


class _Letter:
    def __init__(self, home: Loopback, buffer: Tensor, source: str, tag: int) -> None:
        self.home, self.buffer, self.source, self.tag = home, buffer, source, tag

    def wait(self) -> None:
        mailroom, key = self.home.mailroom, (self.source, self.home.device, self.tag)
        with mailroom.changed:
            while not mailroom.letters[key]:
                self.home.wait_until(False, self.source)
            letter = mailroom.letters[key].pop(0)
        assert letter.shape == self.buffer.shape, f"{key}: {letter.shape} came, {self.buffer.shape} expected"
        self.buffer.copy_(letter)


class _Total:
    def __init__(self, home: Loopback, tensor: Tensor, key: tuple[tuple[str, ...], int]) -> None:
        self.home, self.tensor, self.key = home, tensor, key

    def wait(self) -> None:
        mailroom, among = self.home.mailroom, self.key[0]
        with mailroom.changed:
            while len(mailroom.sums[self.key]) < len(among):
                missing = next(name for name in among if name not in mailroom.sums[self.key])
                self.home.wait_until(False, missing)
            parts = mailroom.sums[self.key]
        total = torch.zeros_like(self.tensor)
        for name in among:
            total += parts[name]
        self.tensor.copy_(total)
