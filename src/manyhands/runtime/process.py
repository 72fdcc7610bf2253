"""What this process is: its memory, and what its processor can do."""

from __future__ import annotations

from pathlib import Path

from manyhands.errors import RequestError

_PAGES_LATE = 4 << 20  # bytes by which the kernel's figures may lag behind each other
# As Linux names them: of Intel and AMD, and of ARM.
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


def peak_memory() -> int:
    """The most memory this process ever had resident. (getrusage would count the starter's, before exec.)"""
    return _status("VmHWM")


def forget_peak() -> bool:
    """From here on, the peak is that of what follows. False: this system does not do that."""
    for _ in range(3):  # other threads may free memory in between
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        if peak_memory() <= current_memory() + _PAGES_LATE:
            return True
    return False


def current_memory() -> int:
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def require_bfloat16(device: str, features: str | None = None) -> None:
    """Refuse bfloat16 where the processor would only imitate it. `features`: as /proc/cpuinfo has them."""
    if features is None:
        path = Path("/proc/cpuinfo")
        features = path.read_text() if path.is_file() else ""
    if not _BFLOAT16 & set(features.split()):
        raise RequestError(f'{device} has no bfloat16 instructions. Use precision = "float32".')
