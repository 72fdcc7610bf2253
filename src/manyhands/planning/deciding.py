"""The plan for a cluster: of what searches found and the named strategies, the fastest that fits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

import numpy as np

from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster
from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Axis, Layout
from manyhands.ir.graph import ITEM_BYTES, Graph
from manyhands.ir.plan import LEAST_IN_FLIGHT, Cost, Kept, Plan
from manyhands.planning.candidates import by_speed
from manyhands.planning.choosing import Chooser
from manyhands.planning.costs import Costs
from manyhands.planning.lightening import lightened
from manyhands.planning.lowering import lower
from manyhands.planning.pieces import Numbers
from manyhands.planning.refining import Segments, refined
from manyhands.planning.simulation import SGD_WITH_MOMENTUM, foreseen_peak, simulate
from manyhands.planning.strategies import NAMES, parse_cuts, plan_by_name
from manyhands.planning.weights import BUCKET_BYTES

MAX_MESSAGES = 40_000  # of a step, up to which a plan is simulated; beyond, the search's estimate stands
QUICK = 250  # layers times devices, up to which memory is told although nothing limits it
TRUST = 0.85  # what a forecast must promise to win over a plan that was tried, or a mixture over a named one
ROOMY = 4  # of the best plans, those that are tried with more on its way, or with what is waited for first
STARTS = 3  # of the best plans, those that are changed where network and devices are few
CHANGES = 4000  # of them that are tried
CHANGED = 100_000  # layers times devices times changes, the most
IN_FLIGHT = (16 << 20, 64 << 20)  # bytes of that
WORTH = 0.99  # of the forecast: what it takes for more of them, or for parts that come first
MARGIN = 1.03  # of memory, over what is foreseen
LIGHTENED = 3  # plans that are made to fit by computing some of it a second time
TRIES = 4  # to find a plan that fits, each with a tighter limit


@dataclass(frozen=True)
class Option:
    """A plan and what it would cost; simulated: by its programs, else estimated as the search does."""

    name: str
    plan: Plan
    cost: Cost
    simulated: bool
    over: tuple[tuple[str, int, int], ...]  # devices that need more than they have: needed, limit

    @property
    def fits(self) -> bool:
        return not self.over

    @property
    def mixed(self) -> bool:
        """Is it found by a search, and of more than one layout?"""
        return self.name == "auto" and len({segment.layout for segment in self.plan.segments}) > 1


@dataclass(frozen=True)
class Refused:
    """A strategy that cannot be, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """The best plan that fits, if any does, and what else there was."""

    best: Option | None
    others: tuple[Option | Refused, ...]

    @property
    def smallest(self) -> Option | None:
        """Of the plans that need more memory than there is, the one that comes nearest to fitting."""
        found = [option for option in self.others if isinstance(option, Option) and option.over]
        return min(found, key=lambda o: max(need / limit for _, need, limit in o.over), default=None)


def decide(
    graph: Graph,
    cluster: Cluster,
    *,
    required: tuple[str, ...] = (),
    kept: Kept = SGD_WITH_MOMENTUM,
    room: bool = True,
    known: tuple[Plan, ...] = (),
    wire: str | None = None,
    loss: tuple[Axis, ...] = (),
) -> Decision:
    """Foresee what the searches find and the named strategies; the fastest that fits wins.

    `required` devices take part in the plan, also where it would be faster without them. `room`: a plan may
    have more on its way than the least. `known` plans are foreseen too: with that of a cluster that differs
    from this one by being slower in something, the forecast is not worse than there. `wire` and `loss`: of
    every plan.
    """
    decider, digest = _Decider(graph, cluster, kept, wire, loss), graph_digest(graph)
    searches = decider.chooser.searches(required)
    found = [option for layouts in searches for option in decider.searched(layouts)]
    if room and decider.chooser.few:
        roomy = [option for layouts in searches for option in decider.searched(layouts, roomy=True)]
        found += [decider.with_room(option) for option in roomy if option.fits]
    tried = [trial.plan for trial in cluster.trials if trial.plan.graph == digest]
    tried = [plan for plan in tried if room or plan.in_flight_bytes == LEAST_IN_FLIGHT]
    known = tuple(plan for plan in (*known, *tried) if set(plan.devices) <= set(cluster.names))
    found += [decider.foresee("auto", plan) for plan in known]
    named = [decider.named(name) for name in NAMES]
    products = [decider.named(name) for name in decider.chooser.products()]
    named += [option for option in products if isinstance(option, Option)]
    options = [*found, *(option for option in named if isinstance(option, Option))]
    light = decider.lightened(options, searches)
    found, options = [*found, *light], [*options, *light]
    fitting = [option for option in options if option.fits and set(required) <= set(option.plan.devices)]
    fitting.sort(key=lambda option: _rank(option, cluster))
    if fitting and decider.chooser.thorough:
        layouts = tuple(dict.fromkeys(s.layout for option in options for s in option.plan.segments))
        changed = decider.refined(fitting, layouts, required, room)
        found += changed
        fitting = sorted([*fitting, *changed], key=lambda option: _rank(option, cluster))
    few = fitting[:ROOMY]
    fitting += [decider.ahead(option) for option in few]
    ways = [decider.with_room(option) for option in few if room]
    ways += [decider.packed(option) for option in (*few, *ways) if decider.chooser.few]
    fitting += ways
    best = min(fitting, key=lambda option: _rank(option, cluster), default=None)
    if best is not None:
        varied = [best, decider.packed(best)]
        varied += [decider.ahead(option) for option in varied]
        best = min(varied, key=lambda option: _rank(option, cluster))
        varied += ways
        found += [replace(option, name="auto") for option in varied if option.plan != best.plan]  # for trials
    shown = [option if isinstance(option, Refused) else decider.with_memory(option) for option in named]
    others = (*shown, *(option for option in found if option is not best))
    return Decision(best and decider.with_memory(best), others)


