"""`manyhands bench` of what runs on emulated devices: tiled, peers, unequal, scaling (Linux, root)."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.consoles import Json, busy, show
from manyhands.errors import RequestError

Dilate = Annotated[
    float | None,
    typer.Option("--dilate", min=0.001, help="Devices and links so much faster; else as fast as can be."),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Steps of each contestant, in turns.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Also draw it into this file (PNG or SVG).")]
Rate = Annotated[float, typer.Option("--rate", min=0.001, help="Mbit/s of every device.")]


def add_to(bench: typer.Typer) -> None:
    for command in (tiled, peers, unequal, scaling):
        bench.command()(command)


def _rates(text: str) -> tuple[float, ...]:
    """None, one or more, by commas."""
    try:
        found = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise RequestError(f"--rates {text}: numbers, by commas.") from None
    if not all(0 < number < inf for number in found):
        raise RequestError(f"--rates {text}: numbers above 0, by commas.")
    return found


def _counts(text: str, option: str) -> tuple[int, ...]:
    """One or more."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise RequestError(f"{option} {text}: whole numbers above 0, by commas.")
    return tuple(map(int, words))


def _check(plot: Path | None, dilate: float | None, rate: float = 1.0) -> None:
    """What would be a pity to find out after hours."""
    if dilate is not None and not dilate < inf:
        raise RequestError(f"--dilate {dilate}: a number, please.")
    if not rate < inf:
        raise RequestError(f"--rate {rate}: a number, please.")
    if plot is None:
        return
    if plot.suffix.lower() not in (".png", ".svg"):
        raise RequestError(f"--plot {plot}: a file that ends with .png or .svg.")
    if not plot.parent.is_dir():
        raise RequestError(f"--plot {plot}: there is no folder {plot.parent}.")


def _end(result: Any, module: Any, plot: Path | None, title: str, unit: str, as_json: bool) -> None:
    print(json.dumps(module.to_json(result)), flush=True) if as_json else show(module.table(result))
    if plot is not None:
        from manyhands.reporting.plots import plot_bars

        plot_bars(plot, title, module.bars(result), unit)


def _status(as_json: bool) -> tuple[Any, Callable[[str], None]]:
    status = busy(as_json)
    return status, lambda what: status.update(f"{what} ...")


def tiled(
    devices: Annotated[str, typer.Option("--devices", help="Numbers of devices, by commas.")] = "2,6",
    batches: Annotated[str, typer.Option("--batches", help="Batches, by commas.")] = "8",
    rates: Annotated[str, typer.Option("--rates", help="Mbit/s, by commas.")] = "100",
    memory: Annotated[bool, typer.Option("--memory", help="Also the peak memory of activations.")] = False,
    dilate: Dilate = None,
    rounds: Rounds = 3,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """YOLOv2's first layers on emulated Raspberry Pi 3: speed over one core, memory, ways to group layers."""
    from manyhands.benches import tiled as module

    _check(plot, dilate)
    counts, sizes = _counts(devices, "--devices"), _counts(batches, "--batches")
    wires = _rates(rates)
    if not wires:
        raise RequestError("--rates needs at least one number.")
    status, tell = _status(as_json)
    with status:
        result = module.run(counts, sizes, wires, dilate, rounds, memory, tell)
    _end(result, module, plot, "Speed over one core of a Raspberry Pi 3", "times as fast", as_json)
    raise typer.Exit(1 if result.within is False else 0)


def peers(
    models: Annotated[str, typer.Option("--models", help="Only these, by commas.")] = "",
    rates: Annotated[str, typer.Option("--rates", help="Mbit/s, by commas.")] = "",
    against: Annotated[
        str,
        typer.Option(
            "--against", help="Of the peers besides one device only these, by commas; DistConv by its folder."
        ),
    ] = "",
    full: Annotated[bool, typer.Option("--full", help="All models at all rates: hours.")] = False,
    keep: Annotated[Path | None, typer.Option("--keep", help="Folder for cells that are done.")] = None,
    wire: Annotated[str | None, typer.Option("--wire", help="bfloat16: race auto with that, too.")] = None,
    dilate: Dilate = None,
    rounds: Rounds = 3,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """auto against DistributedDataParallel, FSDP2, pipelining and one device, on four emulated devices."""
    from manyhands.benches import peers as module

    _check(plot, dilate)
    words = (tuple(w.strip() for w in text.split(",") if w.strip()) for text in (models, against))
    only, rivals = words
    status, tell = _status(as_json)
    with status:
        chosen = module.RATES if full and not rates else _rates(rates)
        cells = module.run(only, chosen, rivals, dilate, rounds, keep, tell, wire)
    _end(cells, module, plot, "auto against its peers", "times as fast as the peer", as_json)
    raise typer.Exit(1 if any(cell.within is False for cell in cells) else 0)


def unequal(
    rate: Rate = 100.0, dilate: Dilate = None, rounds: Rounds = 3, plot: Plot = None, as_json: Json = False
) -> None:
    """One Pi 5 and three Pi 3, emulated: the planner's shares against equal ones, and the Pi 5 alone."""
    from manyhands.benches import unequal as module

    _check(plot, dilate, rate)
    status, tell = _status(as_json)
    with status:
        result = module.run(rate, dilate, rounds, tell)
    _end(result, module, plot, "A Pi 5 and three Pi 3", "seconds of a step", as_json)
    raise typer.Exit(0 if result.within else 1)


def scaling(
    devices: Annotated[str, typer.Option("--devices", help="Numbers of devices, by commas.")] = "1,2,4,8",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images in a step, for each device.")] = 4,
    rate: Rate = 1000.0,
    dilate: Dilate = None,
    rounds: Rounds = 3,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """ResNet-18 on 1 to 8 emulated Raspberry Pi 4, and by simulation on up to 256."""
    from manyhands.benches import scaling as module

    _check(plot, dilate, rate)
    counts = _counts(devices, "--devices")
    status, tell = _status(as_json)
    with status:
        rows = module.run(counts, batch, rate, dilate, rounds, tell)
    _end(rows, module, plot, "Efficiency by the number of devices", "of ideal", as_json)
