"""How fast this device computes and copies, with how many threads, and whether it keeps that up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from threading import Event

import torch
from torch.nn.functional import conv2d

from manyhands.ir.cluster import cores_here
from manyhands.ir.survey import DeviceFacts
from manyhands.profiling import system

SECONDS = (
    2.0  # of computing: long enough to see a small device grow hot at its limit, short enough to wait for
)
ROUNDS = 3  # at least, where a round takes long
SLOWER = 1.15  # the last rounds over the first, before it is worth a warning
SPARE = 0.1  # of the memory that is free, left to the system
COPY_BYTES = 32_000_000, 256_000_000  # least and most
LOOK_S, LEAST_LOOKS, MOST_LOOKS = 3.0, 4, 7  # at busy cores, until they become no slower
SETTLED = 0.98
Clock = Callable[[], float]
Work = tuple[int, Callable[[], object]]  # operations, and what takes them
PASSES = 3  # forward, gradient of the input, gradient of the weights: equally many operations


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of each round of one piece of work that takes so many operations."""

    flops: int
    seconds: tuple[float, ...]

    @property
    def flops_per_s(self) -> float:
        return self.flops / median(self.seconds)

    @property
    def drift(self) -> float:
        """The last third of the rounds over the first: 1.3 is a device that became a third slower."""
        third = max(len(self.seconds) // 3, 1)
        return median(self.seconds[-third:]) / median(self.seconds[:third])


def measure_device(
    name: str, *, num_sharing: int = 1, root: Path = Path("/"), seconds: float = SECONDS
) -> DeviceFacts:
    """This device's facts, with torch's present number of threads; `num_sharing` processes share its memory.

    Raises RunError where the processor is throttled, before, meanwhile or after.
    """
    bare, before = system.resident_bytes(root), system.health(root)
    system.refuse_throttled(before)
    room = system.room(root, num_sharing)
    products, convolutions = _alternate((_product(), _convolution()), seconds)
    hertz, governor, notes = system.frequency(root)  # while it is still warm from computing
    copied = _copy_rate(min(room.left_bytes // 8, _copy_bytes(root)))
    launch = _launch_seconds()
    after = system.health(root)
    system.refuse_throttled(after, before)
    drift = max(products.drift, convolutions.drift)
    if drift > SLOWER:
        slower = (
            f"it became {drift - 1:.0%} slower within {sum(products.seconds + convolutions.seconds):.1f} s"
        )
        notes += (f"{slower}: heat, or other work on it. Measure again when it is cool and idle",)
    return DeviceFacts(
        device=name,
        processor=system.processor(root),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        convolution_flops_per_s=convolutions.flops_per_s,
        product_flops_per_s=products.flops_per_s,
        memory_bytes_per_s=copied,
        launch_s=launch,
        bare_bytes=bare,
        usable_bytes=bare + int(room.left_bytes * (1 - SPARE)),
        usable_by=room.by,
        frequency_hz=hertz,
        governor=governor,
        temperature_c=after.temperature_c,
        warnings=notes + after.notes,
    )


def core_flops_per_s(make: Callable[[], Work] | None = None) -> float:
    """Of convolutions, or other work, on one core of this machine while all of them are busy, when they have
    been so for a while: after a pause, or alone, a core is faster. A second is one of the core's time that is
    ours, as a quota counts it: what others take of it does not make it slower.
    """
    look = partial(_one_core, make or _convolution)
    threads, found = torch.get_num_threads(), list[float]()
    try:
        with ThreadPoolExecutor(cores_here()) as pool:
            while len(found) < LEAST_LOOKS or (len(found) < MOST_LOOKS and found[-1] < SETTLED * found[-2]):
                looks = list(pool.map(look, [LOOK_S] * cores_here()))
                found.append(mean(rounds.flops_per_s for rounds in looks))
    finally:
        torch.set_num_threads(threads)
    return found[-1]


@contextmanager
def busy(num_cores: int) -> Iterator[None]:
    """So many cores of this machine compute meanwhile."""
    threads, end = torch.get_num_threads(), Event()

    def compute() -> None:
        torch.set_num_threads(1)
        _, work = _convolution()
        while not end.is_set():
            work()

    try:
        with ThreadPoolExecutor(max(num_cores, 1)) as pool:
            try:
                computing = [pool.submit(compute) for _ in range(num_cores)]
                yield
            finally:
                end.set()
        for each in computing:
            each.result()  # raises what ended it before its time
    finally:
        torch.set_num_threads(threads)


def _one_core(make: Callable[[], Work], seconds: float) -> Rounds:
    torch.set_num_threads(1)
    (rounds,) = _alternate((make(),), seconds, time.thread_time)
    return rounds


def timed(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def _product() -> Work:
    """Forward and backward of a product of matrices."""
    size = 512
    left, right = (torch.randn(size, size, requires_grad=True) for _ in range(2))
    slope = torch.ones(size, size)

    def work() -> None:
        torch.autograd.grad(left @ right, (left, right), slope)

    return PASSES * 2 * size**3, work


def _convolution() -> Work:
    """Forward and backward of a convolution as they are in the middle of a ResNet."""
    batch, channels, side = 2, 64, 56
    image = torch.randn(batch, channels, side, side, requires_grad=True)
    weight = torch.randn(channels, channels, 3, 3, requires_grad=True)
    slope = torch.ones_like(image)

    def work() -> None:
        torch.autograd.grad(conv2d(image, weight, padding=1), (image, weight), slope)

    return PASSES * 2 * batch * channels * side**2 * channels * 9, work


def _alternate(
    works: tuple[Work, ...], seconds: float, clock: Clock = time.perf_counter
) -> tuple[Rounds, ...]:
    """Rounds of each in turn, so that a disturbance meets all of them, after a warm-up."""
    for _, work in works:
        work()
    taken: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[0]) < ROUNDS:
        for (_, work), times in zip(works, taken, strict=True):
            times.append(timed(work, clock))
    return tuple(Rounds(flops, tuple(times)) for (flops, _), times in zip(works, taken, strict=True))


def _copy_bytes(root: Path) -> int:
    least, most = COPY_BYTES
    return min(max(4 * system.last_cache_bytes(root), least), most)


def _copy_rate(num_bytes: int) -> float:
    """Bytes read and written a second by a copy of that many bytes."""
    source = torch.ones(max(num_bytes, 1_000_000) // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / median(timed(lambda: target.copy_(source)) for _ in range(5))


def _launch_seconds(repeats: int = 100) -> float:
    """One pass of a layer so small that only starting it counts."""
    image = torch.randn(1, 4, 4, 4, requires_grad=True)
    weight = torch.randn(4, 4, 3, 3, requires_grad=True)
    slope = torch.ones(1, 4, 4, 4)

    def work() -> None:
        for _ in range(repeats):
            torch.autograd.grad(conv2d(image, weight, padding=1), (image, weight), slope)

    return min(timed(work) for _ in range(5)) / repeats / PASSES
