"""The command line: the verbs of the api as commands; files in, tables or JSON out. Torch comes late."""

from __future__ import annotations

import json
import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from manyhands.benches.commands import bench
from manyhands.consoles import Json, busy, show
from manyhands.errors import ManyhandsError, RequestError, RunError

app = typer.Typer(
    help="Many hands make light work: train one CNN on several small devices, exactly as on one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

Model = Annotated[str, typer.Argument(help="A zoo name (see `manyhands models`) or file.py:function.")]
Input = Annotated[str | None, typer.Option("--input", help="One image: channels x rows x columns.")]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Images in a step, all devices together.")]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", envvar="MANYHANDS_CLUSTER", help="Cluster file (TOML).")
]
DeviceName = Annotated[
    str | None,
    typer.Option("--as", envvar="MANYHANDS_AS", help="Which device of the cluster file this machine is."),
]
Devices = Annotated[int | None, typer.Option("--devices", help="That many local processes instead.")]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="auto, single, batch, rows, columns, grid, channels; batch:2,rows:2; 'rows; LAYER = batch'.",
    ),
]
Shares = Annotated[str | None, typer.Option("--shares", help="Unequal shares, one a device: 3,1,1.")]
Fuse = Annotated[
    str | None, typer.Option("--fuse", help="Fused groups end after these layers: conv1,layer2.0.relu.")
]
Memory = Annotated[str | None, typer.Option("--memory", help="Limit of each device: 900MB.")]
Wire = Annotated[
    str | None, typer.Option("--wire", help="bfloat16: round tiles and gradients for their way. NOT exact.")
]


ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
INTERRUPTED = 130  # the exit code that typer makes of Ctrl-C


def main() -> None:
    """Run a command; a mistake is one line and an exit code, never a traceback."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, _stopped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console that lacks a sign shows another
    try:
        code = app(standalone_mode=False)  # what a command's typer.Exit says, or nothing
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except ManyhandsError as error:
        _fail(str(error), 2 if isinstance(error, RequestError) else 1)
    except KeyboardInterrupt:
        _fail("stopped", INTERRUPTED)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: an unknown option, a missing argument
            _fail(error.format_message(), 2)
        raise


def _stopped(number: int, frame: object) -> NoReturn:
    """It is tidied up first, which being told a second time must not break."""
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    _fail("stopped", 128 + number)


def _fail(message: str, code: int) -> NoReturn:
    print(f"manyhands: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}.") from None


def _check_drawing(path: Path) -> None:
    """Found out before anything is planned."""
    if path.suffix != ".svg":
        raise RequestError(f"--draw {path}: drawings are SVG. Name it {path.stem}.svg.")
    if not path.parent.is_dir():
        raise RequestError(f"--draw {path}: there is no folder {path.parent}.")


@app.command()
def demo(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 200,
    strategy: Strategy = "batch:2,rows:2",
    devices: Annotated[int, typer.Option("--devices", min=1, help="Local processes.")] = 4,
) -> None:
    """Plan and train a small CNN on four local devices, and compare with plain PyTorch."""
    from manyhands.demonstration import demonstrate

    demonstrate(steps, strategy, devices)


@app.command()
def models(as_json: Json = False) -> None:
    """List the models that come with manyhands."""
    from rich.table import Table

    from manyhands.models import ZOO

    if as_json:
        print(
            json.dumps(
                [{"name": e.name, "input": e.input_shape, "what": e.description} for e in ZOO.values()]
            )
        )
        return
    table = Table("model", "input", "what")
    for entry in ZOO.values():
        table.add_row(entry.name, "x".join(map(str, entry.input_shape)), entry.description)
    show(table)


@app.command()
def profile(
    cluster: ClusterFile = None,
    name: DeviceName = None,
    devices: Devices = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads of each process; else as `train` has.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Time the layers of this model.")] = None,
    input: Input = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Images in a step; else 8.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this device; with --cluster all its devices and links, and write them into that file.

    With --model: how long each kind of its layers takes on local devices, whole and cut, and what messages
    between them take. It is kept, and plans of that model on as many devices are foreseen by it.
    """
    if model is not None:
        if cluster is not None or name is not None:
            raise RequestError("--model is measured on local devices: give --devices, not --cluster.")
        from manyhands.measuring import profile_and_show as profile_model

        with busy(as_json):
            measured, view = profile_model(model, input, batch or 8, devices or 2, threads)
        print(json.dumps(measured)) if as_json else show(view)
        return
    if input is not None or batch is not None:
        raise RequestError("--input and --batch are of a model's layers: name it with --model.")
    from manyhands.surveying import profile_and_show

    profile_and_show(cluster, name, devices, threads, as_json=as_json)


