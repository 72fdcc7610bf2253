"""Joins the stages: nn.Module -> Graph -> Plan -> programs -> trained weights, in one direction."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, local_cluster
from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Kept, Plan
from manyhands.ir.wire import WIRE_TYPES
from manyhands.planning.checking import check, validate
from manyhands.planning.deciding import MARGIN, Decision, Option, decide, made_to_fit
from manyhands.planning.lowering import Lowered
from manyhands.planning.lowering import lower as lower_plan
from manyhands.planning.simulation import SGD_WITH_MOMENTUM, Timeline
from manyhands.planning.simulation import simulate as simulate_programs
from manyhands.planning.strategies import plan_by_name
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Transport
from manyhands.runtime.weights import split_weights
from manyhands.runtime.worker import Worker
from manyhands.tracing.graphs import Traced
from manyhands.tracing.graphs import trace as trace_model
from manyhands.verifying import Difference, Outcome, calibrated, compare, make_trial, reference, train


def trace(model: nn.Module, *example: Tensor) -> Traced:
    """The graph of a model for inputs of these shapes (batch included). Nothing is computed."""
    return trace_model(model, example)


def plan(
    graph: Graph,
    cluster: Cluster | int,
    strategy: str = "auto",
    *,
    shares: Sequence[int] = (),
    fuse: Sequence[str] | None = None,
    required: Sequence[str] = (),
    kept: Kept = SGD_WITH_MOMENTUM,
    room: bool = True,
    wire: str | None = None,
    loss: Sequence[Axis] = (),
) -> Plan:
    """Who computes what. `strategy` is `auto`, a name (`rows`), a product (`batch:2,rows:2`) or several.

    `auto` takes the plan with the shortest forecast that fits the memory of every device; it may leave
    devices out, but not those that are `required`. Without `room` no step leaves weights on their way.
    Where a plan needs more memory than a device has, some of it is computed a second time in backward.
    `wire`: round tiles and gradients to this type for their way (bfloat16): fewer bytes, and NOT exact.
    `loss`: axes of the output along which the loss is a sum of parts, so that nobody needs the whole output.
    """
    _check_wire(wire)
    cluster = local_cluster(cluster) if isinstance(cluster, int) else cluster
    if strategy == "auto" and not shares and fuse is None:
        decision = choose(graph, cluster, required=required, kept=kept, room=room, wire=wire, loss=loss)
        return fitting(decision, cluster).plan
    if strategy == "auto":
        raise RequestError("shares and fused groups need a strategy by name; `auto` finds its own.")
    named = plan_by_name(
        graph, cluster.names, strategy, shares=tuple(shares), fuse=None if fuse is None else tuple(fuse)
    )
    named = replace(named, wire=wire, loss=tuple(loss))
    limited = any(device.memory_bytes for device in cluster.devices)
    return made_to_fit(graph, named, cluster, kept) if limited else named


def _check_wire(wire: str | None) -> None:
    if wire not in (None, *WIRE_TYPES):
        raise RequestError(f"wire = {wire!r}: there is only {', '.join(WIRE_TYPES)}.")


def choose(
    graph: Graph,
    cluster: Cluster,
    *,
    required: Sequence[str] = (),
    kept: Kept = SGD_WITH_MOMENTUM,
    room: bool = True,
    known: Sequence[Plan] = (),
    wire: str | None = None,
    loss: Sequence[Axis] = (),
) -> Decision:
    """The best plan for a cluster, and what else there was; `kept`: of each weight by the optimiser.

    `known` plans take part in the choice.
    """
    _check_wire(wire)
    required, known, parts = tuple(required), tuple(known), tuple(loss)
    return decide(graph, cluster, required=required, kept=kept, room=room, known=known, wire=wire, loss=parts)


def fitting(decision: Decision, cluster: Cluster) -> Option:
    """The plan that was chosen. Where none fits, the error says what is short where."""
    if decision.best is not None:
        return decision.best
    short, helped = shortage(decision, cluster)
    way_out = " Take a smaller batch or input, or more devices; `manyhands plan` says which would do."
    raise RequestError(short + (way_out if helped else ""))


def shortage(decision: Decision, cluster: Cluster) -> tuple[str, bool]:
    """What is short where, if nothing fits; and could a smaller batch or input, or more devices, help?"""
    nearest = decision.smallest
    if nearest is None:
        return "no plan gives every device something to do. Use fewer devices or a larger batch.", False
    bare = {device.name: device.bare_bytes for device in cluster.devices}
    if full := [device for device, _, limit in nearest.over if limit <= bare[device]]:
        alone = f"on {full[0]} the process alone takes {_megabytes(bare[full[0]])}"
        return f"nothing fits: {alone}. Allow it more.", False
    needs = [
        f"{device} needs {_megabytes(MARGIN * need)} of its {_megabytes(limit)}"
        for device, need, limit in nearest.over
    ]
    return f"nothing fits: under the smallest plan ({nearest.name}) {', '.join(needs)}.", True


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def lower(graph: Graph, chosen: Plan, *, clip: bool = False) -> Lowered:
    """The plan spelled out as one checked program a device; `clip` when gradients will be clipped by norm."""
    if chosen.graph != graph_digest(graph):
        raise RequestError(
            "this plan is for another model, input or batch. Make it anew with `manyhands plan`."
        )
    _check_wire(chosen.wire)
    validate(graph, chosen)
    lowered = lower_plan(graph, chosen, clip=clip)
    check(lowered)
    return lowered


def simulate(lowered: Lowered, cluster: Cluster, *, kept: Kept = SGD_WITH_MOMENTUM) -> Timeline:
    """The programs run on paper: when each step would start and stop, and how much is alive."""
    return simulate_programs(lowered, cluster, kept=kept)


def make_worker(
    traced: Traced, lowered: Lowered, model: nn.Module, device: str, transport: Transport
) -> Worker:
    """A device of a plan, holding its pieces of the model's weights."""
    territory = lowered.territory(device)
    weights = split_weights(model, traced.graph, territory)
    program = lowered.program(device)
    return Worker(traced.graph, program, territory, weights, traced.functions, traced.inplace, transport)


def verify(model: nn.Module, example: Sequence[Tensor], chosen: Plan, *, steps: int = 3) -> Difference:
    """Train a copy of the model plainly and by the plan (devices as threads), in float64, and compare."""
    model = copy.deepcopy(model).double()
    example = tuple(t.double() if t.is_floating_point() else t for t in example)
    traced = trace_model(model, example)
    lowered = lower(traced.graph, chosen)
    trial = calibrated(make_trial(traced.graph, example, steps=steps), model, traced.graph)

    def work(device: str, transport: Transport) -> Outcome:
        return train(make_worker(traced, lowered, copy.deepcopy(model), device, transport), trial)

    outcomes = run_in_process(chosen.devices, work)
    return compare(traced.graph, reference(model, traced.graph, trial), tuple(outcomes.values()))
