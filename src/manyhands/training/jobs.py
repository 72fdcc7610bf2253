"""A job file: everything a training run is made from, checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from manyhands.errors import RequestError
from manyhands.loading import nearest, parse_bytes, read_toml
from manyhands.training.schedules import Schedule


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerTable(BaseModel):
    """A torch.optim optimiser by name, and its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "sgd"
    lr: float = Field(ge=0)


class AugmentTable(_Strict):
    """Random changes to training images, the same for every plan."""

    crop: int = Field(default=0, ge=0, description="shift by up to this many pixels")
    flip: bool = Field(default=False, description="mirror half of the images")
    colour: float = Field(default=0.0, ge=0, lt=1, description="brightness, contrast, saturation")
    mosaic: bool = Field(default=False, description="put four images with boxes together")
    resize: bool = Field(default=False, description="scale images of another size to the input's")
    mean: tuple[float, ...] | None = Field(default=None, description="none: what suits the data")
    std: tuple[float, ...] | None = None


class EvaluateTable(_Strict):
    """When to look how good the model is, and on what."""

    every: int | None = Field(default=None, ge=1, description="steps; none: at the end of every epoch")
    data: str | None = Field(default=None, description="none: the test part of `data`")
    images: int | None = Field(default=None, ge=1, description="only the first so many")
    target: float | None = Field(default=None, description="stop when the metric reaches this")
    threshold: float = Field(default=0.005, gt=0, lt=1, description="least score of a detection")


class CheckpointTable(_Strict):
    every: int | None = Field(default=None, ge=1, description="steps; none: at the end of every epoch")
    keep: int = Field(default=3, ge=1)


class Job(_Strict):
    """What `manyhands train` reads. Paths are relative to where the command is run."""

    model: str = Field(description="a zoo name or file.py:function")
    data: str = Field(description="cifar10:PATH, imagefolder:PATH, ..., or file.py:function")
    input: str | None = Field(default=None, description="one image; none: the zoo's")
    loss: str = Field(default="cross_entropy", description="or mse, bce, yolov2, file.py:function")
    optimizer: OptimizerTable = OptimizerTable(lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    schedule: Schedule = Schedule()
    batch: int = Field(default=32, ge=1)
    accumulate: int = Field(default=1, ge=1, description="batches a step")
    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    images: int | None = Field(default=None, ge=1, description="train on only the first so many")
    seed: int = Field(default=0, ge=0)
    shuffle: bool = True
    augment: AugmentTable = AugmentTable()
    damaged_limit: int = Field(default=10, ge=0, description="damaged images to skip before giving up")
    clip: float | None = Field(default=None, gt=0, description="largest norm of all gradients")
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    anchors: Literal["voc", "kmeans"] | tuple[tuple[float, float], ...] = "voc"
    init: str | None = Field(default=None, description="begin from these weights (safetensors)")
    cluster: str | None = None
    devices: int | None = Field(default=None, ge=1, description="local processes")
    memory: str | None = Field(default=None, description="limit of each device")
    strategy: str = "auto"
    wire: Literal["bfloat16"] | None = Field(default=None, description="what travels is rounded: not exact")
    feed: Literal["replicated", "source", "local"] = "replicated"
    evaluate: EvaluateTable | None = EvaluateTable()
    folder: str | None = Field(default=None, description="checkpoints and metrics; none: runs/NAME-OF-JOB")
    checkpoint: CheckpointTable = CheckpointTable()
    save: str | None = Field(default=None, description="the whole model; none: FOLDER/model.safetensors")

    @model_validator(mode="after")
    def _one_of_two(self) -> Job:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either steps or epochs, not both")
        if self.cluster is not None and self.devices is not None:
            raise ValueError("give either cluster or devices, not both")
        if self.memory is not None:
            parse_bytes(self.memory)
        return self


def load_job(path: Path) -> Job:
    """The job in a file, with all defaults filled in."""
    values = read_toml(path)
    values.setdefault("folder", f"runs/{path.stem}")
    values.setdefault("save", f"{values['folder']}/model.safetensors")
    if "steps" not in values and "epochs" not in values:
        values["epochs"] = 1
    if values.get("evaluate") is False:
        values["evaluate"] = None
    elif values.get("evaluate") is True:
        del values["evaluate"]
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        raise RequestError(f"{path}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    """The first thing wrong, with the place and, for a misspelt key, the nearest right one."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"]]
    where = ".".join(place)
    if problem["type"] == "extra_forbidden":
        words = list(_table(place[:-1]).model_fields)
        hint = nearest(place[-1], words) or f" There are {', '.join(words)}."
        return f"there is no key {where!r}.{hint}"
    if problem["type"] == "missing":
        return f"the key {where!r} is missing."
    message = problem["msg"].removeprefix("Value error, ")
    text = f"{message[:1].lower()}{message[1:].rstrip('.')}."
    return f"{where}: {text}" if where else text


def _table(place: list[str]) -> type[BaseModel]:
    """The schema of the table at this place."""
    tables: dict[str, type[BaseModel]] = {
        "augment": AugmentTable,
        "evaluate": EvaluateTable,
        "checkpoint": CheckpointTable,
        "schedule": Schedule,
        "optimizer": OptimizerTable,
    }
    return tables.get(place[0], Job) if place else Job


def describe_job(job: Job) -> str:
    """The job as a TOML file would say it, defaults included."""
    values = job.model_dump(exclude_none=True)
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
    lines += ["evaluate = false"] if job.evaluate is None else []
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:
            return str(value)