def made_to_fit(graph: Graph, plan: Plan, cluster: Cluster, kept: Kept = SGD_WITH_MOMENTUM) -> Plan:
    """The plan, or the same with some of it computed a second time where only that fits."""
    decider = _Decider(graph, cluster, kept, plan.wire, plan.loss)
    light = decider.light(decider.foresee("", plan))
    return light.plan if light.fits else plan


def _rank(option: Option, cluster: Cluster) -> float:
    """The seconds by which a plan is compared: those of its trial, or as foreseen, with caution.

    Which loss a model will have was not known when plans were tried.
    """
    tried = {replace(trial.plan, loss=()): trial.seconds for trial in cluster.trials}
    if (plan := replace(option.plan, loss=())) in tried:
        return tried[plan]
    doubtful = bool(tried) or (bool(cluster.profiles) and option.mixed)
    return option.cost.seconds / (TRUST if doubtful else 1.0)


class _Decider:
    def __init__(
        self, graph: Graph, cluster: Cluster, kept: Kept, wire: str | None, loss: tuple[Axis, ...]
    ) -> None:
        self.graph, self.cluster, self.kept, self.wire, self.loss = graph, cluster, kept, wire, loss
        network = cluster if wire is None else cluster.hastened(4 / ITEM_BYTES[wire])  # by about as much
        self.chooser = Chooser(graph, network, 2 + kept.slots, loss)
        self.costs = Costs(cluster)
        self.seen: dict[Plan, Option] = {}

    def limits(self) -> Numbers | None:
        """What each device may hold beyond its bare process; None where no device has a limit."""
        limits = [device.memory_bytes for device in self.cluster.devices]
        if all(limit is None for limit in limits):
            return None
        bare = [self.chooser.costs.bare_bytes(name) for name in self.cluster.names]
        pairs = zip(limits, bare, strict=True)
        return np.array([np.inf if limit is None else max(limit - own, 0) for limit, own in pairs])

    def searched(self, layouts: tuple[Layout, ...], *, roomy: bool = False) -> list[Option]:
        """What a search finds; again under tighter limits while what it finds is too large after all."""
        limits, options = self.limits(), []
        for _ in range(TRIES):
            found = self.chooser.search(layouts, limits, roomy=roomy)
            if found is None:
                break
            alone = len(found.plan.devices) == 1  # then nothing is gained by cutting it into segments
            plan = plan_by_name(self.graph, found.plan.devices, "single") if alone else found.plan
            option = self.foresee("auto", plan)
            options.append(option)
            if option.fits or limits is None:
                break
            for device, needed, limit in option.over:  # by as much less as it is too large
                index = self.cluster.names.index(device)
                counted = min(limits[index], found.peak_bytes[index])
                limits[index] = max(counted - (MARGIN * needed - limit), 0)
        return options

    def with_room(self, option: Option) -> Option:
        """The same with more on its way at a time, where that is foreseen to help and fits."""
        worth = 1.0 if self.is_light else WORTH
        for size in IN_FLIGHT if option.simulated and option.plan.devices[1:] else ():
            roomy = self.foresee(option.name, replace(option.plan, in_flight_bytes=size))
            if roomy.fits and roomy.cost.seconds < worth * option.cost.seconds:
                option = roomy
        return option

    @cached_property
    def is_light(self) -> bool:
        """Are all weights together no more than may be on its way in any case?"""
        weights = (p for layer in self.graph.layers for p in layer.parameters if p.trainable)
        return sum(prod(p.shape) * ITEM_BYTES[p.dtype] for p in weights) <= LEAST_IN_FLIGHT

    def refined(
        self, options: list[Option], layouts: tuple[Layout, ...], required: tuple[str, ...], room: bool
    ) -> list[Option]:
        """What becomes of the first few, changed for as long as their programs are foreseen to get better.

        Where more on its way takes no memory to speak of they are changed with that, and then also without.
        """
        option, shapes = options[0], {layer.name: layer.shape for layer in self.graph.layers}
        if not option.simulated:
            return []
        most = IN_FLIGHT[0] if room and self.is_light else option.plan.in_flight_bytes

        def planned(segments: Segments) -> Plan:
            used = {device for segment in segments for device in segment.layout.devices}
            devices = tuple(name for name in self.cluster.names if name in used)
            in_flight = most if devices[1:] else LEAST_IN_FLIGHT
            return replace(option.plan, segments=segments, devices=devices, in_flight_bytes=in_flight)

        def rank(plan: Plan, cost: Cost) -> float:
            return _rank(Option("auto", plan, cost, True, ()), self.cluster)

        def seconds(segments: Segments) -> float:
            plan = planned(segments)
            return rank(plan, self._simulated(plan, memory=False))

        def is_possible(segments: Segments) -> bool:
            plan = planned(segments)
            tiles = (tile for s in segments for tile in s.layout.tiles(shapes[s.layers[-1]]).values())
            if not set(required) <= set(plan.devices) or not all(tile.numel for tile in tiles):
                return False
            return self._num_messages(plan) <= MAX_MESSAGES and self.foresee("auto", plan).fits

        def likeness(segments: Segments) -> Hashable:
            """Who has what of every result, what is computed again, and how doubtful the forecast is."""
            measured = self.cluster.profiles or self.cluster.trials
            doubt = rank(planned(segments), Cost(1.0, 0, ())) if measured else 1.0
            parts = ((s.layers, s.redo, s.refill, s.bands) for s in segments)
            tiles = (tuple(s.layout.tiles(shapes[n]).items()) for s in segments for n in s.layers)
            return doubt, *parts, *tiles

        tries = min(CHANGES, CHANGED // (len(shapes) * len(self.cluster.names)))
        starts = dict.fromkeys(each.plan.segments for each in options if each.simulated)
        few = [s for s in list(starts)[:STARTS] if self.foresee("auto", planned(s)).fits]
        few = [s for s in few if set(required) <= set(planned(s).devices)]
        if not few:
            return []
        best = planned(refined(few, layouts, seconds, is_possible, likeness, tries))
        known = {each.plan for each in options}
        both = (best, replace(best, in_flight_bytes=LEAST_IN_FLIGHT))
        seen = [self.foresee("auto", plan) for plan in dict.fromkeys(both) if plan not in known]
        return [each for each in seen if each.fits]

    def packed(self, option: Option) -> Option:
        """The same without the zeros of what travels, if there are any and that fits."""
        if not option.simulated or not option.plan.devices[1:]:
            return option
        found = self.foresee(option.name, replace(option.plan, packed=True))
        return found if found.fits and found.cost != option.cost else option

    def ahead(self, option: Option) -> Option:
        """The same with what others wait for computed first, where that is foreseen to help and fits."""
        if not option.simulated or not option.plan.devices[1:]:
            return option
        found = self.foresee(option.name, replace(option.plan, ahead=True))
        worth = 1.0 if self.chooser.thorough else WORTH
        return found if found.fits and found.cost.seconds < worth * option.cost.seconds else option

    def lightened(self, options: list[Option], searches: list[tuple[Layout, ...]]) -> list[Option]:
        """Of plans that are too large and would be fast, those that compute some of it a second time."""
        if self.limits() is None:
            return []
        whole = [option for layouts in searches for option in self.unlimited(layouts)]
        large = {option.plan: option for option in (*whole, *options) if option.simulated and not option.fits}
        best_s = min((option.cost.seconds for option in options if option.fits), default=inf)
        worth = sorted((o for o in large.values() if o.cost.seconds < best_s), key=lambda o: o.cost.seconds)
        return [self.light(option) for option in worth[:LIGHTENED]]

    def unlimited(self, layouts: tuple[Layout, ...]) -> list[Option]:
        """What a search finds where memory is no matter."""
        found = self.chooser.search(layouts, None)
        return [] if found is None else [self.foresee("auto", found.plan)]

    def light(self, option: Option) -> Option:
        """The same, or with some of it computed a second time if it needs more memory than there is."""
        if option.fits or not option.simulated:
            return option
        found, looked_at = option, set[str]()
        while short := {d: need / limit for d, need, limit in found.over if d not in looked_at}:
            looked_at |= set(short) if looked_at else {max(short, key=short.__getitem__)}
            found = self._light_on(option, looked_at)
        return found

    def _light_on(self, option: Option, devices: set[str]) -> Option:
        """So light that it fits on these devices, the tightest: to look at all takes its time."""
        costs, limits = self.chooser.costs, {d.name: d.memory_bytes for d in self.cluster.devices}

        def fill(plan: Plan) -> float:
            lowered = lower(self.graph, plan)
            return max(
                MARGIN * foreseen_peak(lowered, name, costs, self.kept) / (limits[name] or inf)
                for name in devices
            )

        return self.foresee(option.name, lightened(self.graph, option.plan, costs, fill))

    def named(self, name: str) -> Option | Refused:
        """A named strategy on all devices, with the best shares; `single` on the fastest device."""
        speed, devices = self.chooser.speed, self.cluster.names
        try:
            if name == "single" or len(devices) == 1:
                fastest = max(devices, key=lambda device: speed[device])
                return self.foresee(name, plan_by_name(self.graph, (fastest,), "single"))
            first = by_speed(devices, parse_cuts(name, len(devices)), [speed[device] for device in devices])
            shares = self.chooser.shared(first).shares
            return self.foresee(name, plan_by_name(self.graph, devices, name, shares=shares))
        except RequestError as error:
            return Refused(name, str(error))

    def foresee(self, name: str, plan: Plan) -> Option:
        """What a plan would cost."""
        if (plan.wire, plan.loss) != (self.wire, self.loss):
            plan = replace(plan, wire=self.wire, loss=self.loss)
        if plan not in self.seen:
            simulated = self._num_messages(plan) <= MAX_MESSAGES
            limited = self.limits() is not None
            cost = self._simulated(plan, memory=limited) if simulated else self._estimate(plan)
            limits = {device.name: device.memory_bytes for device in self.cluster.devices}
            over = tuple(
                (device, peak, limit)
                for device, peak in cost.peak_bytes
                if (limit := limits[device]) is not None and MARGIN * peak > limit
            )
            self.seen[plan] = Option(name, plan, cost, simulated, over)
        found = self.seen[plan]
        return found if found.name == name else Option(name, plan, found.cost, found.simulated, found.over)

    def with_memory(self, option: Option) -> Option:
        """With the memory it takes also where nothing limits that, if it is quickly known."""
        size = len(self.graph.layers) * len(option.plan.devices)
        if option.cost.peak_bytes or size > QUICK:
            return option
        return replace(option, cost=self._simulated(option.plan, memory=True))

    def _simulated(self, plan: Plan, *, memory: bool) -> Cost:
        lowered = lower(self.graph, plan)
        return simulate(lowered, self.cluster, memory=memory, kept=self.kept, costs=self.costs).cost

    def _num_messages(self, plan: Plan) -> int:
        """About how many messages a step takes: statistics and weights to everybody, tiles to neighbours."""
        num, statistics = len(plan.devices), sum(layer.statistic is not None for layer in self.graph.layers)
        layers = self.graph.by_name()
        whole = [s for s in plan.segments if any(cut.axis is not Axis.CHANNELS for cut in s.layout.cuts)]
        shared = (p for s in whole for name in s.layers for p in layers[name].parameters if p.trainable)
        weights = sum(prod(p.shape) * ITEM_BYTES[p.dtype] for p in shared) // BUCKET_BYTES
        return 2 * num * (num - 1) * (statistics + weights) + 8 * num * len(plan.segments)

    def _estimate(self, plan: Plan) -> Cost:
        layouts = tuple(dict.fromkeys(segment.layout for segment in plan.segments))
        chooser = self.chooser
        found = chooser.searching(layouts).estimate(plan)
        if found is None:
            raise RequestError("too large to be foreseen: its segments end inside of what is fused.")
        peaks = zip(self.cluster.names, found.peak_bytes, strict=True)
        return Cost(
            found.seconds,
            0,
            tuple((d, int(size) + chooser.costs.bare_bytes(d)) for d, size in peaks if d in plan.devices),
        )
