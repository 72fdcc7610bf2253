"""A trained model for other programs: from a safetensors file to ONNX, with the same outputs."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.errors import RequestError, RunError
from manyhands.loading import default_input, load_model, parse_inputs
from manyhands.reporting.text import amount
from manyhands.training.tensorfiles import (
    ModelFile,
    describe,
    first_difference,
    hidden_folder,
    load_model_file,
    reason,
    sync,
)

TOLERANCE = 1e-4  # of the largest output; rounding alone stays a hundred times below
MAX_BYTES = 2**31 - 2**20  # protobuf refuses 2 GiB in one piece
_EXAMPLE_BATCH = 2  # torch.export takes a batch of 1 for a constant
_CHECKED_BATCHES = (1, 3)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: any batch of these inputs gives these outputs, as the model itself does."""

    model: str
    target: str
    num_bytes: int
    inputs: dict[str, str]  # name and one image: input -> 3x32x32
    outputs: tuple[str, ...]
    opset: int
    checked_batches: tuple[int, ...]  # none where onnxruntime is not installed
    largest_difference: float | None  # from the model's own outputs, as a part of the largest of them

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} Nx{shape}" for name, shape in self.inputs.items())
        checked = (
            f"onnxruntime agrees to {self.largest_difference:.1e}"
            if self.largest_difference is not None
            else "not checked: onnxruntime is not installed"
        )
        written = f"{self.target}: {self.model}, {amount(self.num_bytes)}, opset {self.opset}"
        return f"{written}; {shapes} -> {', '.join(self.outputs)}; {checked}."


def export_onnx(model_file: Path, target: Path) -> Exported:
    """The facts of a new ONNX file: the model that the metadata names, with the file's weights, in float32.

    The batch may be of any size; images are of the size in the metadata. Where onnxruntime is installed, it
    runs the file before it gets its name, and outputs that differ by more than rounding are a RunError.
    """
    _require_packages()
    if target.resolve() == model_file.resolve():
        raise RequestError(f"{target} is the model itself and would be overwritten. Name another file.")
    stored = load_model_file(model_file)
    reference = _said(stored, "model")
    shapes = parse_inputs(stored.metadata.get("input") or default_input(reference))
    model = _trained(stored, reference)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with hidden_folder(target.parent / f".writing-{target.name}") as hidden:
            facts = _write(model, reference, shapes, stored.metadata, hidden / target.name, target)
            sync(hidden / target.name)
            os.replace(hidden / target.name, target)
        sync(target.parent)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {reason(error)}.") from None
    return facts


def _require_packages() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"to export, {' and '.join(missing)} has to be installed: pip install manyhands[onnx]"
        )


def _said(stored: ModelFile, key: str) -> str:
    if key not in stored.metadata:
        raise RequestError(
            f"{stored.path} does not say which model it is of: its metadata has no {key!r}. "
            "Export a file that `manyhands train` saved."
        )
    return stored.metadata[key]


def _trained(stored: ModelFile, reference: str) -> nn.Module:
    """The model with the weights of the file, ready to infer."""
    num_classes = stored.metadata.get("num_classes")
    if num_classes is not None and not num_classes.isdecimal():
        raise RequestError(f"{stored.path}: num_classes is {num_classes!r}, which is no number.")
    model = load_model(reference, num_classes=None if num_classes is None else int(num_classes)).float()
    weights = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in stored.tensors.items()
    }
    if difference := first_difference(describe(model.state_dict()), describe(weights)):
        raise RequestError(f"{stored.path} is not of {reference}: {difference}. Was the model changed since?")
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    if num_bytes > MAX_BYTES:
        raise RequestError(
            f"{reference} has {amount(num_bytes)} of weights, an ONNX file holds {amount(MAX_BYTES)}."
        )
    model.load_state_dict(weights)
    return model.eval()