@app.command()
def plan(
    model: Model,
    input: Input = None,
    batch: BatchSize = 8,
    cluster: ClusterFile = None,
    devices: Devices = None,
    strategy: Strategy = "auto",
    shares: Shares = None,
    fuse: Fuse = None,
    memory: Memory = None,
    wire: Wire = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan to this file (JSON).")] = None,
    draw: Annotated[Path | None, typer.Option("--draw", help="Draw the plan into this file (SVG).")] = None,
    program: Annotated[str | None, typer.Option("--program", help="Print this device's steps.")] = None,
    as_json: Json = False,
) -> None:
    """Print who computes what, what travels and what it is expected to cost. Nothing is computed."""
    if draw is not None:
        _check_drawing(draw)
    from manyhands.advising import explained
    from manyhands.requests import Request

    wishes = model, input, batch, cluster, devices, strategy, shares, fuse
    request = Request.read(*wishes, memory=memory, wire=wire)
    lowered, facts = explained(request)
    steps = None if program is None else request.program(lowered, program)
    from manyhands.ir.codec import encode, to_json

    if save is not None:
        _write(save, to_json(lowered.plan) + "\n")
    if draw is not None:
        from manyhands.planning.picturing import picture
        from manyhands.reporting.drawing import draw as drawn

        _write(draw, drawn(picture(Path(request.model).name, facts, lowered)))
    if steps is not None:
        print(steps)
        return
    if as_json:
        print(json.dumps({"plan": encode(lowered.plan), "facts": encode(facts)}))
    else:
        from manyhands.reporting.text import plan_view

        show(plan_view(facts))
    raise typer.Exit(2 if facts.short else 0)


@app.command()
def memory(
    model: Model,
    input: Input = None,
    batches: Annotated[str, typer.Option("--batches", help="Batch sizes, by commas.")] = "1,4",
    disk: Annotated[Path | None, typer.Option("--disk", help="A directory that may hold states.")] = None,
    as_json: Json = False,
) -> None:
    """What training on one device takes: memory by time, and what fits into boards of 512 MB to 4 GB."""
    sizes = [part.strip() for part in batches.split(",")]
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise RequestError(f"--batches {batches}: whole numbers, by commas.")
    from manyhands.checkpointing import surveying
    from manyhands.loading import default_input, parse_inputs
    from manyhands.runtime.shelf import measure as measure_disk

    shapes = parse_inputs(input or default_input(model))
    with busy(as_json) as status:
        speed = None
        if disk is not None:
            status.update("measuring the disk ...")
            speed = measure_disk(disk)
        rows = []
        for size in sizes:
            status.update(f"measuring stages with batch {size} ...")
            rows.append(surveying.survey(model, shapes, int(size), speed))
    found = tuple(rows)
    text = json.dumps(surveying.to_json(found))
    print(text) if as_json else show(surveying.view(model, shapes, found, speed))


