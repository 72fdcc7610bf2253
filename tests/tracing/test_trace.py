"""What a model's forward becomes: kinds of layers, in-place semantics, and refusals of one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands
from manyhands import RequestError, api
from manyhands.ir.graph import Along, Convolve, Graph, Mean, Mode, Pointwise, Pool, Rearrange, Take, Whole


class Model(nn.Module):
    """A convolution, then whatever a test wants to do with its result."""

    def __init__(self, then: Callable[[nn.Module, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.then = then
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.conv(x))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.sum() > 0) else x


X = torch.randn(2, 2, 8, 6, dtype=torch.float64)


def graph_of(then: Callable[[nn.Module, Tensor], Tensor], **modules: nn.Module) -> Graph:
    return manyhands.trace(Model(then, **modules).double(), X).graph


def trains(model: nn.Module, strategy: str = "rows") -> bool:
    model = model.double()
    graph = manyhands.trace(model, X).graph
    names = [layer.name for layer in graph.layers if layer.inputs]
    plans = [manyhands.plan(graph, 2, strategy, fuse=fuse) for fuse in (names, [], None)]
    return all(manyhands.verify(model, [X], plan).exact for plan in plans)


KINDS: list[tuple[type, Callable[[nn.Module, Tensor], Tensor]]] = [
    (Pointwise, lambda self, x: F.relu(x)),
    (Pointwise, lambda self, x: x * 2 + 1),
    (Pointwise, lambda self, x: torch.where(x > 0, x, -x)),
    (Pool, lambda self, x: F.max_pool2d(x, 2)),
    (Pool, lambda self, x: F.avg_pool2d(x, 3, 1, 1)),
    (Mean, lambda self, x: x.mean((2, 3))),
    (Mean, lambda self, x: F.adaptive_avg_pool2d(x, 1)),
    (Rearrange, lambda self, x: x.flatten(1)),
    (Rearrange, lambda self, x: x.permute(0, 2, 3, 1)),
    (Rearrange, lambda self, x: F.pixel_shuffle(x, 2)),
    (Take, lambda self, x: x[:, 1:3, ::2]),
    (Take, lambda self, x: x.chunk(2, 1)[1]),
    (Along, lambda self, x: x.softmax(1)),
    (Whole, lambda self, x: x.roll(1, 2)),
]


@pytest.mark.parametrize(("kind", "then"), KINDS)
def test_each_call_has_its_kind(kind: type, then: Callable[[nn.Module, Tensor], Tensor]) -> None:
    graph = graph_of(then)
    assert isinstance(graph.by_name()[graph.outputs[0]].operation, kind)


def test_modules_and_functions_give_the_same_kind() -> None:
    module = graph_of(lambda self, x: self.next(x), next=nn.Conv2d(4, 3, 3, 2, 1, bias=False))
    function = graph_of(lambda self, x: F.conv2d(x, self.next.weight, None, 2, 1), next=nn.Conv2d(4, 3, 3))
    (one,), (two,) = (
        [layer.operation for layer in g.layers if layer.shape[1] == 3] for g in (module, function)
    )
    assert one == two and isinstance(one, Convolve) and one.mode is Mode.CONSTANT


def test_what_overwrites_is_seen_by_later_readers() -> None:
    """relu_ on x, then x used again: the readers see the overwritten values."""

    def then(self: nn.Module, x: Tensor) -> Tensor:
        y = x * 1.0
        y += 0.5
        z = y.relu_()
        y = y + 1
        return y * z

    assert trains(Model(then))


def test_an_alias_sees_what_is_overwritten() -> None:
    def then(self: nn.Module, x: Tensor) -> Tensor:
        same = self.same(x)
        x += 1
        return same * x.detach()

    assert trains(Model(then, same=nn.Identity()))


def test_another_view_of_overwritten_memory_is_refused() -> None:
    def then(self: nn.Module, x: Tensor) -> Tensor:
        part = x[:, :2]
        x.add_(1)
        return part * 2

    with pytest.raises(RequestError, match="another view") as error:
        graph_of(then)
    assert "\n" not in str(error.value)


def test_an_overwritten_input_leaves_the_batch_alone() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.transpose(2, 3).mul_(2))

    assert trains(First())


def test_a_module_that_branches_on_values_runs_whole() -> None:
    model = Model(lambda self, x: self.odd(x), odd=Branching())
    graph = manyhands.trace(model.double(), X).graph
    assert isinstance(graph.by_name()["odd"].operation, Whole)
    assert trains(model)


def test_an_untraceable_root_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="Branching cannot be traced") as error:
        manyhands.trace(Branching(), X)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "then", [lambda self, x: x + torch.rand_like(x), lambda self, x: F.rrelu(x, training=True)]
)
def test_random_numbers_are_refused(then: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with pytest.raises(RequestError, match="random"):
        graph_of(then)


def test_dropout_inside_what_runs_whole_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x) if float(x.sum()) > 0 else x

    with pytest.raises(RequestError, match="odd: Odd draws random"):
        graph_of(lambda self, x: self.odd(x), odd=Odd())


@pytest.mark.parametrize("where", ["", "conv", "block"])
def test_hooks_on_backward_are_refused(where: str) -> None:
    model = Model(lambda self, x: self.block(x), block=nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1)))
    model.get_submodule(where).register_full_backward_hook(lambda module, gives, given: None)
    with pytest.raises(RequestError, match=f"{where or 'Model'} has a hook on its backward"):
        api.trace(model, torch.randn(4, 2, 8, 8))


@pytest.mark.parametrize("where", ["", "conv"])
def test_a_forward_beside_the_classs_is_refused(where: str) -> None:
    model = Model(lambda self, x: x)
    module, own = model.get_submodule(where), model.get_submodule(where).forward
    module.forward = lambda x: 2 * own(x)  # type: ignore[method-assign]
    with pytest.raises(RequestError, match=f"{where or 'Model'} has a forward of its own"):
        api.trace(model, torch.randn(4, 2, 8, 8))


def test_hooks_that_no_plan_would_call_are_refused() -> None:
    model = Model(lambda self, x: x)
    model.register_forward_hook(lambda module, args, result: 2 * result)
    with pytest.raises(RequestError, match="Model has a hook on its forward"):
        api.trace(model, torch.randn(4, 2, 8, 8))
    model = Model(lambda self, x: x)
    model.conv.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(RequestError, match="conv.weight has a hook on its gradient"):
        api.trace(model, torch.randn(4, 2, 8, 8))


def test_a_hook_is_not_forgotten() -> None:
    model = Model(lambda self, x: x)
    model.conv.register_forward_hook(lambda module, args, result: result * 2)
    assert trains(model)


def test_an_input_that_is_too_small_names_the_layer() -> None:
    with pytest.raises(RequestError, match="next"):
        graph_of(lambda self, x: self.next(x), next=nn.Conv2d(4, 4, 11))


def test_sums_of_tuples_and_sizes_computed_in_forward() -> None:
    def then(self: nn.Module, x: Tensor) -> Tensor:
        parts = x.split([1, 3], 1) + (x,)
        joined = torch.cat(parts, 1)
        return joined.view(x.size(0), -1, x.shape[2] // 2, 2 * x.shape[3])

    assert trains(Model(then))


def test_arguments_that_are_no_tensors_reach_a_module_that_runs_whole() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, factor: int, *, shift: float) -> Tensor:
            return x * factor + shift if float(x.detach().sum()) < 1e9 else x

    assert trains(Model(lambda self, x: self.odd(x, 3, shift=0.5), odd=Odd()))


def test_what_a_view_of_ours_shows_is_not_overwritten() -> None:
    """Torch's channel shuffle copies; ours may be a view, and must still show the old values."""

    def then(self: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        shuffled = F.channel_shuffle(y, 4)
        y.add_(1)
        return shuffled * 3 + y

    assert trains(Model(then))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_factor_that_changes_no_size_copies(mode: str) -> None:
    """8 rows times 1.1 are 8 rows: torch copies them, whatever the factor."""
    model = Model(lambda self, x: F.interpolate(x, scale_factor=1.1, mode=mode))
    assert trains(model) and trains(model, "channels")


@pytest.mark.parametrize(("activation", "trainable"), [(torch.tanh, False), (torch.square, True)])
def test_what_torch_refuses_in_backward_is_refused_before(
    activation: Callable[[Tensor], Tensor], trainable: bool
) -> None:
    """tanh keeps its result, square its input. Run in parts, a loss of that would go unnoticed."""

    def then(self: nn.Module, x: Tensor) -> Tensor:
        y = activation(x)
        z = y + 1
        return z * y.mul_(2).detach()

    if trainable:
        assert trains(Model(then))
        return
    with pytest.raises(RequestError, match="changes a tensor in place that its backward needs") as error:
        graph_of(then)
    assert "\n" not in str(error.value)


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, *, turned: bool = False, **more: Tensor) -> Tensor:
        return x * scale


@pytest.mark.parametrize(("count", "why"), ((1, "'scale'"), (3, "too many")))
def test_too_few_and_too_many_inputs_are_refused(count: int, why: str) -> None:
    with pytest.raises(RequestError, match=f"^Scaled cannot be given 2x2x8x6.*: .*{why}.*\\.$"):
        manyhands.trace(Scaled(), *(X,) * count)
    assert manyhands.trace(Scaled(), X, X).graph.outputs
