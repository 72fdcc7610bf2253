"""What a user names, found and checked: models, input sizes, cluster files, plans."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manyhands import models
from manyhands.emulation.boards import BOARDS, Board
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, Device, Link, cores_here, local_cluster
from manyhands.ir.codec import decode
from manyhands.ir.plan import Plan
from manyhands.ir.profile import BARE_BYTES

if TYPE_CHECKING:
    from torch import nn


def nearest(word: str, words: list[str] | tuple[str, ...]) -> str:
    """` Did you mean ...?` where one of the words is near, else nothing."""
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def load_model(reference: str, *, seed: int = 0, num_classes: int | None = None) -> nn.Module:
    """A model from the zoo by name, or what `file.py:function` returns; weights drawn from the seed.

    `num_classes` is for models of the zoo; one's own function knows its own.
    """
    import torch

    torch.manual_seed(seed)
    if ":" not in reference:
        if reference not in models.names():
            raise _no_model(reference)
        try:
            return models.build(reference, num_classes)
        except ValueError as error:
            raise RequestError(str(error)) from None
    function = load_function(reference)
    try:
        model = function()
    except Exception as error:
        raise RequestError(f"{reference} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise RequestError(f"{reference} returned {type(model).__name__}, not an nn.Module.")
    return model


def load_function(reference: str) -> Any:
    """The function that `file.py:function` names."""
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise RequestError(f"{file} is not a file; a model is a zoo name or file.py:function.")
    spec = importlib.util.spec_from_file_location(f"manyhands_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RequestError(f"{file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RequestError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        names = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        raise RequestError(f"{file} has no function {name!r}.{nearest(name, names)}")
    return getattr(module, name)


def default_input(reference: str) -> str:
    """The input size the zoo gives a model; for one's own model it has to be said."""
    if reference in models.ZOO:
        return "x".join(str(size) for size in models.ZOO[reference].input_shape)
    if ":" in reference:
        raise RequestError("say what one image looks like: --input 3x224x224.")
    raise _no_model(reference)


def _no_model(reference: str) -> RequestError:
    if reference.endswith(".py"):
        return RequestError(f"say which function of {reference} returns the model: {reference}:build.")
    hint = nearest(reference, models.names())
    return RequestError(f"no model is called {reference!r}.{hint} `manyhands models` lists them.")


def parse_inputs(text: str) -> tuple[tuple[int, ...], ...]:
    """`3x224x224` as sizes without the batch; several inputs are separated by commas."""
    shapes = []
    for part in text.split(","):
        if not re.fullmatch(r"\d+(x\d+)*", part.strip()) or "0" in part.strip().split("x"):
            raise RequestError(
                f"{part.strip()!r} is not an input size. Write channels x rows x columns: 3x224x224."
            )
        shapes.append(tuple(int(size) for size in part.strip().split("x")))
    return tuple(shapes)


GFLOPS = 4.0  # of a device of which nothing is known
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(text: str) -> int:
    """`900MB` or `2GiB` as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B\s*", text.upper())
    if not match:
        raise RequestError(f"{text!r} is not an amount of memory. Write 900MB or 2GiB.")
    return int(float(match[1]) * _BYTES[match[2] or ""])


def parse_rate(text: str) -> float:
    """`100Mbit` as bytes a second."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])?BIT(?:/S)?\s*", text.upper())
    if not match:
        raise RequestError(f"{text!r} is not a bandwidth. Write 100Mbit or 1Gbit.")
    return float(match[1]) * _BYTES[match[2] or ""] / 8


