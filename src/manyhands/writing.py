"""What was measured, written into the user's cluster file: comments and order stay as they are."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from manyhands.errors import RequestError
from manyhands.ir.cluster import Link
from manyhands.ir.survey import Survey

Tables = MutableMapping[str, Any]


def byte_text(num_bytes: float) -> str:
    """`940MB`, whole and never more than it is."""
    return f"{int(num_bytes // 1_000_000)}MB"


def byte_rate_text(bytes_per_s: float) -> str:
    """`1.53GB/s`."""
    return f"{_scaled(bytes_per_s)}B/s"


def bit_rate_text(bytes_per_s: float) -> str:
    """`94.1Mbit`."""
    return f"{_scaled(8 * bytes_per_s)}bit"


def seconds_text(seconds: float) -> str:
    """`0.25ms`, or `40us` where that is shorter."""
    return f"{_digits(seconds * 1e6)}us" if seconds < 1e-4 else f"{_digits(seconds * 1e3)}ms"


def _scaled(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{_digits(value / size)}{unit}"
    return f"{_digits(value / 1e3)}K"


def _digits(value: float) -> str:
    """Three digits that count, written without an exponent."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{decimals}f}" if value >= 1 else f"{value:.3g}" if value >= 1e-4 else "0.0001"
    return text.rstrip("0").rstrip(".") if "." in text else text


def require_writable(path: Path) -> None:
    """Refuse beforehand what could not be written afterwards, when minutes have gone into measuring."""
    target = path.resolve()
    if not os.access(target, os.W_OK) or not os.access(target.parent, os.W_OK):
        raise RequestError(
            f"{path} cannot be written, and what is measured goes there. "
            "Give yourself the right to write the file and its folder."
        )


def write_survey(path: Path, survey: Survey) -> None:
    """Put the measured values into the file; a reader sees the old file or the new one, never half of it."""
    try:
        text = survey_text(path.read_text(), survey)
        _replace(path.resolve(), text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{path} cannot be written: {reason}.") from None
    except TOMLKitError as error:
        raise RequestError(f"{path} is not TOML any more: {error}") from None


def survey_text(text: str, survey: Survey) -> str:
    """A cluster file with the values of a survey in it.

    Memory is written only where the user said nothing, because it is a limit and theirs to set.
    """
    document = tomlkit.parse(text)
    tables = {table["name"]: table for table in document["device"]}  # type: ignore[union-attr]
    for facts in survey.devices:
        if facts.device not in tables:
            raise RequestError(f"{facts.device} was measured, but is not in the cluster file any more.")
        table = tables[facts.device]
        _set(table, "gflops", float(_digits(facts.convolution_flops_per_s / 1e9)))
        _set(table, "memory_bandwidth", byte_rate_text(facts.memory_bytes_per_s))
        _set(table, "launch", seconds_text(facts.launch_s))
        _set(table, "bare", byte_text(facts.bare_bytes + 999_999))
        if "memory" not in table:
            _set(table, "memory", byte_text(facts.usable_bytes))
    if survey.links:
        _write_network(document, survey)
        if any("address" in table for table in tables.values()):  # processes of one machine differ by chance
            _write_links(document, survey)
    return tomlkit.dumps(document)


def _write_network(document: Tables, survey: Survey) -> None:
    if "network" not in document:
        document["network"] = tomlkit.table()
    network = document["network"]
    _set(network, "bandwidth", bit_rate_text(survey.bytes_per_s))
    _set(network, "latency", seconds_text(survey.latency_s))
    if survey.together is not None and survey.together.shared:
        _set(network, "shared", bit_rate_text(survey.together.bytes_per_s))
    elif "shared" in network:
        del network["shared"]


def _write_links(document: Tables, survey: Survey) -> None:
    """Tables of links that differ; those that are in the file already are brought up to date."""
    there = {(table["source"], table["target"]): table for table in document.get("link", [])}
    for link in survey.links:
        if (link.source, link.target) in there:
            _set_link(there[link.source, link.target], link)
        elif link in survey.differing:
            if "link" not in document:
                document["link"] = tomlkit.aot()
            table = tomlkit.table()
            table["source"], table["target"] = link.source, link.target
            _set_link(table, link)
            document["link"].append(table)


def _set_link(table: Tables, link: Link) -> None:
    _set(table, "bandwidth", bit_rate_text(link.bytes_per_s))
    _set(table, "latency", seconds_text(link.latency_s))


def _set(table: Tables, key: str, value: str | float) -> None:
    """A value where it is already, its comment kept, or a new line below the others of its table."""
    if key in table or not isinstance(table, Table):
        table[key] = value
        return
    body, tail = table.value.body, []
    while body and body[-1][0] is None:  # what ends a table, lines and comments, belongs to the next one
        tail.append(body.pop())
    table[key] = value
    body.extend(reversed(tail))


def _replace(path: Path, text: str) -> None:
    """The file's new content, all at once, with the rights it had."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
