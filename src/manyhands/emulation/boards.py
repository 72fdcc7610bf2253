"""Boards that can be emulated: how fast they compute, and how much memory they have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Board:
    """GFLOP/s of all its cores together, and bytes of memory that a training may take."""

    name: str
    gflops: float
    memory_bytes: int


# LINPACK in double precision, the one figure that was published for all of them. What a board reaches in the
# convolutions of a training, in single precision, is up to twice as much: a profile is better.
#   Raspberry Pi 3B 3.62, Odroid-XU 8.3, Jetson TX1 16.0: Cloutier, Paradis and Weaver, "A Raspberry Pi
#     Cluster Instrumented for Fine-Grained Power Measurement", Electronics 5(4), 61, 2016.
#   Raspberry Pi 4B 15.5: "Empirical study on Raspberry Pi", the second of the papers that manyhands follows.
#   Raspberry Pi 5 30: high-performance LINPACK results of the top500-benchmark project for that board.
#   Jetson Nano: the processor of the TX1 at 1.43 instead of 1.91 GHz, so 12.
# Memory is what a system without a desktop leaves free.
BOARDS = {
    board.name: board
    for board in (
        Board("raspberry-pi-3-core", 3.62 / 4, 900_000_000),
        Board("raspberry-pi-3", 3.62, 900_000_000),
        Board("raspberry-pi-4", 15.5, 3_600_000_000),
        Board("raspberry-pi-5", 30.0, 7_500_000_000),
        Board("odroid-xu4", 8.3, 1_800_000_000),
        Board("jetson-nano", 12.0, 3_500_000_000),
    )
}
