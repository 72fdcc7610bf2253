"""A model as a chain of stages that can be run one by one, and again, by torch's own operations.

Where the chain may be cut follows from the model: not where a later call would overwrite what crosses the
cut, since a stage that is run again must find what it found the first time; and not between a call and the
next one that reads its result, if no backward needs that, since there is always a better place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from manyhands.errors import RequestError
from manyhands.tracing.fx import Walk, walk, where


@dataclass(frozen=True)
class StageCode:
    """Some calls of a model. `run` computes them from values by name; what others read comes back."""

    name: str
    calls: tuple[fx.Node, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    root: nn.Module

    @cached_property
    def _called(self) -> dict[str, nn.Module]:
        calls = (call for call in self.calls if call.op == "call_module")
        return {call.name: self.root.get_submodule(str(call.target)) for call in calls}

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._called.values())

    @cached_property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """Those of its modules, and those that its calls read themselves; as often as they are read."""
        own = [weight for module in self.modules for weight in module.parameters()]
        return (*own, *(value for value in self._read if isinstance(value, nn.Parameter)))

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Other tensors of the model that its calls read themselves: buffers."""
        return tuple(v for v in self._read if isinstance(v, Tensor) and not isinstance(v, nn.Parameter))

    @property
    def _read(self) -> list[Any]:
        nodes = (node for call in self.calls for node in call.all_input_nodes if node.op == "get_attr")
        return [_attribute(self.root, str(node.target)) for node in nodes]

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values given are let go as soon as they are no longer read."""
        for call, unread in zip(self.calls, self._unread, strict=True):
            values[call.name] = self._compute(call, values)
            for name in unread:
                values.pop(name, None)
        return {name: values[name] for name in self.makes}

    @cached_property
    def _unread(self) -> tuple[set[str], ...]:
        """After each call, what is read no more."""
        needed, found = set(self.makes), []
        for call in reversed(self.calls):
            found.append({*_names(call), call.name} - needed)
            needed |= _names(call)
        return tuple(reversed(found))

    def _compute(self, call: fx.Node, values: dict[str, Any]) -> Any:
        def value(node: fx.Node) -> Any:
            return _attribute(self.root, str(node.target)) if node.op == "get_attr" else values[node.name]

        args, kwargs = fx.map_arg((call.args, call.kwargs), value)
        if call.op == "call_module":
            return self._called[call.name](*args, **kwargs)
        if call.op == "call_method":
            return getattr(args[0], str(call.target))(*args[1:], **kwargs)
        assert callable(call.target)
        return call.target(*args, **kwargs)


@dataclass(frozen=True)
class Staged:
    """A model in stages.

    State n holds the values, by name, that stage n and later ones read; the last one, the results.
    """

    stages: tuple[StageCode, ...]
    states: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    results: Any  # what the model returns, names in place of values
    differentiable: frozenset[str]
    memory: dict[str, int]  # names of tensors in states -> which piece of memory; views share one
    memory_bytes: dict[int, int]

    @property
    def given_away(self) -> frozenset[int]:
        """Memory of results; but for inputs, that was there before."""
        given = {self.memory[name] for name in result_names(self.results) if name in self.memory}
        return frozenset(given - {self.memory[name] for name in self.inputs if name in self.memory})

    @property
    def unread(self) -> frozenset[int]:
        """Memory of results that no stage reads."""
        return self.given_away - {self.memory.get(name) for code in self.stages for name in code.reads}


def staged(model: nn.Module, example: Sequence[Tensor]) -> Staged:
    """Cut a model wherever it can be cut."""
    walked = walk(model, example)
    _refuse_changed_attributes(walked)
    calls = [node for node in walked.calls.nodes if node.op.startswith("call_")]
    if not calls:
        raise RequestError(f"{type(model).__name__} computes nothing.")
    inputs = [node for node in walked.calls.nodes if node.op == "placeholder"]
    output = next(node for node in walked.calls.nodes if node.op == "output")
    facts = _Facts(model, walked, example)
    facts.refuse_changed(inputs)
    states = _states(inputs, calls, output)
    cuts = [0, *(n for n in range(1, len(calls)) if facts.may_cut(calls, states, n)), len(calls)]
    stages = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        before, after = states[start], states[stop]
        inside = calls[start:stop]
        read = {name for call in inside for name in _names(call)}
        makes = tuple(node.name for node in after if node in inside)
        stages.append(
            StageCode(
                where(inside[-1]),
                tuple(inside),
                tuple(n.name for n in before if n.name in read),
                makes,
                model,
            )
        )
    names = {node.name for cut in cuts for node in states[cut]}
    held = {node.name: node for node in (*inputs, *calls) if node.name in names}
    return Staged(
        tuple(stages),
        tuple(tuple(node.name for node in states[cut]) for cut in cuts),
        tuple(node.name for node in inputs),
        fx.map_arg(output.args[0], lambda node: _Name(node.name)),
        frozenset(name for name, node in held.items() if node in facts.differentiable),
        {name: facts.memory[node] for name, node in held.items() if node in facts.memory},
        facts.memory_bytes,
    )


class _Name(str):
    """The name of a value, told from a string that a model returns."""


def assembled(results: Any, values: dict[str, Any]) -> Any:
    """What a model returns, with values in place of names."""
    return pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, _Name) else leaf, results)


def result_names(results: Any) -> tuple[str, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, _Name))


def _names(call: fx.Node) -> set[str]:
    return {node.name for node in call.all_input_nodes if node.op != "get_attr"}


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _states(
    inputs: Sequence[fx.Node], calls: Sequence[fx.Node], output: fx.Node
) -> list[tuple[fx.Node, ...]]:
    """What is alive before each call, and in the end."""
    order = {node: n for n, node in enumerate(calls)} | {output: len(calls)}
    last = {node: max((order[user] for user in node.users), default=-1) for node in (*inputs, *calls)}
    born = {node: -1 for node in inputs} | {node: n for n, node in enumerate(calls)}
    return [
        tuple(node for node in born if born[node] < n and (last[node] >= n or (n == 0 and node in inputs)))
        for n in range(len(calls) + 1)
    ]


def _refuse_changed_attributes(walked: Walk) -> None:
    for call, changed in walked.overwrites.items():
        for node in changed:
            if node.op == "get_attr":
                raise RequestError(
                    f"{where(call)} changes {node.target} in place, so it cannot be computed a second time."
                )


class _Facts:
    """What torch knows about the values of a model: where they lie, which have gradients, which it keeps."""

    def __init__(self, model: nn.Module, walked: Walk, example: Sequence[Tensor]) -> None:
        self._walked = walked
        recorder = _Keeping(model, walked)
        recorder.follow(example)
        self.memory = {n: m[0] for n, v in recorder.values.items() if len(m := _memories(v)) == 1}
        self._memories = {n: set(_memories(v)) for n, v in recorder.values.items()}
        self.memory_bytes = recorder.memory_bytes
        self.kept = recorder.kept
        self.differentiable = {
            n for n, v in recorder.values.items() if isinstance(v, Tensor) and v.requires_grad
        }
        self._held = recorder.let_go()  # so that no other tensor lies in the same memory

    def refuse_changed(self, inputs: Sequence[fx.Node]) -> None:
        """A stage that overwrites what the model is given could not be run a second time."""
        given = set().union(*(self._memories[node] for node in inputs))
        for call, changed in self._walked.overwrites.items():
            if any(self._memories[node] & given for node in changed):
                raise RequestError(
                    f"{where(call)} overwrites the input. Use a form that returns a new tensor."
                )

    def may_cut(self, calls: Sequence[fx.Node], states: Sequence[tuple[fx.Node, ...]], place: int) -> bool:
        alive = [node for node in states[place] if isinstance(self._held[node], Tensor)]
        if any(self._memories[node] and node not in self.memory for node in states[place]):
            return False  # a tuple of tensors
        lying = {self.memory[node] for node in alive}
        if any(
            self._memories[node] & lying for call in calls[place:] for node in self._walked.overwrites[call]
        ):
            return False
        newest, following = calls[place - 1 : place + 1]
        if newest not in following.all_input_nodes or newest not in self.memory:
            return True
        return self.memory[newest] in self.kept


def _memories(value: Any) -> list[int]:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor.untyped_storage()._cdata for tensor in tensors]


class _Keeping(fx.Interpreter):
    """Runs a model on meta tensors with gradients, and notes which memory autograd keeps."""

    def __init__(self, model: nn.Module, walked: Walk) -> None:
        super().__init__(fx.GraphModule(model, walked.calls), garbage_collect_values=False)
        self._walked = walked
        self.values: dict[fx.Node, Any] = {}
        self.kept: set[int] = set()
        self._kept_tensors: list[Tensor] = []
        self.memory_bytes: dict[int, int] = {}

    def follow(self, example: Sequence[Tensor]) -> None:
        inputs = tuple(
            torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad) for tensor in example
        )
        module = self.module
        state = {
            name: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(self._keep, _never),
            torch.nn.utils.stateless._reparametrize_module(module, state),
        ):
            self.run(*inputs)

    def let_go(self) -> dict[fx.Node, Any]:
        """The values without their history, whose hooks hold this object, and so the model, for good."""
        values = {node: pytree.tree_map(_bare, value) for node, value in self.values.items()}
        self.values.clear()
        self.env.clear()
        return values

    def _keep(self, tensor: Tensor) -> None:
        """Nothing is handed to autograd: a result that its own history holds would be held for good.

        It is held here, so that no other tensor comes to lie in the same memory meanwhile.
        """
        self.kept.add(tensor.untyped_storage()._cdata)
        self._kept_tensors.append(tensor.detach())

    def run_node(self, node: fx.Node) -> Any:
        try:
            result = super().run_node(node)
        except Exception:
            result = self._unseen(node)
        self.values[node] = result
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.memory_bytes[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
        return result

    def _unseen(self, node: fx.Node) -> Any:
        """A call that cannot be followed with gradients: all it reads and returns counts as kept."""

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            made = torch.empty_like(value, device="meta", requires_grad=value.is_floating_point())
            self._keep(made)
            return made

        for argument in node.all_input_nodes:
            for leaf in pytree.tree_leaves(self.values[argument]):
                if isinstance(leaf, Tensor):
                    self._keep(leaf)
        return pytree.tree_map(fresh, self._walked.values[node])


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _never(kept: Any) -> Tensor:
    raise AssertionError("nobody goes backward through what is only followed")
