"""`manyhands bench` of memory: memory (tables, the race) and budgets on one device, lighter on several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from manyhands.consoles import Json, busy, show
from manyhands.errors import RequestError


def add_to(bench: typer.Typer) -> None:
    for command in (memory, budgets, lighter):
        bench.command()(command)


def memory(
    race: Annotated[
        bool, typer.Option("--race", help="Instead: our schedules against checkpoint_sequential.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With --race: against torch.compile's memory budget, too.")
    ] = False,
    rotor: Annotated[
        Path | None, typer.Option("--rotor", help="With --race: against INRIA's rotor, whose source is here.")
    ] = None,
    models: Annotated[
        str, typer.Option("--models", help="With --race: ResNets, by commas.")
    ] = "resnet18,resnet50,resnet101",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="With --race: steps of each, in turns.")] = 5,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw figure 1, or the race.")] = None,
    as_json: Json = False,
) -> None:
    """The paper on training on the edge: its tables of ResNets' memory, and what Revolve makes of them."""
    if not race and (compiled or rotor is not None):
        raise RequestError("--compile and --rotor say who takes part in the race: add --race.")
    if race:
        _race(tuple(name.strip() for name in models.split(",")), rounds, compiled, rotor, plot, as_json)
    from manyhands.benches import paper3
    from manyhands.reporting.plots import plot_steps

    with busy(as_json) as status:
        result = paper3.run(lambda what: status.update(f"{what} ..."))
    if plot is not None:
        limit = paper3.LIMIT_BYTES / paper3.GIB, "2 GB"
        plot_steps(plot, paper3.panels(result), "times as long as without checkpoints", "GB", limit)
    print(json.dumps(paper3.to_json(result))) if as_json else show(paper3.table(result))
    raise typer.Exit(0 if result.within else 1)


def _race(
    models: tuple[str, ...],
    rounds: int,
    compiled: bool,
    rotor: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from manyhands.benches import recomputing
    from manyhands.models import ZOO
    from manyhands.reporting.plots import plot_points

    for name in models:
        if name not in ZOO or not name.startswith("resnet"):
            raise RequestError(f"--models {name}: checkpoint_sequential is raced on the zoo's ResNets.")
    with busy(as_json) as status:
        results = recomputing.run(models, rounds, compiled, rotor, lambda what: status.update(f"{what} ..."))
    if plot is not None:
        plot_points(plot, recomputing.panels(results), "part of plain memory", "times as long as plain")
    print(json.dumps(recomputing.to_json(results))) if as_json else show(recomputing.table(results))
    raise typer.Exit(0 if all(result.within for result in results) else 1)


def budgets(
    cases: Annotated[int, typer.Option("--cases", min=1, help="That run; others are refused.")] = 40,
    seed: Annotated[int, typer.Option("--seed", help="Other cases.")] = 0,
    headline: Annotated[
        bool,
        typer.Option("--headline", help="Instead: ResNet-152 at 500x500 in 2 GB, ResNet-50 at 1500x1500."),
    ] = False,
    only: Annotated[str | None, typer.Option("--only", help="Cases of this model alone.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Cases at a time: one a core.")] = None,
    as_json: Json = False,
) -> None:
    """Does manyhands.fit keep its budget, where the kernel kills who needs more? (root)"""
    from manyhands.benches import budgets as module

    with busy(as_json) as status:

        def tell(what: str) -> None:
            status.update(f"{what} ...")

        if headline:
            rows = module.run(module.headline(only), jobs or 1, tell)
        else:
            rows = module.run_until(cases, seed, only, jobs or len(os.sched_getaffinity(0)), tell)
    print(json.dumps(module.to_json(rows))) if as_json else show(module.table(rows))
    raise typer.Exit(0 if all(row.within for row in rows) else 1)


def lighter(
    model: Annotated[str, typer.Argument(help="A model of the zoo.")] = "yolov2-16",
    input: Annotated[str, typer.Option("--input", help="Shape of one sample.")] = "3x608x608",
    batch: Annotated[int, typer.Option("--batch", min=1)] = 32,
    devices: Annotated[int, typer.Option("--devices", min=1)] = 4,
    strategy: Annotated[str, typer.Option("--strategy", help="As of `manyhands plan`.")] = "rows",
    part: Annotated[float, typer.Option("--part", min=0.05, max=0.99, help="Of the plan's memory.")] = 0.5,
    as_json: Json = False,
) -> None:
    """A plan on local devices in half its memory: what is measured, what travels, and is it exact?"""
    from manyhands.benches import lighter as module
    from manyhands.loading import parse_inputs

    (shape,) = parse_inputs(input)
    with busy(as_json) as status:
        result = module.run(
            model, shape, batch, strategy, devices, part, lambda what: status.update(f"{what} ...")
        )
    print(json.dumps(module.to_json(result))) if as_json else show(module.table(result))
    raise typer.Exit(0 if result.within else 1)
