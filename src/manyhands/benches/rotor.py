"""rotor as a peer in the race of memory: INRIA's tool, from source that is given by path.

It takes memory of a CPU from the size of the process, which glibc blurs; so that its schedules are as good as
they can be, it is told the bytes of tensors instead.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from manyhands.checkpointing.tracking import LiveBytes
from manyhands.errors import RequestError

PARTS = (0.8, 0.6, 0.45, 0.35, 0.3, 0.25, 0.2)  # of what it counts with everything kept
FINE = 0.01  # how exactly the smallest part is found
Step = Callable[[], None]


def steps(module: Any, parts: nn.Sequential, images: Tensor) -> Iterator[tuple[str, Step]]:
    """Steps by its schedules: for several limits of memory, and for the smallest it can keep."""
    model = _measured(module, parts, images)
    model.compute_pytorch_sequence()
    most = model.get_expected_memory()

    def sequence(part: float) -> Any:
        """None: it has no schedule in so little."""
        try:
            model.compute_sequence(int(part * most))
        except ValueError:
            return None
        return model.sequence

    found = {part: schedule for part in PARTS if (schedule := sequence(part)) is not None}
    above, below = min(found, default=1.0), max((part for part in PARTS if part not in found), default=0.0)
    while above - below > FINE:
        middle = (above + below) / 2
        if (schedule := sequence(middle)) is None:
            below = middle
        else:
            above, found[middle] = middle, schedule
    for part, schedule in found.items():
        if part in PARTS or part == above:
            yield f"in {part:.0%}", _step(model, schedule, images)


def _step(model: Any, schedule: Any, images: Tensor) -> Step:
    def step() -> None:
        model.sequence = schedule
        model(images).sum().backward()

    return step


def _measured(module: Any, parts: nn.Sequential, images: Tensor) -> Any:
    stem: Any = parts[0]
    stem.not_really_sequential = True  # rotor's word for: not to be cut
    model = module.Checkpointable(parts)
    model.measure(images)
    return model


def _count_tensors(module: Any) -> None:
    class Counted(module.memory.MeasureMemory):  # type: ignore[misc,name-defined]
        def measure(self, work: Callable[..., Any], *args: Any) -> tuple[Any, Any, Any]:
            with LiveBytes() as live:
                result = work(*args)
                return result, module.memory.MemSize(live.now()), module.memory.MemSize(live.peak)

    module.memory.MeasureMemory = Counted


def imported(directory: Path) -> Any:
    """rotor, told the bytes of tensors."""
    sys.path.insert(0, str(directory.resolve()))
    try:
        module = importlib.import_module("rotor")
    except ImportError as error:
        raise RequestError(f"--rotor {directory}: {error}.") from None
    finally:
        sys.path.pop(0)
    if not hasattr(module, "Checkpointable"):
        raise RequestError(
            f"--rotor {directory}: this rotor has no Checkpointable, so it is not INRIA's. "
            "Give the folder of its source, in which rotor/ is."
        )
    _count_tensors(module)
    return module
