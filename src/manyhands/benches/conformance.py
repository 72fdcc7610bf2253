"""Who is exact, layer by layer: every case trained by every kind of plan, and what others make of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import groupby
from math import isfinite

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from manyhands.api import plan, trace, verify
from manyhands.benches.conformance_cases import CASES, CHANNELS, PEER_NAMES, Case, Peers
from manyhands.errors import RequestError
from manyhands.ir.geometry import Axis
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.verifying import TOLERANCE

Progress = Callable[[int, int, str], None]  # cases done, cases in all, the one at work

CAPTION = (
    "manyhands: three steps with momentum in float64 against one device, with 2, 3 and 4 devices in rows, "
    "columns, grid, batch, channels and mixed plans, as fused group and layer by layer. "
    "Others: output and all gradients, measured beforehand: torch 2.13 on CPU over gloo, JAX 0.10 on CPU, "
    "DistDL over MPI; 2 devices in one direction and 2x2. "
    "exact: equal. WRONG: wrong numbers and no error. refused: error or crash. Blank: not tried."
)


class Verdict(Enum):
    EXACT = "exact"
    WRONG = "WRONG"
    REFUSED = "refused"


class Direction(Enum):
    ROWS = "rows"
    COLUMNS = "columns"
    GRID = "grid"
    BATCH = "batch"
    CHANNELS = "channels"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan to be tried; fused: the whole network is one group where the strategy does not change."""

    direction: Direction
    strategy: str
    num_devices: int
    fused: bool

    def __str__(self) -> str:
        return f"{self.strategy} on {self.num_devices}, {'fused' if self.fused else 'layer by layer'}"


@dataclass(frozen=True, slots=True)
class Ran:
    attempt: Attempt
    worst: float


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no such plan, and the reason is told before anything runs."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Crashed:
    attempt: Attempt
    reason: str


Outcome = Ran | Refused | Crashed


@dataclass(frozen=True, slots=True)
class Note:
    """What happened to one plan of one case, for the reader."""

    case: str
    plan: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """Failures speak against us: wrong plans, crashes, directions that no plan took. Refusals do not."""

    name: str
    verdict: Verdict
    num_cases: int
    num_plans: int  # that ran
    worst_difference: float
    refusals: tuple[Note, ...]
    failures: tuple[Note, ...]
    peers: Peers


