"""The same training step by `auto` and by what else there is, on four emulated devices."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

import manyhands
from manyhands.benches.emulated import (
    AUTO,
    SAID,
    Choose,
    Conditions,
    Lap,
    Setting,
    Tell,
    Verdict,
    all_reached,
    auto,
    between,
    check_settings,
    cluster,
    core_speed,
    laps,
    tell_at,
    verdicts_to_json,
)
from manyhands.emulation.devices import emulated
from manyhands.errors import RequestError, RunError
from manyhands.ir.cluster import cores_here
from manyhands.ir.codec import decode, encode
from manyhands.loading import load_model
from manyhands.peers import ALONE, DISTCONV, ONE, PEERS, Arena, one_device
from manyhands.profiling.device import Work
from manyhands.racing import RaceJob, race

DEVICES = 4
# A device is so fast that alone, by torch, it takes 3.5 s for a step of ResNet-18 (VGG16-BN: about 40 s).
# That is called 25 GFLOP/s, for the step has about as many operations.
YARDSTICK, ALONE_S, GFLOPS = "resnet18", 3.5, 25.0
RATES = (1000.0, 100.0, 25.0)  # Mbit/s
MODELS = {
    "vgg16-bn": ((3, 224, 224), 8),
    "resnet18": ((3, 224, 224), 8),
    "yolov2": ((3, 416, 416), 4),
    "unet": ((3, 256, 256), 1),
    "mobilenetv2": ((3, 224, 224), 8),
}
CALIBRATING = 5  # steps of one device
QUICK = (("resnet18", 100.0), ("vgg16-bn", 100.0))
ALIKE = 1.3  # times as fast as each other, at most, are cores that cells of one table are measured on
NOISE = 0.97  # of the fastest exact peer's speed
DDP = "DistributedDataParallel"
REQUIRED = {("vgg16-bn", 100.0): {DDP: 4.0, ONE: 2.0}, ("resnet18", 100.0): {DDP: 3.0, ONE: 1.5}}


@dataclass(frozen=True, slots=True)
class Cell:
    """One model at one rate: seconds of a step of every contestant, and which peers are exact."""

    model: str
    mbit: float
    laps: tuple[Lap, ...]
    exact: tuple[str, ...]
    absent: tuple[str, ...] = ()  # peers that cannot share this model among so many
    conditions: Conditions | None = None
    broke: str = ""  # why there was no race

    def seconds(self, name: str) -> float | None:
        return next((lap.seconds for lap in self.laps if lap.name == name), None)

    def faster(self, name: str) -> float | None:
        """How many times as fast as this peer `auto` is."""
        ours = self.seconds(AUTO)
        peer = next((lap for lap in self.laps if lap.name == name), None)
        return None if ours is None or peer is None else peer.seconds / (peer.beside_s or ours)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of everything that is required here."""
        exact = [times for name in self.exact if (times := self.faster(name)) is not None]
        what, broke = "times as fast as the fastest exact peer", bool(self.broke)
        fastest = Verdict(what, NOISE, min(exact, default=None), broke)
        required = REQUIRED.get((self.model, self.mbit), {})
        failed = [name for name, _ in self.conditions.refused] if self.conditions else []
        return fastest, *(
            Verdict(f"times as fast as {name}", times, self.faster(name), broke or name in failed)
            for name, times in required.items()
        )

    @property
    def within(self) -> bool | None:
        """Is all that is required reached?"""
        return all_reached(self.verdicts)