def _write(
    model: nn.Module,
    reference: str,
    shapes: tuple[tuple[int, ...], ...],
    metadata: dict[str, str],
    path: Path,
    target: Path,
) -> Exported:
    example = _images(shapes, _EXAMPLE_BATCH)
    inputs = _numbered("input", len(example))
    outputs = _numbered("output", len(_run(model, reference, example)))
    program = _exported(model, reference, example, inputs, outputs)
    program.model.metadata_props.update(metadata)
    program.save(str(path), external_data=False)
    difference = _largest_difference(model, reference, shapes, path)
    if difference is not None and not difference <= TOLERANCE:  # not a number is no agreement either
        raise RunError(
            f"{target} is not written: in onnxruntime, outputs of {reference} differ by {difference:.1e}, "
            f"limit {TOLERANCE:.0e}."
        )
    return Exported(
        reference,
        str(target),
        path.stat().st_size,
        {name: "x".join(map(str, shape)) for name, shape in zip(inputs, shapes, strict=True)},
        outputs,
        program.model.opset_imports[""],
        () if difference is None else _CHECKED_BATCHES,
        difference,
    )


def _exported(
    model: nn.Module,
    reference: str,
    example: tuple[torch.Tensor, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Any:
    batch = torch.export.Dim("batch")
    try:
        with _quietly():
            program: Any = torch.onnx.export(
                model,
                example,
                dynamo=True,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
                dynamic_shapes=tuple({0: batch} for _ in example),
            )
    except Exception as error:  # the exporter runs the user's model, which may raise anything
        cause = error.__cause__ or error
        line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "no reason given")
        raise RequestError(f"{reference} cannot be exported: {type(cause).__name__}: {line}") from error
    if any(isinstance(tensor.shape[0], int) for tensor in program.model.graph.inputs):
        raise RequestError(
            f"{reference} cannot be exported: it takes a batch of {_EXAMPLE_BATCH} for a constant. "
            "Look for a fixed size in its forward; flatten(1) and reshape(len(x), ...) take any batch."
        )
    return program


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter tells at length, in four ways, what it tried; what matters is what it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _largest_difference(
    model: nn.Module, reference: str, shapes: tuple[tuple[int, ...], ...], path: Path
) -> float | None:
    """How far onnxruntime is from the model, as a part of the largest output; None without onnxruntime."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    differences = []
    for batch in _CHECKED_BATCHES:
        images = _images(shapes, batch)
        for ours, theirs in zip(_run(model, reference, images), _run_onnx(path, images), strict=True):
            if ours.shape != theirs.shape:
                raise RunError(f"in onnxruntime, an output of {reference} is of shape {tuple(theirs.shape)}.")
            scale = ours.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            differences.append(((ours - theirs).abs().max() / scale).item())
    return float(torch.tensor(differences).max())  # unlike Python's max, it does not lose a NaN


def _run_onnx(path: Path, images: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    try:
        runtime = importlib.import_module("onnxruntime")
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [tensor.name for tensor in session.get_inputs()]
        found = session.run(None, {n: image.numpy() for n, image in zip(names, images, strict=True)})
    except Exception as error:  # its exceptions have no common base but this
        raise RunError(f"onnxruntime cannot run the exported model: {str(error).splitlines()[0]}") from error
    return tuple(torch.from_numpy(array) for array in found)


def _images(shapes: tuple[tuple[int, ...], ...], batch: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    return tuple(torch.randn(batch, *shape, generator=generator) for shape in shapes)


def _run(model: nn.Module, reference: str, images: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    try:
        with torch.no_grad():
            result = model(*images)
    except Exception as error:
        sizes = ", ".join("x".join(map(str, image.shape)) for image in images)
        raise RequestError(f"{reference} failed on {sizes}: {type(error).__name__}: {error}") from error
    outputs = (result,) if isinstance(result, torch.Tensor) else result
    if not isinstance(outputs, tuple | list) or not all(isinstance(out, torch.Tensor) for out in outputs):
        raise RequestError(f"{reference} returns {type(result).__name__}; export tensors, one or a tuple.")
    return tuple(outputs)


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return (word,) if count == 1 else tuple(f"{word}_{index}" for index in range(count))