def run(progress: Progress | None = None) -> tuple[Row, ...]:
    """Examine every case; minutes. One row comes back for each row of the table, in its order."""
    outcomes: dict[Case, tuple[Outcome, ...]] = {}
    for index, case in enumerate(CASES):
        if progress:
            progress(index, len(CASES), f"{case.row}: {case.variant}")
        outcomes[case] = examine(case)
    if progress:
        progress(len(CASES), len(CASES), "")
    return tuple(
        judge({case: outcomes[case] for case in cases}) for _, cases in groupby(CASES, lambda case: case.row)
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """One thread an operation, as the devices are threads; and no warning that "same" padding may copy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
            yield
    finally:
        torch.set_num_threads(before)


def attempts(graph: Graph) -> tuple[Attempt, ...]:
    """All plans that a case is to be tried with."""
    middle, last = _turn(graph), _layers(graph)[-1]
    strategies = [
        (direction, direction.value, number)
        for direction in (Direction.ROWS, Direction.COLUMNS, Direction.BATCH, Direction.CHANNELS)
        for number in (2, 3, 4)
    ]
    strategies += [
        (Direction.GRID, "grid", 4),
        (Direction.MIXED, "batch:2,rows:2", 4),
        (Direction.MIXED, "rows:2,channels:2", 4),
        (Direction.MIXED, f"rows; {middle} = channels", 2),
        (Direction.MIXED, f"channels; {middle} = columns", 3),
        (Direction.MIXED, f"grid; {middle} = batch; {last} = columns:2,channels:2", 4),
    ]
    return tuple(
        Attempt(direction, strategy, number, fused)
        for direction, strategy, number in strategies
        for fused in (True, False)
    )


def _turn(graph: Graph) -> str:
    """The last layer of the first half that reads a map: a mixed plan may have cut that map otherwise."""
    names, shapes = _layers(graph), {layer.name: layer.shape for layer in graph.layers}
    maps = [b for a, b in zip(names, names[1:], strict=False) if len(shapes[a]) == 4 and shapes[a][2] > 1]
    return [name for name in maps if names.index(name) <= len(names) // 2][-1]


def examine(case: Case, keep: Callable[[Attempt], bool] = lambda attempt: True) -> tuple[Outcome, ...]:
    """What came of each of the case's plans that `keep` keeps. Two requests for one plan try it once."""
    with torch.random.fork_rng(devices=[]), _quietly():
        torch.manual_seed(0)
        model = case.build().double()
        example = torch.zeros(case.batch, *case.shape, dtype=torch.float64)
        graph = trace(model, example).graph
        plans: set[Plan] = set()
        outcomes: list[Outcome] = []
        for attempt in filter(keep, attempts(graph)):
            try:
                chosen = _plan(case, graph, attempt)
            except RequestError as error:
                outcomes.append(Refused(attempt, str(error)))
                continue
            if chosen not in plans:
                plans.add(chosen)
                outcomes.append(_train(attempt, model, example, chosen))
    return tuple(outcomes)


def _train(attempt: Attempt, model: nn.Module, example: Tensor, chosen: Plan) -> Ran | Crashed:
    try:
        return Ran(attempt, verify(model, (example,), chosen).worst)
    except Exception as error:  # whatever it is, the table goes on and shows it
        return Crashed(attempt, f"{type(error).__name__}: {error}")


def _plan(case: Case, graph: Graph, attempt: Attempt) -> Plan:
    """The plan asked for, and none that quietly cuts something else where the maps are too small."""
    chosen = plan(
        graph,
        attempt.num_devices,
        attempt.strategy,
        shares=case.speeds[: attempt.num_devices],
        fuse=case.exchange if attempt.fused else _layers(graph),
    )
    cut = {c.axis for segment in chosen.segments for c in segment.layout.cuts}
    if missing := _axes(attempt.strategy) - cut:
        names = ", ".join(sorted(axis.value for axis in missing))
        raise RequestError(f"the maps are too small where {attempt.strategy!r} would cut {names}.")
    return chosen


def _layers(graph: Graph) -> tuple[str, ...]:
    """Every layer but the inputs: no case uses a weight outside a module."""
    return tuple(layer.name for layer in graph.layers if layer.inputs)


def _axes(strategy: str) -> set[Axis]:
    """What a strategy cuts: rows and columns for a grid, and what it names otherwise."""
    cuts = [part.rpartition("=")[2] for part in strategy.replace("grid", "rows,columns").split(";")]
    return {Axis(word.partition(":")[0].strip()) for part in cuts for word in part.split(",")}


def possible(case: Case) -> set[Direction]:
    """The directions in which a case can be cut at all: a batch of 1 cannot be cut by batch."""
    sizes = dict(zip(Axis, (case.batch, CHANNELS, *case.shape[1:]), strict=True))
    single = {direction for direction in Direction if direction is not Direction.MIXED}
    return {d for d in single if all(sizes[axis] > 1 for axis in _axes(d.value))} | {Direction.MIXED}


def judge(outcomes: dict[Case, Sequence[Outcome]]) -> Row:
    """The row of some cases: exact if every plan that ran was, and plans ran in every direction there is."""
    failures: list[Note] = []
    refusals: list[Note] = []
    differences: list[float] = []
    wrong = False
    for case, results in outcomes.items():
        for outcome in results:
            match outcome:
                case Ran(attempt, worst):
                    differences.append(worst)
                    if not worst <= TOLERANCE:
                        wrong = True
                        failures.append(Note(case.variant, str(attempt), f"differs by {worst:.1e}"))
                case Refused(attempt, reason):
                    refusals.append(Note(case.variant, str(attempt), reason))
                case Crashed(attempt, reason):
                    failures.append(Note(case.variant, str(attempt), reason))
        ran = {outcome.attempt.direction for outcome in results if isinstance(outcome, Ran)}
        failures += _untaken(case, possible(case) - ran)
    verdict = Verdict.WRONG if wrong else Verdict.REFUSED if failures else Verdict.EXACT
    first = next(iter(outcomes))
    worst = max(differences, default=float("inf"))
    notes = tuple(refusals), tuple(failures)
    return Row(first.row, verdict, len(outcomes), len(differences), worst, *notes, first.peers)


def _untaken(case: Case, directions: Iterable[Direction]) -> list[Note]:
    names = sorted(direction.value for direction in directions)
    return [Note(case.variant, name, "no plan in this direction ran") for name in names]


def to_json(rows: Sequence[Row]) -> str:
    """The facts of the table, with every refusal and failure; a difference without bound is null."""
    return json.dumps(
        {"tolerance": TOLERANCE, "how": CAPTION, "rows": [_record(row) for row in rows]}, indent=1
    )


def _record(row: Row) -> dict[str, object]:
    worst = row.worst_difference if isfinite(row.worst_difference) else None
    names, values = asdict(PEER_NAMES), asdict(row.peers)
    peers = {name: values[key] for key, name in names.items()}
    return asdict(row) | {"verdict": row.verdict.value, "worst_difference": worst, "peers": peers}


def table(rows: Sequence[Row]) -> Table:
    """Our verdict first, with how many plans it stands for, and the others' beside it."""
    drawn = Table(title="Who trains like one device, layer by layer", box=SIMPLE_HEAD, padding=0)
    drawn.caption, drawn.caption_justify = CAPTION, "left"
    drawn.add_column("case", overflow="fold")
    drawn.add_column("many-\nhands", no_wrap=True)
    for name in ("plans", "refused\nwith a\nreason", "worst\ndiff."):
        drawn.add_column(name, justify="right", no_wrap=True)
    for name in asdict(PEER_NAMES).values():
        drawn.add_column(name.replace(" ", "\n"), overflow="fold", max_width=11)
    for row in rows:
        counts = (str(row.num_plans), str(len(row.refusals)), f"{row.worst_difference:.0e}")
        peers = map(_coloured, asdict(row.peers).values())
        drawn.add_row(row.name, _coloured(row.verdict.value), *counts, *peers)
    return drawn


def _coloured(verdict: str) -> Text:
    """Red for wrong numbers, which nobody notices; yellow for errors, which everybody does."""
    if verdict.startswith("exact"):
        return Text(verdict, "green")
    if verdict.startswith("WRONG"):
        return Text(verdict, "bold red")
    return Text(verdict, "" if verdict in ("none", "by hand") else "yellow")
