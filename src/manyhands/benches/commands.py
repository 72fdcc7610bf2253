"""`manyhands bench NAME`: reproduce a table or figure. Torch comes late."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.benches import memories, races
from manyhands.consoles import Json, busy, show

bench = typer.Typer(help="Reproduce a table or figure.", no_args_is_help=True)
races.add_to(bench)
memories.add_to(bench)


@bench.command()
def conformance(as_json: Json = False) -> None:
    """Every ordinary layer in every cut: is it exact? Our column beside the peers'."""
    from rich.progress import Progress

    from manyhands.benches import conformance as bench_conformance

    with Progress(disable=as_json or not sys.stderr.isatty()) as bar:
        task = bar.add_task("cases")
        rows = bench_conformance.run(
            lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
        )
    if as_json:
        print(bench_conformance.to_json(rows))
    else:
        show(bench_conformance.table(rows))
    raise typer.Exit(0 if all(row.verdict.value == "exact" for row in rows) else 1)


@bench.command()
def overhead(
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Alternations of engine and plain.")] = 6,
    as_json: Json = False,
) -> None:
    """What the engine costs on one device: time and peak memory against a plain PyTorch loop."""
    from manyhands.benches import overhead as bench_overhead

    with busy(as_json) as status:
        rows = bench_overhead.run(rounds, lambda what: status.update(f"measuring {what} ..."))
    print(json.dumps(bench_overhead.to_json(rows))) if as_json else show(bench_overhead.table(rows))
    raise typer.Exit(0 if all(row.within for row in rows) else 1)


@bench.command()
def division(as_json: Json = False) -> None:
    """Is memory really divided: activations by rows, weights by channels, on four devices."""
    from manyhands.benches import division as bench_division

    with busy(as_json):
        rows = bench_division.run()
    print(json.dumps(bench_division.to_json(rows))) if as_json else show(bench_division.table(rows))
    raise typer.Exit(0 if all(row.within for row in rows) else 1)


@bench.command()
def limits(
    cases: Annotated[int, typer.Option("--cases", min=1, help="Random models, clusters and limits.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Other cases.")] = 0,
    as_json: Json = False,
) -> None:
    """Does every plan for limited memory run within it, where the kernel kills who needs more? (root)"""
    from manyhands.benches import limits as bench_limits

    with busy(as_json) as status:
        rows = bench_limits.run(cases, seed, lambda what: status.update(what))
    print(json.dumps(bench_limits.to_json(rows))) if as_json else show(bench_limits.table(rows))
    raise typer.Exit(0 if all(row.within for row in rows) else 1)


@bench.command()
def forecast(
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="With --regret: steps of each plan.")] = 9,
    regret: Annotated[bool, typer.Option("--regret", help="Also auto against every named plan.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Also the peak memory of every device.")] = False,
    models: Annotated[str, typer.Option("--models", help="Only these, by commas.")] = "",
    as_json: Json = False,
) -> None:
    """What was foreseen of plans against what they take: seconds of a step, memory, and auto's choice."""
    from manyhands.benches import forecast as bench_forecast

    with busy(as_json) as status:
        only = tuple(name.strip() for name in models.split(",") if name.strip())
        result = bench_forecast.run(rounds, models=only, regret=regret, memory=memory, progress=status.update)
    print(json.dumps(bench_forecast.to_json(result))) if as_json else show(bench_forecast.table(result))
    raise typer.Exit(0 if result.within else 1)


@bench.command()
def footprint(as_json: Json = False) -> None:
    """Is peak memory foreseen: of every process, for several models, plans and allocators."""
    from manyhands.benches import footprint as bench_footprint

    with busy(as_json) as status:
        rows = bench_footprint.run(on_case=lambda what: status.update(f"measuring {what} ..."))
    print(json.dumps(bench_footprint.to_json(rows))) if as_json else show(bench_footprint.table(rows))
    raise typer.Exit(0 if bench_footprint.summarise(rows).within else 1)


@bench.command()
def planning(as_json: Json = False) -> None:
    """How long choosing a plan takes: ResNet-152 on 16 and on 100 unequal devices."""
    from manyhands.benches import planning as bench_planning

    with busy(as_json) as status:
        rows = bench_planning.run(lambda what: status.update(what))
    print(json.dumps(bench_planning.to_json(rows))) if as_json else show(bench_planning.table(rows))
    raise typer.Exit(0 if all(row.within for row in rows) else 1)


@bench.command()
def training(
    job: Annotated[Path, typer.Argument(help="Job file; examples/jobs/cifar10-resnet18.toml is one.")],
    strategies: Annotated[str, typer.Option("--strategies", help="Plans, by semicolons.")] = "batch;rows",
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Folder for what has ended: stopped, it goes on from there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Does a job learn the same by plans as by a plain PyTorch loop? Losses and the metric, side by side."""
    from manyhands.benches import training as bench_training
    from manyhands.training.jobs import load_job

    read = load_job(job)
    with busy(as_json) as status:
        rows = bench_training.run(
            read,
            tuple(part.strip() for part in strategies.split(";")),
            lambda what: status.update(what),
            keep,
        )
    print(json.dumps(bench_training.to_json(rows))) if as_json else show(bench_training.table(rows, read))
    raise typer.Exit(0 if all(row.within for row in rows) else 1)
