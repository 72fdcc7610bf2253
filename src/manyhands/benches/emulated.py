"""What the races on emulated devices share: a setting, its contestants, and how long a step takes each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from manyhands import api
from manyhands.emulation.devices import Emulation, emulated, parts, require
from manyhands.emulation.others import Others, note
from manyhands.errors import RequestError, RunError
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.measuring import graph_of, promising
from manyhands.peers import ALONE
from manyhands.planning.deciding import Option
from manyhands.profiling.device import Work, core_flops_per_s
from manyhands.racing import Raced, RaceJob, foreseeable, race
from manyhands.runtime.allocator import keep_all_freed_memory, trim

Choose = Callable[[Graph, Cluster], Sequence[Plan]]  # the first, unless another wins a trial
Tell = Callable[[str], None]
LOSS = tuple(Axis)  # a mean of squares, which every device evaluates on its own tile, as peers do
AUTO = "auto"
TRIED = 6  # plans of auto, the most
TRIAL_ROUNDS, FINAL_ROUNDS = 3, 5
CLEARLY = 0.95  # of the time of the plan that was chosen: what it takes to win a trial


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, a batch of it, and the devices, as fast as they are asked for."""

    model: str
    shape: tuple[int, ...]
    batch: int
    cluster: Cluster
    sharing: tuple[str, ...] = ()  # plans among several devices are among these; all, where none are said


