"""Trace what forward computes from its input. What it does besides, it would do then and never again."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, fx, nn

from manyhands.errors import RequestError

PLAIN = (bool, int, float, str, type(None))


def traced(tracer: fx.Tracer, model: nn.Module) -> fx.Graph:
    """The calls of a model, if a trace leaves the model and the random numbers as they were.

    What forward sets once, as a size that it notes, is fine: a second trace does not change it again.
    """
    held, numbers = _Held(model), _Numbers()
    try:
        graph = tracer.trace(model)
        if numbers.were_drawn:
            raise RequestError(
                f"{type(model).__name__} draws random numbers that do not follow from its input, such as "
                "torch.randn(8): use torch.randn_like, or a module such as nn.Dropout."
            )
        if name := held.lost or (held.changed and _changed_again(tracer, model)):
            raise RequestError(
                f"{type(model).__name__}.forward changes {name} besides its result. That would happen "
                "once, while it is traced: change it in the training loop instead."
            )
    except Exception:
        held.put_back()
        numbers.put_back()
        raise
    return graph


def _changed_again(tracer: fx.Tracer, model: nn.Module) -> str | None:
    noted = _Held(model)
    type(tracer)().trace(model)
    return noted.changed


class _Numbers:
    """Both streams of random numbers, as they are now."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()

    @property
    def were_drawn(self) -> bool:
        return not torch.equal(self._torch, torch.get_rng_state()) or self._python != random.getstate()

    def put_back(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)


class _Held:
    """Buffers and plain attributes of a model, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._plain = [{k: v for k, v in vars(m).items() if type(v) in PLAIN} for _, m in self._modules]
        self._buffers = [
            {name: (b, b._version, b.detach().clone()) for name, b in m._buffers.items() if b is not None}
            for _, m in self._modules
        ]

    @property
    def changed(self) -> str | None:
        """One that is not as it was."""
        for (path, module), plain, buffers in zip(self._modules, self._plain, self._buffers, strict=True):
            for name, value in plain.items():
                now = vars(module).get(name)
                if type(now) in PLAIN and now != value:
                    return _joined(path, name)
            for name, (buffer, version, _) in buffers.items():
                if module._buffers.get(name) is not buffer or buffer._version != version:
                    return _joined(path, name)
        return None

    @property
    def lost(self) -> str | None:
        """A buffer in whose place there is a call now."""
        for path, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, Tensor):
                    return _joined(path, name)
        return None

    def put_back(self) -> None:
        for (_, module), plain, buffers in zip(self._modules, self._plain, self._buffers, strict=True):
            own: dict[str, Any] = vars(module)
            own.update(plain)
            for name, (buffer, version, value) in buffers.items():
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(value)
                module._buffers[name] = buffer


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
