"""Many hands make light work: train one convolutional network on several small devices, exactly as on one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.api import lower, plan, simulate, trace, verify
    from manyhands.checkpointing.fitting import fit
    from manyhands.errors import DeviceLost, ManyhandsError, RequestError, RunError
    from manyhands.hands import Hands, Training, join
    from manyhands.ir.cluster import Cluster, Device, Link, local_cluster
    from manyhands.ir.graph import Graph
    from manyhands.ir.plan import Plan, Segment

__version__ = "0.1.0"

_HOMES = {
    "join": "hands",
    "fit": "checkpointing.fitting",
    "Hands": "hands",
    "Training": "hands",
    "trace": "api",
    "plan": "api",
    "lower": "api",
    "simulate": "api",
    "verify": "api",
    "Cluster": "ir.cluster",
    "Device": "ir.cluster",
    "Link": "ir.cluster",
    "local_cluster": "ir.cluster",
    "Graph": "ir.graph",
    "Plan": "ir.plan",
    "Segment": "ir.plan",
    "ManyhandsError": "errors",
    "RequestError": "errors",
    "RunError": "errors",
    "DeviceLost": "errors",
}
__all__ = [
    "Cluster",
    "Device",
    "DeviceLost",
    "Graph",
    "Hands",
    "Link",
    "ManyhandsError",
    "Plan",
    "RequestError",
    "RunError",
    "Segment",
    "Training",
    "fit",
    "join",
    "local_cluster",
    "lower",
    "plan",
    "simulate",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `manyhands --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"manyhands has no {name!r}")
    return getattr(importlib.import_module(f"manyhands.{_HOMES[name]}"), name)
