"""What `fit` is asked for: refused in one line where it cannot be, before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.checkpointing.fitted import Fitted
from manyhands.errors import RequestError
from manyhands.loading import parse_bytes
from manyhands.runtime.process import forget_peak
from manyhands.runtime.recipes import is_altered


def asked_bytes(memory: Any) -> int:
    """A budget, from a number or from words."""
    if isinstance(memory, str):
        return parse_bytes(memory)
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < float("inf"):
        raise RequestError(f'memory is a number of bytes or a size such as "900MB", not {memory!r}.')
    return int(memory)


def asked_inputs(example: Any) -> tuple[Tensor, ...]:
    """One tensor, or one for each input."""
    inputs = (example,) if isinstance(example, Tensor) else tuple(example) if _is_list(example) else ()
    if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise RequestError("the example must be a tensor, or one for each input of the model.")
    if not all(tensor.numel() for tensor in inputs):
        raise RequestError("the example is empty: give as many images as a step will have.")
    if not all(tensor.is_contiguous() for tensor in inputs):
        raise RequestError("the example is not contiguous. Give example.contiguous(), and such images later.")
    return inputs


def _is_list(example: Any) -> bool:
    return isinstance(example, Sequence) and not isinstance(example, str)


def asked_directory(disk: Any) -> Path | None:
    if not (disk is None or isinstance(disk, str | os.PathLike)):
        raise RequestError(f"disk is a directory, not {disk!r}.")
    return None if disk is None else Path(disk).resolve()


def check_model(model: Any, inputs: tuple[Tensor, ...], optimizer: Any) -> None:
    """Can it be fitted here and now?"""
    if not isinstance(model, nn.Module):
        raise RequestError(f"the model must be an nn.Module, not {type(model).__name__}.")
    if isinstance(model, Fitted):
        raise RequestError(
            "this model is fitted already. Give the one it was made from, which has its weights."
        )
    if any(tensor.device.type != "cpu" for tensor in (*inputs, *model.parameters())):
        raise RequestError("model and example must be in the memory of the CPU: only that can be fitted.")
    if is_altered(model):
        raise RequestError("the model has a forward of its own beside its class's: that would be lost.")
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled():
        raise RequestError("a model cannot be fitted under autocast or inference_mode.")
    if not forget_peak():
        raise RequestError("this system does not tell the peak of a process (/proc/self/clear_refs).")
    _check_optimizer(model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer must be one of torch.optim with weights of the model, not {optimizer!r}."
        )
    weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if not any(id(weight) in weights for weight in model.parameters()):
        raise RequestError("the optimizer has none of the model's weights: make it of model.parameters().")