def parse_byte_rate(text: str) -> float:
    """`1.5GB/s` as bytes a second."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B/S\s*", text.upper())
    if not match:
        raise RequestError(f"{text!r} is not a rate of memory. Write 1.5GB/s.")
    return float(match[1]) * _BYTES[match[2] or ""]


def parse_seconds(text: str) -> float:
    """`0.5ms` as seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", text)
    if not match:
        raise RequestError(f"{text!r} is not a time. Write 0.5ms.")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DeviceTable(_Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    address: str | None = None
    memory: str | None = None
    board: str | None = None  # one of those that can be emulated: has speed and memory, where not said
    gflops: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_bandwidth: str = "2GB/s"
    launch: str = "50us"
    bare: str = f"{BARE_BYTES // 10**6}MB"

    @property
    def as_device(self) -> Device:
        board = _board(self.board)
        gflops = self.gflops or (board.gflops if board else GFLOPS)
        return Device(
            self.name,
            self.address,
            parse_bytes(self.memory) if self.memory else board.memory_bytes if board else None,
            gflops * 1e9,
            _above_zero("memory_bandwidth", self.memory_bandwidth, parse_byte_rate(self.memory_bandwidth)),
            parse_seconds(self.launch),
            int(_above_zero("bare", self.bare, parse_bytes(self.bare))),
        )


def _board(name: str | None) -> Board | None:
    if name is None or name in BOARDS:
        return None if name is None else BOARDS[name]
    known = ", ".join(BOARDS)
    raise RequestError(f"there is no board {name!r}.{nearest(name, list(BOARDS))} There are {known}.")


class _RateTable(_Strict):
    bandwidth: str = "100Mbit"
    latency: str = "0.5ms"


class NetworkTable(_RateTable):
    shared: str | None = None  # what all devices together can send, where they share a medium
    port: int | None = Field(default=None, ge=1, le=65535)  # where devices of several machines meet


class LinkTable(_RateTable):
    source: str
    target: str


class ClusterFile(_Strict):
    """A cluster file, as written by hand or by a measurement."""

    device: list[DeviceTable] = Field(min_length=1)
    network: NetworkTable = NetworkTable()
    link: list[LinkTable] = []


def load_cluster(path: Path | None, num_devices: int | None) -> Cluster:
    """The cluster of a file, or that many local processes."""
    if path is None:
        if num_devices is not None and num_devices < 1:
            raise RequestError(f"--devices {num_devices}: there must be at least one.")
        return local_cluster(num_devices or 1)
    tables = _validated(path)
    names = [device.name for device in tables.device]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"{path}: two devices are named {twice[0]!r}.")
    for link in tables.link:
        for end in (link.source, link.target):
            if end not in names:
                raise RequestError(f"{path}: a link names {end!r}, which is no device.{nearest(end, names)}")
    return Cluster(
        tuple(table.as_device for table in tables.device),
        _above_zero("bandwidth", tables.network.bandwidth, parse_rate(tables.network.bandwidth)),
        parse_seconds(tables.network.latency),
        tuple(
            Link(
                k.source,
                k.target,
                _above_zero("bandwidth", k.bandwidth, parse_rate(k.bandwidth)),
                parse_seconds(k.latency),
            )
            for k in tables.link
        ),
        tables.network.port,
        _above_zero("shared", shared, parse_rate(shared)) if (shared := tables.network.shared) else None,
        None if any(device.address for device in tables.device) else cores_here(),
    )


def _above_zero(key: str, text: str, rate: float) -> float:
    if rate <= 0:
        raise RequestError(f"{key} = {text!r}: there must be some.")
    return rate


def devices_here(cluster: Cluster, name: str | None) -> tuple[str, ...] | None:
    """Which devices a command starts on this machine: the one that --as names, or None: all of them."""
    remote = [device for device in cluster.devices if device.address is not None]
    if name is None:
        if remote:
            raise RequestError(
                f"{remote[0].name} has the address {remote[0].address}: say which device this is with "
                f"--as NAME, and start the same command on the others ({', '.join(cluster.names)})."
            )
        return None
    if name not in cluster.names:
        raise RequestError(f"--as {name}: no such device. There are {', '.join(cluster.names)}.")
    if len(remote) != len(cluster.devices):
        missing = next(device.name for device in cluster.devices if device.address is None)
        raise RequestError(
            f"{missing} has no address in the cluster file; with --as, every device needs one."
        )
    return (name,)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file that a person wrote."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise RequestError(f"there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{path} is not TOML: {error}") from None


def _validated(path: Path) -> ClusterFile:
    try:
        return ClusterFile.model_validate(read_toml(path))
    except ValidationError as error:
        raise RequestError(f"{path}: {_first_problem(error)}") from None


_FIELDS = {
    "device": list(DeviceTable.model_fields),
    "network": list(NetworkTable.model_fields),
    "link": list(LinkTable.model_fields),
}


def _first_problem(error: ValidationError) -> str:
    """The first thing wrong, with the place and, for a misspelt key, the nearest right one."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"]]
    where = ".".join(place)
    if problem["type"] != "extra_forbidden":
        return f"{where}: {problem['msg'].lower()}."
    words = _FIELDS[place[0]] if len(place) > 1 else list(ClusterFile.model_fields)
    return f"there is no key {where!r}.{nearest(place[-1], words) or ' There are ' + ', '.join(words) + '.'}"


def load_plan(path: Path) -> Plan:
    """A plan as `manyhands plan --save` wrote it."""
    try:
        return decode(Plan, json.loads(path.read_text()))
    except FileNotFoundError:
        raise RequestError(f"there is no file {path}.") from None
    except (ValueError, OSError) as error:
        raise RequestError(f"{path} is not a plan: {error}") from None
