"""What others take of the cores while devices are emulated on them: other programs, or whoever else is on the
host of a virtual machine.
"""

from __future__ import annotations

import os
import resource
import time

import psutil

from manyhands.ir.cluster import cores_here

MUCH = 0.1  # of all cores: then emulated devices may have been slower than asked for


class Others:
    """Begins to count when it is made."""

    def __init__(self) -> None:
        self.began, self.busy_s, self.own_s = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float:
        """How many cores they took on average. What we have started counts as ours once it has ended."""
        spent = _busy_s() - self.busy_s - (_own_s() - self.own_s)
        return max(spent / (time.monotonic() - self.began), 0.0)


def note(cores: float) -> str:
    """Where that is much: in words."""
    if cores <= MUCH * cores_here():
        return ""
    return f"others took {cores:.1f} of {cores_here()} cores meanwhile, so devices may have been slower"


def _busy_s() -> float:
    """Of all cores that we may use, together, as long as the machine is up."""
    ours = os.sched_getaffinity(0)
    cores = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in ours]
    return float(sum(each.user + each.nice + each.system + each.steal for each in cores))


def _own_s() -> float:
    """Of this process, and of those it has started and seen end."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
