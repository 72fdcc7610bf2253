"""Devices as threads of this process: the same workers and programs, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from manyhands.runtime.transport import Loopback, Mailroom

Result = TypeVar("Result")


def run_in_process(
    devices: tuple[str, ...], work: Callable[[str, Loopback], Result], timeout_s: float = 60.0
) -> dict[str, Result]:
    """Call work(device, transport) for every device at once. The first failure ends all and is raised."""
    mailroom = Mailroom()
    results: dict[str, Result] = {}
    failures: list[BaseException] = []

    def run(device: str) -> None:
        try:
            results[device] = work(device, Loopback(device, mailroom, timeout_s))
        except BaseException as error:
            with mailroom.changed:
                failures.append(error)
                mailroom.failed = mailroom.failed or device
                mailroom.changed.notify_all()

    threads = [threading.Thread(target=run, args=(device,), name=device) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return {device: results[device] for device in devices}
