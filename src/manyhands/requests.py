"""A request from the command line: model, input, batch, cluster and strategy, checked and joined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster
from manyhands.ir.plan import Plan
from manyhands.loading import (
    default_input,
    load_cluster,
    load_model,
    load_plan,
    nearest,
    parse_bytes,
    parse_inputs,
)
from manyhands.measuring import known_local, threads_each
from manyhands.planning.deciding import Decision
from manyhands.planning.lowering import Lowered
from manyhands.tracing.graphs import Traced


@dataclass(frozen=True)
class Request:
    """Everything a plan is made from. The model is traced on meta tensors; its weights are not needed."""

    model: str
    inputs: tuple[tuple[int, ...], ...]
    batch: int
    cluster: Cluster
    strategy: str
    shares: tuple[int, ...]
    fuse: tuple[str, ...] | None
    traced: Traced
    precision: str = "float32"
    wire: str | None = None

    @classmethod
    def read(
        cls,
        model: str,
        input: str | None,
        batch: int,
        cluster: Path | None,
        devices: int | None,
        strategy: str,
        shares: str | None,
        fuse: str | None,
        precision: str = "float32",
        memory: str | None = None,
        wire: str | None = None,
    ) -> Request:
        if cluster is not None and devices is not None:
            raise RequestError("give either --cluster or --devices, not both.")
        inputs = parse_inputs(input or default_input(model))
        traced = _trace(model, inputs, batch, precision)
        found = load_cluster(cluster, devices)
        if cluster is None:
            found = known_local(
                traced.graph,
                len(found.devices),
                threads=threads_each(len(found.devices)),
                thrifty=memory is not None,
            )
        if memory is not None:
            limit = parse_bytes(memory)
            limited = tuple(replace(d, memory_bytes=d.memory_bytes or limit) for d in found.devices)
            found = replace(found, devices=limited)
        return cls(
            model,
            inputs,
            batch,
            found,
            strategy,
            _shares(shares),
            None if fuse is None else tuple(name.strip() for name in fuse.split(",") if name.strip()),
            traced,
            precision,
            wire,
        )

    def with_batch(self, batch: int) -> Request:
        """The same with another number of images in a step."""
        return replace(self, batch=batch, traced=_trace(self.model, self.inputs, batch, self.precision))

    def plan(self) -> Plan:
        graph, wire = self.traced.graph, self.wire
        return api.plan(graph, self.cluster, self.strategy, shares=self.shares, fuse=self.fuse, wire=wire)

    def choose(self, known: tuple[Plan, ...] = ()) -> Decision:
        """What `auto` finds, and what else there was."""
        return api.choose(self.traced.graph, self.cluster, known=known, wire=self.wire)

    def plan_for_all(self) -> Plan:
        """A plan in which every device takes part, also where it would be faster without some."""
        if self.strategy != "auto":
            return self.plan()
        return api.plan(self.traced.graph, self.cluster, required=self.cluster.names, wire=self.wire)

    def load_plan(self, path: Path) -> Plan:
        plan = load_plan(path)
        if not set(plan.devices) <= set(self.cluster.names):
            raise RequestError(
                f"{path} is for {', '.join(plan.devices)}, the cluster has {', '.join(self.cluster.names)}."
            )
        return plan

    def lower(self, plan: Plan) -> Lowered:
        return api.lower(self.traced.graph, plan)

    def program(self, lowered: Lowered, device: str) -> str:
        if device not in self.cluster.names:
            raise RequestError(f"no device is called {device!r}.{nearest(device, self.cluster.names)}")
        return str(lowered.program(device))


def _trace(model: str, inputs: tuple[tuple[int, ...], ...], batch: int, precision: str) -> Traced:
    dtype = getattr(torch, precision)
    with torch.device("meta"):
        built = load_model(model).to(dtype)
    example = tuple(torch.empty(batch, *shape, dtype=dtype, device="meta") for shape in inputs)
    return api.trace(built, *example)


def _shares(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise RequestError(f"--shares {text}: write one whole number a device, such as 3,1,1.")
    return tuple(int(part) for part in parts)
