"""What to say about a choice: its rivals, what would help most, and where nothing fits, what would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster
from manyhands.ir.report import Advice, Alternative, Help, PlanFacts
from manyhands.planning.deciding import Decision, Option, Refused
from manyhands.planning.lowering import Lowered
from manyhands.planning.summary import summarise
from manyhands.requests import Request

SEARCHED = 600  # units of work (layers times devices) up to which changes are worked out as well
MORE_DEVICES = (1, 2, 4)


def explained(request: Request) -> tuple[Lowered, PlanFacts]:
    """The plan of a request, spelled out, and all there is to say about it."""
    if request.strategy != "auto" or request.shares or request.fuse is not None:
        lowered = request.lower(request.plan())
        return lowered, summarise(lowered, request.cluster)
    decision = request.choose()
    if decision.best is None:
        raise refusal(request, decision)
    lowered = request.lower(decision.best.plan)
    return lowered, summarise(lowered, request.cluster, advise(request, decision))


def advise(request: Request, decision: Decision) -> Advice:
    """Why the plan was chosen, and what would help."""
    best = api.fitting(decision, request.cluster)
    named = [other for other in decision.others if isinstance(other, Refused) or other.name != "auto"]
    return Advice(
        tuple(_alternative(other) for other in named),
        tuple(name for name in request.cluster.names if name not in best.plan.devices),
        tuple(_helps(request, best)) if _quick(request) else (),
    )


def _quick(request: Request) -> bool:
    return len(request.traced.graph.layers) * len(request.cluster.devices) <= SEARCHED


def _alternative(other: Option | Refused) -> Alternative:
    if isinstance(other, Refused):
        return Alternative(other.name, None, None, other.reason)
    over = ", ".join(f"{device} has too little memory" for device, _, _ in other.over)
    redone = sum(segment.redo > 0 for segment in other.plan.segments)
    twice = f"{redone} of its {len(other.plan.segments)} segments computed a second time" if redone else ""
    largest = max((size for _, size in other.cost.peak_bytes), default=None)
    return Alternative(other.name, other.cost.seconds, largest, over or twice)


def _helps(request: Request, best: Option) -> Iterator[Help]:
    """Changes, and the seconds an image would take as a part of what it takes now."""
    now = best.cost.seconds / request.batch
    for change, changed in _changes(request):
        known = (best.plan,) if changed.batch == request.batch else ()
        decision = changed.choose(known)
        if decision.best is None:
            yield Help(change, None, "would not fit")
        else:
            yield Help(change, decision.best.cost.seconds / changed.batch / now)


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    if len(request.cluster.devices) > 1:
        twice = replace(request.cluster.hastened(2), trials=())
        yield "twice the bandwidth", replace(request, cluster=twice)
    yield "twice the batch", request.with_batch(2 * request.batch)
    yield "one more device", replace(request, cluster=with_more(request.cluster, 1))


def with_more(cluster: Cluster, count: int) -> Cluster:
    """So many more devices like the last one."""
    last = cluster.devices[-1]
    more = tuple(replace(last, name=f"{last.name}+{i + 1}", address=None) for i in range(count))
    profile = cluster.profile(last.name)
    copies = () if profile is None else tuple(replace(profile, device=device.name) for device in more)
    return replace(cluster, devices=cluster.devices + more, profiles=cluster.profiles + copies, trials=())


def refusal(request: Request, decision: Decision) -> RequestError:
    """Nothing fits: what is short where, and the nearest request that does fit."""
    short, helped = api.shortage(decision, request.cluster)
    if not helped:
        return RequestError(short)
    found = [text for text in (_smaller_batch(request), _more_devices(request)) if text]
    return RequestError(f"{short} {' or '.join(found) or 'A smaller input or more devices'} would fit.")


def _smaller_batch(request: Request) -> str:
    """The largest batch that fits."""
    fits, too_large = 0, request.batch
    while too_large - fits > max(1, fits // 4):
        middle = (fits + too_large) // 2
        changed = request.with_batch(middle)
        if changed.choose().best is None:
            too_large = middle
        else:
            fits = middle
    return f"--batch {fits}" if fits else ""


def _more_devices(request: Request) -> str:
    last = request.cluster.devices[-1].name
    for count in MORE_DEVICES:
        if replace(request, cluster=with_more(request.cluster, count)).choose().best is not None:
            return f"{count} more like {last}"
    return ""
