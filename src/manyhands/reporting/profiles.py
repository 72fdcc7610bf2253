"""What was measured of a model on local devices, as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.ir.cluster import Cluster
from manyhands.ir.profile import Timing
from manyhands.reporting.text import amount, duration

SHOWN = 12  # kinds of layers, the ones that take longest


def profile_view(model: str, cluster: Cluster) -> RenderableType:
    """The heaviest kinds of layers whole and cut in half or less, then what messages and processes take."""
    profile = cluster.profiles[0]
    title = f"{model}: {len(profile.timings)} kinds of layers on {len(cluster.devices)} local devices"
    table = Table(title=title, title_justify="left")
    for heading in ("kind of layer", "forward", "backward", "smallest part measured"):
        table.add_column(heading, overflow="fold")
    heaviest = sorted(profile.timings, key=lambda timing: -timing.forward_s - timing.backward_s)
    for timing in heaviest[:SHOWN]:
        table.add_row(_name(timing), duration(timing.forward_s), duration(timing.backward_s), _parts(timing))
    if left := len(heaviest) - SHOWN:
        table.caption = f"and {max(left, 0)} more" if left > 0 else None
    network = (
        f"Messages: {duration(cluster.latency_s)} until who waits goes on, {amount(cluster.bytes_per_s)}/s; "
        f"a bare process takes {amount(profile.bare_bytes)}."
    )
    return Group(table, Text(network), *([_trials(cluster)] if cluster.trials else []))


def _trials(cluster: Cluster) -> Table:
    table = Table(
        title="The most promising plans, stepped in turns: the fastest is taken", title_justify="left"
    )
    for heading in ("plan", "devices", "a step"):
        table.add_column(heading)
    for trial in cluster.trials:
        table.add_row(trial.name, str(len(trial.plan.devices)), duration(trial.seconds))
    return table


def _name(timing: Timing) -> str:
    operation, _, rest = timing.kind.partition("(")
    return f"{operation.lower()} {rest.rpartition(')')[2].strip()}"


def _parts(timing: Timing) -> str:
    """`map 1/4: 0.31` says that a quarter of the map takes 31 % of the time."""
    return ", ".join(
        f"{axis} {factors[0].fraction:.2f}: {(factors[0].forward + factors[0].backward) / 2:.2f}"
        for axis, factors in timing.factors
        if factors
    )