@app.command()
def verify(
    model: Model,
    input: Input = None,
    batch: BatchSize = 4,
    cluster: ClusterFile = None,
    devices: Devices = None,
    strategy: Strategy = "auto",
    shares: Shares = None,
    fuse: Fuse = None,
    wire: Wire = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan written with `plan --save`.")] = None,
    as_json: Json = False,
) -> None:
    """Prove that a plan trains like one device: three steps both ways, in float64, on real processes."""
    from dataclasses import asdict, replace

    from manyhands.proving import prove
    from manyhands.requests import Request

    default = 2 if cluster is None and devices is None else devices
    wishes = model, input, batch, cluster, default, strategy, shares, fuse
    request = Request.read(*wishes, precision="float64", wire=wire)
    chosen = request.load_plan(plan) if plan is not None else request.plan_for_all()
    chosen = replace(chosen, wire=wire or chosen.wire)
    difference = prove(request, chosen, quiet=as_json)
    if as_json:
        print(json.dumps(asdict(difference) | {"exact": difference.exact}))
    raise typer.Exit(0 if difference.exact else 1)


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="Job file (TOML); docs/training.md has all keys.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    name: DeviceName = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show what will be used, and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress; only the result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as lines of JSON.")] = False,
) -> None:
    """Train a model as a job file says, on several devices, exactly as on one."""
    from manyhands.training.jobs import describe_job, load_job

    read = load_job(job)
    if print_config:
        print(read.model_dump_json(indent=1) if as_json else describe_job(read))
        return
    from manyhands.training.showing import train_and_show

    train_and_show(read, name, resume=resume, quiet=quiet, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def emulate(
    context: typer.Context,
    cluster: Annotated[
        Path, typer.Argument(help="Cluster file: devices with a board, or gflops and memory.")
    ],
    dilate: Annotated[
        float | None,
        typer.Option("--dilate", min=0.001, help="Devices and links so much faster; else as fast as can be."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain local processes: no limits, no root, nothing emulated.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a command on every device of an emulated cluster: emulate CLUSTER.toml -- manyhands train JOB.toml.

    Every device is a network namespace with a wire of limited rate, and a control group with its part of a
    core and its memory (Linux, root). The command finds the cluster in MANYHANDS_CLUSTER, its own name in
    MANYHANDS_AS. All is taken down in the end.
    """
    if not context.args:
        raise RequestError("what is to run? For example: emulate CLUSTER.toml -- manyhands train JOB.toml")
    if dilate is not None and not dilate < float("inf"):
        raise RequestError(f"--dilate {dilate}: a number, please.")
    from dataclasses import asdict

    from manyhands import emulating
    from manyhands.reporting.emulated import console, emulated_view

    if plain:
        if as_json:
            raise RequestError("--plain has nothing to tell as JSON; ask the command for it.")
        print("not emulated: plain local processes without limits", file=sys.stderr)
        raise typer.Exit(emulating.run_plain(cluster, context.args))
    result = emulating.run(cluster, context.args, dilate, console(sys.stderr if as_json else sys.stdout))
    print(json.dumps(asdict(result)), flush=True) if as_json else show(emulated_view(result))
    if result.failure:
        raise RunError(f"{result.failure}.")
    raise typer.Exit(emulating.exit_code(result.devices))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A script that calls manyhands.join(); then its arguments.")],
    devices: Annotated[int, typer.Option("--devices", min=1, help="Local processes.")] = 2,
) -> None:
    """Run your own training script on several local devices (by torchrun)."""
    if not script.is_file():
        raise RequestError(f"there is no file {script}.")
    import os

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    os.execv(command[0], [*command, str(script), *context.args])


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A model as `manyhands train` saved it (safetensors).")],
    onnx: Annotated[Path, typer.Option("--onnx", help="Where to write the ONNX file.")],
    as_json: Json = False,
) -> None:
    """Write a trained model as ONNX, and check that onnxruntime computes the same with it."""
    from dataclasses import asdict

    from manyhands.exporting import export_onnx

    facts = export_onnx(model, onnx)
    print(json.dumps(asdict(facts), default=str) if as_json else facts)


if __name__ == "__main__":
    main()