def run(
    only: tuple[str, ...],
    rates: tuple[float, ...],
    peers: tuple[str, ...],
    dilation: float | None,
    rounds: int,
    keep: Path | None,
    tell: Tell,
    wire: str | None = None,
) -> tuple[Cell, ...]:
    """The cells asked for, one after another; what `keep` has already is not raced again."""
    if unknown := [name for name in only if name not in MODELS]:
        raise RequestError(f"{unknown[0]} is not one of {', '.join(MODELS)}.")
    sources = tuple(name for name in peers if name not in PEERS and Path(name).is_dir())
    peers = tuple(DISTCONV if name in sources else name for name in peers)
    for source in sources:
        if not (Path(source) / "distconv" / "__init__.py").is_file():
            raise RequestError(f"{source}: there is no folder distconv with DistConv's source in it.")
    if unknown := [name for name in peers if name not in PEERS]:
        others = ", ".join(name for name in PEERS if name != DISTCONV)
        raise RequestError(f"{unknown[0]} is not one of {others}, nor a folder with DistConv's source.")
    if DISTCONV in peers and not sources:
        raise RequestError(f"{DISTCONV}: name the folder of its source instead.")
    wished = peers or tuple(name for name in PEERS if name != DISTCONV)
    peers = tuple(dict.fromkeys((*ALONE, *wished)))
    wanted = [(m, r) for m in only or MODELS for r in rates or RATES] if only or rates else list(QUICK)
    if wire not in (None, "bfloat16"):
        raise RequestError(f"wire = {wire!r}: there is only bfloat16.")
    if keep is not None:
        _make_folder(keep)
    core = part_speed(core_speed(tell, yardstick), dilation, tell)
    paths = tuple(str(Path(source).resolve()) for source in sources)
    kinds = conditions_of(str((GFLOPS, dilation, rounds, peers, paths, wire)))
    files = {} if keep is None else {(m, r): keep / f"{m}-{r:g}-{kinds}.json" for m, r in wanted}
    cells = {case: _kept(file, core) for case, file in files.items() if file.is_file()}
    missing = {case: _setting(*case) for case in wanted if case not in cells}
    check_settings(missing.values(), core, dilation)
    ours: dict[str, Choose] = {AUTO: auto}
    if wire is not None:
        ours[f"{AUTO}, {wire}"] = partial(auto, wire=wire)
    for number, ((model, mbit), setting) in enumerate(missing.items(), 1):
        telling = partial(tell_at, tell, f"{number} of {len(missing)}: {model} at {mbit:g} Mbit/s")
        try:
            cell = _cell(setting, mbit, core, ours, peers, paths, dilation, rounds, telling)
        except RunError as error:  # hours of others are not lost for it, and it is not kept
            cells[model, mbit] = Cell(model, mbit, (), (), broke=str(error))
            continue
        cells[model, mbit] = cell
        if files:
            part = files[model, mbit].with_suffix(".part")
            part.write_text(json.dumps(encode(cell)))
            part.replace(files[model, mbit])
    return tuple(cells[case] for case in wanted)


def yardstick() -> Work:
    """A step by torch alone that takes a device `ALONE_S`, and how many operations that is of its speed."""
    shape, batch = MODELS[YARDSTICK]
    step = one_device(Arena(partial(load_model, YARDSTICK), torch.randn(batch, *shape), 0, 1))
    assert step is not None
    return int(1e9 * GFLOPS * ALONE_S), step


def part_speed(core: float, dilation: float | None, tell: Tell) -> float:
    """Operations a second of a core for a device that has a part of it: less, as it begins anew, with cold
    caches, in every period of its quota. So that one device by torch really takes `ALONE_S`.
    """
    tell("how fast one device is that has its part of a core")
    shape, batch = MODELS[YARDSTICK]
    job = RaceJob(YARDSTICK, (shape,), batch, (), (ONE,), CALIBRATING)
    with emulated(_setting(YARDSTICK, max(RATES)).cluster, core, dilation) as emulation:
        took = median(race(emulation, job)[ONE].seconds)
        return core * ALONE_S / (took * emulation.dilation)


