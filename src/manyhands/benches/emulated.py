"""What the races on emulated devices share: a setting, its contestants, and how long a step takes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from manyhands import api
from manyhands.emulation.devices import emulated
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.measuring import graph_of
from manyhands.racing import RaceJob, foreseeable, race

Choose = Callable[[Graph, Cluster], Plan]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, a batch of it, and the devices, as fast as they are asked for."""

    model: str
    shape: tuple[int, ...]
    batch: int
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Lap:
    """One contestant: seconds of a step as measured (of devices as fast as asked for), and as foreseen.

    `spent_s`: of a plan, what its devices did in a step on average, by their own clocks.
    """

    name: str
    seconds: float
    foreseen_s: float | None = None
    layouts: str = ""
    spent_s: tuple[tuple[str, float], ...] = ()

    @property
    def spent(self) -> str:
        return ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in self.spent_s)


def cluster(flops_per_s: Mapping[str, float], mbit: float) -> Cluster:
    """Devices of these speeds at a switch. Memory is not limited: races are about time."""
    devices = tuple(Device(name, flops_per_s=speed) for name, speed in flops_per_s.items())
    return Cluster(devices, mbit * 1e6 / 8, 0.0)


def auto(graph: Graph, cluster: Cluster, wire: str | None = None) -> Plan:
    return api.plan(graph, cluster, wire=wire)


def by_name(strategy: str, fuse: tuple[str, ...] | None = None) -> Choose:
    """A named strategy with equal shares; `fuse`: groups that end after these layers."""
    return lambda graph, cluster: api.plan(graph, cluster, strategy, fuse=fuse)


def among(names: tuple[str, ...], choose: Choose) -> Choose:
    """The same choice, among some of the devices only."""

    def chosen(graph: Graph, cluster: Cluster) -> Plan:
        devices = tuple(device for device in cluster.devices if device.name in names)
        return choose(graph, replace(cluster, devices=devices))

    return chosen


def tell_at(tell: Tell, where: str, what: str) -> None:
    tell(f"{where}: {what}")


def laps(
    setting: Setting,
    core_flops_per_s: float,
    dilation: float | None,
    plans: Mapping[str, Choose],
    peers: tuple[str, ...],
    rounds: int,
    tell: Tell,
    sources: tuple[str, ...] = (),
) -> tuple[Lap, ...]:
    """Every contestant's usual step, all in turns; plans that cannot be made are left out and told.

    `sources`: folders with packages that peers need.
    """
    graph = graph_of(setting.model, (setting.shape,), setting.batch)
    with emulated(setting.cluster, core_flops_per_s, dilation) as emulation:
        tell("how long layers take")
        cluster = foreseeable(setting.model, (setting.shape,), setting.batch, emulation)
        chosen: dict[str, Plan] = {}
        for name, choose in plans.items():
            try:
                chosen[name] = choose(graph, cluster)
            except RequestError as error:
                tell(f"{name}: {error}")
        tell("the race")
        given = setting.model, (setting.shape,), setting.batch
        job = RaceJob(*given, tuple(chosen.items()), peers, rounds, sources)
        took = race(emulation, job)
        factor = emulation.dilation
    found = []
    for name, raced in took.items():
        foreseen, layouts = None, ""
        if name in chosen:
            foreseen = factor * api.simulate(api.lower(graph, chosen[name]), cluster).cost.seconds
            layouts = ", ".join(dict.fromkeys(str(s.layout) for s in chosen[name].segments))
        spent = tuple((kind, factor * seconds) for kind, seconds in raced.spent_s.items())
        found.append(Lap(name, factor * median(raced.seconds), foreseen, layouts, spent))
    return tuple(found)
