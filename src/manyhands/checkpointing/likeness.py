"""Which stages of a model compute alike: those are measured once."""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import Any

from torch import Tensor, fx, nn

from manyhands.runtime.recipes import is_altered, is_watched
from manyhands.tracing.stages import StageCode


def key_of(code: StageCode, values: dict[str, Any], differentiable: Container[str]) -> Hashable:
    """Equal for stages that compute alike, backward too: of images nobody wants the gradient."""
    places = {name: n for n, name in enumerate(code.reads)}
    inner = {call.name: n for n, call in enumerate(code.calls)}
    modules = iter(code.modules)
    calls = []
    for call in code.calls:
        module = next(modules) if call.op == "call_module" else None
        what = _described(module) if module is not None else str(call.target)
        frozen = () if module is None else tuple(w.requires_grad for w in module.parameters())
        given = fx.map_arg(
            (call.args, call.kwargs), lambda n: str((places.get(n.name), inner.get(n.name), _shape(n, code)))
        )
        calls.append((call.op, what, frozen, str(given)))
    shapes = tuple(
        (tuple(v.shape), str(v.dtype)) if isinstance(v, Tensor) else str(v)
        for v in (values[n] for n in code.reads)
    )
    wanted = tuple(name in differentiable for name in (*code.reads, *code.makes))
    return tuple(calls), shapes, wanted, tuple(inner[name] for name in code.makes)


def _described(module: nn.Module) -> str:
    """Whoever has hooks or a forward of its own is like nobody else."""
    own = id(module) if is_watched(module) or is_altered(module) else ""
    return f"{module!r} {module.training} {own}"


def _shape(node: fx.Node, code: StageCode) -> str:
    """Of what a call reads of the model itself."""
    value = code.root.get_parameter(str(node.target)) if _is_weight(node, code) else None
    return "" if value is None else f"{tuple(value.shape)} {value.requires_grad}"


def _is_weight(node: fx.Node, code: StageCode) -> bool:
    return node.op == "get_attr" and any(name == node.target for name, _ in code.root.named_parameters())