def conditions_of(asked: str) -> str:
    """What else cells depend on, in short: what was asked for, this program, torch, and how many cores."""
    digest = hashlib.sha256(repr((asked, torch.__version__, cores_here())).encode())
    root = Path(manyhands.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _kept(file: Path, core: float) -> Cell:
    """A cell of an earlier run, on a machine as fast as this."""
    try:
        cell = decode(Cell, json.loads(file.read_text()))
    except (OSError, ValueError, RequestError) as error:
        raise RequestError(f"{file} is not a cell that was kept ({error}): delete it.") from None
    was = cell.conditions.core_flops_per_s if cell.conditions else core
    if not was / ALIKE < core < was * ALIKE:
        raise RequestError(
            f"{file} was measured on cores of {was / 1e9:.0f} GFLOP/s, these have {core / 1e9:.0f}: "
            "delete it, or --keep another folder."
        )
    return cell


def _make_folder(folder: Path) -> None:
    """Before anything is timed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(f"--keep {folder}: {error.strerror}.") from None


def _setting(model: str, mbit: float) -> Setting:
    devices = cluster({f"pi-{i}": 1e9 * GFLOPS for i in range(DEVICES)}, mbit)
    return Setting(model, *MODELS[model], devices)


def _cell(
    setting: Setting,
    mbit: float,
    core: float,
    ours: dict[str, Choose],
    peers: tuple[str, ...],
    sources: tuple[str, ...],
    dilation: float | None,
    rounds: int,
    tell: Tell,
) -> Cell:
    with torch.device("meta"):
        built, images = load_model(setting.model), torch.empty((setting.batch, *setting.shape))
    possible = tuple(name for name in peers if PEERS[name].possible(built, images, DEVICES))
    found, _, conditions = laps(setting, core, dilation, ours, possible, rounds, tell, sources)
    exact = tuple(name for name in possible if PEERS[name].exact(built))
    absent = tuple(name for name in peers if name not in possible)
    return Cell(setting.model, mbit, found, exact, absent, conditions)


def to_json(cells: tuple[Cell, ...]) -> list[dict[str, Any]]:
    return [asdict(cell) | {"faster": _all_faster(cell)} | verdicts_to_json(cell.verdicts) for cell in cells]


def _all_faster(cell: Cell) -> dict[str, float | None]:
    return {lap.name: cell.faster(lap.name) for lap in cell.laps}


def bars(cells: tuple[Cell, ...]) -> dict[str, dict[str, float]]:
    """For a plot: how many times as fast `auto` is."""
    return {
        f"{cell.model}\n{cell.mbit:g} Mbit/s": {
            name if name in cell.exact else f"{name} (not exact)": times
            for name, times in _all_faster(cell).items()
            if times and name != AUTO
        }
        for cell in cells
    }


def _label(cell: Cell, lap: Lap) -> str:
    times = cell.faster(lap.name)
    if lap.name == AUTO or times is None:
        return ""
    return f" ({times:.2f}x{'' if lap.name in cell.exact else ', not exact'})"


def _between(lap: Lap) -> str:
    """Between which times its steps were, and what it is compared with where that is not told already."""
    beside = f" (auto beside it {between(lap.beside_each_s)})" if lap.beside_each_s else ""
    return f"{lap.name} {lap.spread}{beside}"


def table(cells: tuple[Cell, ...]) -> Table:
    names = list(dict.fromkeys(lap.name for cell in cells for lap in cell.laps))
    table = Table(title="Seconds of a step on four emulated devices; auto is so many times as fast")
    for heading in ("model", "Mbit/s", *names, "plan of auto", "verdict"):
        table.add_column(heading)
    for cell in cells:
        raced = {lap.name: f"{lap.seconds:.2f}{_label(cell, lap)}" for lap in cell.laps}
        plan = next((lap.plan for lap in cell.laps if lap.name == AUTO), "")
        texts = [raced.get(name, "") for name in names]
        table.add_row(cell.model, f"{cell.mbit:g}", *texts, plan, SAID[cell.within])
    told: list[str] = []
    for cell in cells:
        where = f"{cell.model} at {cell.mbit:g} Mbit/s"
        told.append(f"{where}: {'; '.join(map(str, cell.verdicts))}")
        told.append(f"{where}: {', '.join(_between(lap) for lap in cell.laps if lap.each_s)}")
        told += [f"{where}, a device of {lap.name}: {lap.spent}" for lap in cell.laps if lap.spent]
        if cell.absent:
            told.append(f"{where}: cannot be shared among {DEVICES} by {', '.join(cell.absent)}")
        if cell.broke:
            told.append(f"{where}: there was no race: {cell.broke}")
        if cell.conditions:
            told.append(f"{where}: {cell.conditions}")
    table.caption = "\n".join(told)
    return table
