"""How a run goes, for people and for scripts: a progress bar, lines of JSON, TensorBoard."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from manyhands.errors import RequestError
from manyhands.reporting.text import amount
from manyhands.runtime.ranks import Event


class Recorder:
    """Takes the events of a run. Metrics always go to a file; the rest as asked for."""

    def __init__(
        self,
        folder: Path,
        limits: dict[str, int | None],
        *,
        quiet: bool = False,
        as_json: bool = False,
        console: Console | None = None,
    ) -> None:
        self.folder, self.limits, self.quiet, self.as_json = folder, limits, quiet, as_json
        self.console = console or Console()
        self.devices: dict[str, dict[str, int]] = {}
        self.measured: dict[str, Any] | None = None
        self.last: dict[str, Any] = {}
        self.damaged: dict[str, dict[str, str]] = {}
        self.metrics: dict[str, Any] = {}
        self.begun = time.monotonic()

    def __enter__(self) -> Recorder:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file: IO[str] = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{self.folder} cannot be written: {error.strerror}.") from None
        self.board = _tensorboard(self.folder)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        shown = not self.quiet and not self.as_json
        self.bar = Progress(
            *columns, TextColumn("{task.fields[facts]}"), console=self.console, disable=not shown
        )
        self.bar.start()
        self.task = self.bar.add_task("starting", total=None, facts="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()
        self.file.close()
        if self.board is not None:
            self.board.close()

    def event(self, device: str, event: Event) -> None:
        match event["event"]:
            case "waiting":
                self.bar.update(self.task, description=f"waiting for {', '.join(event['missing'])}")
                self._say(event)
            case "start":
                self.bar.update(
                    self.task, description="training", total=event["num_steps"], completed=event["step"]
                )
                self._write(event)
            case "step":
                self._step(event)
            case "evaluated":
                self.metrics = {"metric": event["metric"], "value": event["value"]}
                said = f"{event['metric']} {event['value']:.4f} on {event['images']} {event['of']}"
                self._print(f"step {event['step']}: {said}")
                self._write(event)
                self._chart(event["metric"], event["value"], event["step"])
            case "saved":
                self.last["checkpoint"] = event["path"]
                self._write(event)
            case "damaged":
                self._damaged(device, event["files"])
            case "finished":
                self.devices, self.measured = event["devices"], event["measured"]
                self._write(event)

    def _step(self, event: Event) -> None:
        self.devices = event.get("devices", self.devices)
        self.last |= {key: event[key] for key in ("step", "loss", "images_per_s")}
        loss = "" if event["loss"] is None else f"loss {event['loss']:.4f}  "
        sent = sum(facts["sent_bytes"] for facts in self.devices.values())
        text = f"{loss}{event['images_per_s']:.1f} images/s  {amount(sent)} sent  {self._memory()}"
        self.bar.update(self.task, completed=event["step"], facts=text)
        self._write(event)
        if event["loss"] is not None:
            self._chart("loss", event["loss"], event["step"])
        self._chart("lr", event["lr"], event["step"])

    def _memory(self) -> str:
        """Peak memory of each device, against its limit where it has one."""
        peaks = []
        for name, facts in self.devices.items():
            limit = self.limits.get(name)
            of = f"/{amount(limit)}" if limit else ""
            mark = "!" if limit and facts["peak_bytes"] > limit else ""
            peaks.append(f"{amount(facts['peak_bytes'])}{of}{mark}")
        return "peak " + " ".join(peaks) if peaks else ""

    def _damaged(self, device: str, files: dict[str, str]) -> None:
        known = self.damaged.setdefault(device, {})
        others = {name for d, found in self.damaged.items() if d != device for name in found}
        for name, reason in files.items():
            if name not in known and name not in others:
                self._print(f"skipped {name}: {reason}")
                self._write({"event": "damaged", "file": name, "reason": reason})
        known |= files

    def _write(self, event: Event) -> None:
        line = json.dumps(event | {"seconds_since_start": round(time.monotonic() - self.begun, 3)})
        with suppress(OSError):  # a full disk must not end a run that can go on
            self.file.write(line + "\n")
            self.file.flush()
        self._say(event)

    def _say(self, event: Event) -> None:
        if self.as_json:
            print(json.dumps(event), flush=True)

    def _print(self, text: str) -> None:
        if not self.quiet and not self.as_json:
            self.bar.console.print(text, highlight=False, markup=False)

    def _chart(self, name: str, value: float, step: int) -> None:
        if self.board is not None:
            self.board.add_scalar(name, value, step)

    def summary(self) -> dict[str, Any]:
        """What came out, in the end."""
        over = [
            name
            for name, facts in self.devices.items()
            if (limit := self.limits.get(name)) and facts["peak_bytes"] > limit
        ]
        seconds = round(time.monotonic() - self.begun, 1)
        damaged = {name: reason for found in self.damaged.values() for name, reason in found.items()}
        facts = {"seconds": seconds, "devices": self.devices, "over_memory": over, "damaged": damaged}
        return self.last | self.metrics | facts | {"measured": self.measured}


def _tensorboard(folder: Path) -> Any:
    """A writer of TensorBoard files where it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