@dataclass(frozen=True, slots=True)
class Conditions:
    """Of a race: how many times as fast as asked for all was, operations a second of a core here, which
    contestants could not take part, and why, how many cores others took meanwhile, and how much longer than
    its computing a round takes in which all wait for all (of devices as fast as asked for).
    """

    dilation: float
    core_flops_per_s: float
    refused: tuple[tuple[str, str], ...] = ()
    others_cores: float = 0.0
    late_s: float = 0.0

    def __str__(self) -> str:
        core = f"cores of {self.core_flops_per_s / 1e9:.0f} GFLOP/s"
        text = f"measured {self.dilation:.3g} times as fast as asked for, on {core}, without limits of memory"
        if self.late_s:
            text += f"; whoever waits for others waits {1e3 * self.late_s:.1f} ms besides"
        left_out = (f"{name} is left out: {why}" for name, why in self.refused)
        return "; ".join(filter(None, (text, note(self.others_cores).upper(), *left_out)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is required, and what was seen of it, if it was measured. `failed`: it was to be, and broke."""

    what: str
    required: float
    seen: float | None
    failed: bool = False

    @property
    def reached(self) -> bool | None:
        if self.seen is None:
            return False if self.failed else None
        return self.seen >= self.required

    def __str__(self) -> str:
        if self.seen is None:
            return f"{self.what}: {self.required:g} required, {'FAILED' if self.failed else 'NOT MEASURED'}"
        return f"{self.what}: {self.seen:.4g}, {self.required:g} required: {SAID[self.reached]}"


SAID = {True: "reached", False: "NOT REACHED", None: "NOT ALL MEASURED"}


def all_reached(verdicts: Sequence[Verdict]) -> bool | None:
    """None where something that is required was not measured, and the rest was reached."""
    known = {verdict.reached for verdict in verdicts}
    return False if False in known else None if None in known or not known else True


def verdicts_to_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    each = [asdict(verdict) | {"reached": verdict.reached} for verdict in verdicts]
    return {"verdicts": each, "within": all_reached(verdicts)}


@dataclass(frozen=True, slots=True)
class Lap:
    """One contestant: seconds of a step as measured (of devices as fast as asked for), and as foreseen.

    `spent_s`: of a plan, what its devices did in a step on average, by their own clocks. `each_s`: all that
    was measured, of which `seconds` is the median. `beside_each_s`: of a peer with a race of its own, what
    `auto` took in that. `gain`: of a plan that won a trial, how many times as fast as the planner's own.
    """

    name: str
    seconds: float
    foreseen_s: float | None = None
    layouts: str = ""
    tried: int = 1  # plans that took part in a trial
    spent_s: tuple[tuple[str, float], ...] = ()
    each_s: tuple[float, ...] = ()
    beside_each_s: tuple[float, ...] = ()
    gain: float | None = None

    @property
    def spread(self) -> str:
        """Between which times its steps were."""
        return between(self.each_s)

    @property
    def beside_s(self) -> float | None:
        """What `auto` usually took in this peer's own race."""
        return median(self.beside_each_s) if self.beside_each_s else None

    @property
    def plan(self) -> str:
        """Its layouts, and how it was chosen."""
        if self.tried == 1:
            return self.layouts
        how = (
            "the planner's own"
            if self.gain is None
            else f"{self.gain:.2f} times as fast as the planner's own"
        )
        return f"{self.layouts} ({how}, of {self.tried} in a trial)"

    @property
    def spent(self) -> str:
        return ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in self.spent_s)


def between(seconds: Sequence[float]) -> str:
    """The shortest and the longest."""
    return f"{min(seconds):.2f}-{max(seconds):.2f} s" if seconds else ""


def core_speed(tell: Tell, make: Callable[[], Work] | None = None) -> float:
    """Operations a second of a core of this machine, where devices can be emulated: of convolutions, or of
    other work.
    """
    require()
    tell("how fast this machine's cores are while all are busy")
    keep_all_freed_memory()  # as in the race
    found = core_flops_per_s(make)
    trim()
    return found


def check_settings(settings: Iterable[Setting], core: float, dilation: float | None) -> None:
    """Before the first of them is raced: can this machine emulate the devices of all?"""
    for setting in settings:
        parts(setting.cluster, core, dilation)


def cluster(flops_per_s: Mapping[str, float], mbit: float) -> Cluster:
    """Devices of these speeds at a switch. Memory is not limited: races are about time."""
    devices = tuple(Device(name, flops_per_s=speed) for name, speed in flops_per_s.items())
    return Cluster(devices, mbit * 1e6 / 8, 0.0)


def auto(graph: Graph, cluster: Cluster, wire: str | None = None) -> Sequence[Plan]:
    """The plan that is chosen, others that promise about as much, and one device: a trial decides among them.

    Forecasts of many small messages may be far too short, so one device takes part whatever it promises.
    """
    decision = api.choose(graph, cluster, wire=wire, loss=LOSS)
    chosen = api.fitting(decision, cluster).plan
    found = tuple(dict.fromkeys((chosen, *promising(decision))))
    alone = [
        option.plan
        for option in decision.others
        if isinstance(option, Option) and option.fits and not option.plan.devices[1:]
    ]
    first = found[: TRIED - 1]
    lacking = all(plan.devices[1:] for plan in first)
    return (*first, *alone[:1]) if lacking else found[:TRIED]


def untried(graph: Graph, cluster: Cluster) -> Sequence[Plan]:
    """The plan that is chosen by its forecast alone."""
    return [api.plan(graph, cluster, loss=LOSS)]


def with_all(graph: Graph, cluster: Cluster) -> Sequence[Plan]:
    """The plan that is chosen by its forecast if all devices have to take part."""
    return [api.plan(graph, cluster, required=cluster.names, loss=LOSS)]


def by_name(strategy: str, fuse: tuple[str, ...] | None = None) -> Choose:
    """A named strategy with equal shares; `fuse`: groups that end after these layers."""
    return lambda graph, cluster: [api.plan(graph, cluster, strategy, fuse=fuse, loss=LOSS)]


def among(names: tuple[str, ...], choose: Choose) -> Choose:
    """The same choice, among some of the devices only."""

    def chosen(graph: Graph, cluster: Cluster) -> Sequence[Plan]:
        devices = tuple(device for device in cluster.devices if device.name in names)
        return choose(graph, replace(cluster, devices=devices))

    return chosen


def tell_at(tell: Tell, where: str, what: str) -> None:
    tell(f"{where}: {what}")


def laps(
    setting: Setting,
    core: float,
    dilation: float | None,
    plans: Mapping[str, Choose],
    peers: tuple[str, ...],
    rounds: int,
    tell: Tell,
    sources: tuple[str, ...] = (),
) -> tuple[tuple[Lap, ...], dict[str, Plan], Conditions]:
    """Every contestant's usual step, all in turns, the plans by name, and how it was measured.

    Peers that all devices take part in have a race with `auto` each: all of them at once take more memory
    than a machine has. A plan that cannot be made and a peer that fails are left out, and why is noted; but
    not without `auto`, which everything is compared with. `sources`: folders with packages that peers need.
    """
    model, inputs, batch = setting.model, (setting.shape,), setting.batch
    graph = graph_of(model, inputs, batch)
    with emulated(setting.cluster, core, dilation) as emulation:
        tell("how long layers take")
        cluster = foreseeable(model, inputs, batch, emulation, setting.sharing or setting.cluster.names)
        found: dict[str, Sequence[Plan]] = {}
        refused = list[tuple[str, str]]()
        for name, choose in plans.items():
            try:
                found[name] = choose(graph, cluster)
            except RequestError as error:
                refused.append((name, str(error)))
                if name == AUTO:
                    raise RequestError(f"there is no plan to race with: {error}") from None
        alone = tuple(name for name in peers if name in ALONE)
        job = RaceJob(model, inputs, batch, (), alone, rounds, sources)
        others = Others()
        won = {name: _fastest(some, job, emulation, tell) for name, some in found.items()}
        chosen = {name: plan for name, (plan, _) in won.items()}
        tell("the race")
        took, beside = race(emulation, replace(job, plans=tuple(chosen.items()))), dict[str, Raced]()
        for peer in (name for name in peers if name not in ALONE):
            tell(f"the race with {peer}")
            try:
                both = race(emulation, replace(job, plans=((AUTO, chosen[AUTO]),), peers=(peer,)))
            except RunError as error:
                refused.append((peer, str(error)))
                continue
            beside[peer], took[peer] = both[AUTO], both[peer]
        taken = others.cores()
    factor, result = emulation.dilation, []
    for name, raced in took.items():
        foreseen, layouts = None, ""
        if name in chosen:
            foreseen = factor * api.simulate(api.lower(graph, chosen[name]), cluster).cost.seconds
            layouts = ", ".join(dict.fromkeys(str(s.layout) for s in chosen[name].segments))
        spent = tuple((kind, factor * seconds) for kind, seconds in raced.spent_s.items())
        tried = len(found.get(name, [0]))
        each = tuple(factor * seconds for seconds in raced.seconds)
        beside_s = tuple(factor * seconds for seconds in beside[name].seconds) if name in beside else ()
        gain = won[name][1] if name in won else None
        result.append(Lap(name, median(each), foreseen, layouts, tried, spent, each, beside_s, gain))
    return tuple(result), chosen, Conditions(factor, core, tuple(refused), taken, factor * cluster.latency_s)


def _fastest(
    plans: Sequence[Plan], job: RaceJob, emulation: Emulation, tell: Tell
) -> tuple[Plan, float | None]:
    """The first of plans that promise much the same, or one that is clearly faster on these devices, and then
    how many times as fast.
    """
    if len(plans) == 1:
        return plans[0], None
    tell(f"a trial of the {len(plans)} most promising plans")
    numbered = {str(number): plan for number, plan in enumerate(plans)}
    fastest = min(took := _trial(numbered, job, emulation, TRIAL_ROUNDS), key=took.__getitem__)
    if took[fastest] >= CLEARLY * took["0"]:
        return plans[0], None
    tell("a trial of the chosen plan and the fastest")  # of many, one is fast by chance
    took = _trial({"0": plans[0], fastest: numbered[fastest]}, job, emulation, FINAL_ROUNDS)
    won = took[fastest] < CLEARLY * took["0"]
    return (numbered[fastest], took["0"] / took[fastest]) if won else (plans[0], None)


def _trial(plans: Mapping[str, Plan], job: RaceJob, emulation: Emulation, rounds: int) -> dict[str, float]:
    """The usual seconds of a step of each."""
    trial = replace(job, plans=tuple(plans.items()), peers=(), rounds=rounds)
    return {name: median(raced.seconds) for name, raced in race(emulation, trial).items()}
