"""What else one could train with: other ways to share a training step among devices, to race against.

All of them compute on the mean of squares of the outputs with momentum, as our own measurements do. Each
says whether it is exact: trains as one device would, also where layers look at the whole batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.tasks import mean_square

Step = Callable[[], object]
ONE, CHANNELS_LAST = "one device", "one device channels last"
ALONE = (ONE, CHANNELS_LAST)  # exact with any model, and nothing to hold for the other devices
DISTCONV = "DistConv"  # its source is given by path, where it is wanted


@dataclass(frozen=True)
class Arena:
    """What every contestant is given: a way to make the model, one whole batch, and its place."""

    build: Callable[[], nn.Module]
    images: Tensor
    rank: int
    size: int

    @property
    def share(self) -> Tensor:
        """This device's samples of the batch."""
        return self.images.tensor_split(self.size)[self.rank]


def _plain(model: nn.Module, images: Tensor) -> Step:
    """A step of whatever the model has become; nothing where there are no samples for this device."""
    optimiser = torch.optim.SGD(model.parameters(), 1e-3, 0.9)

    def step() -> None:
        optimiser.zero_grad()
        mean_square((model(images),)).backward()
        optimiser.step()

    return step


def one_device(arena: Arena) -> Step | None:
    return _plain(arena.build(), arena.images) if arena.rank == 0 else None


def one_device_channels_last(arena: Arena) -> Step | None:
    """The same in the order of memory in which convolutions are often faster; plans choose so themselves."""
    if arena.rank != 0:
        return None
    model: Any = arena.build()
    last = torch.channels_last
    return _plain(model.to(memory_format=last), arena.images.contiguous(memory_format=last))


def data_parallel(arena: Arena) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return _plain(DistributedDataParallel(arena.build()), arena.share)


def data_parallel_powersgd(arena: Arena) -> Step:
    """Gradients as products of thin matrices, as torch's own example has them, but all in one bucket.

    Of several, whichever is ready first goes on first, and over gloo devices then take one for another.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    built = arena.build()
    num_bytes = sum(parameter.nbytes for parameter in built.parameters())
    model = DistributedDataParallel(built, bucket_cap_mb=1 + (num_bytes >> 20))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _plain(model, arena.share)


def fully_sharded(arena: Arena) -> Step:
    """FSDP2: every part of the model that holds weights is a group of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (arena.size,))
    model = arena.build()
    for child in _blocks(model):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(model, arena.share)


def _blocks(model: nn.Module, most: int = 4_000_000) -> list[nn.Module]:
    """Modules with weights, not larger than this unless they cannot be taken apart."""
    found: list[nn.Module] = []
    for child in model.children():
        size = sum(parameter.numel() for parameter in child.parameters())
        found += _blocks(child, most) if size > most and list(child.children()) else [child] if size else []
    return found


def pipelined(arena: Arena) -> Step:
    """torch.distributed.pipelining, 1F1B: stages with about as much to compute, a sample at a time."""
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    model, last = arena.build(), arena.size - 1
    cuts = _even_cuts(model, arena.images[:1], arena.size)
    staged = pipeline(
        model, mb_args=(arena.images[:1],), split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING)
    )
    stage = staged.build_stage(arena.rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(arena.images), loss_fn=lambda output, _: mean_square((output,)))
    optimiser = torch.optim.SGD(stage.submod.parameters(), 1e-3, 0.9)
    inputs = (arena.images,) if arena.rank == 0 else ()
    target: dict[str, Any] = {"target": arena.images} if arena.rank == last else {}

    def step() -> None:
        optimiser.zero_grad()
        schedule.step(*inputs, **target)
        optimiser.step()

    return step


def _even_cuts(model: nn.Module, example: Tensor, parts: int) -> list[str]:
    """Before which modules to cut so that the parts have about as many operations each."""
    from torch.utils.flop_counter import FlopCounterMode

    order: list[str] = []
    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    hooks = [
        module.register_forward_pre_hook(lambda _, __, name=name: order.append(name))  # type: ignore[misc]
        for name, module in leaves.items()
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()
    root, counts = type(model).__name__, counter.get_flop_counts()
    flops = [sum(counts.get(f"{root}.{name}", {}).values()) for name in order]
    total, done, cuts = sum(flops), 0, list[str]()
    for name, own in zip(order, flops, strict=True):
        if len(cuts) < parts - 1 and done >= total * (len(cuts) + 1) / parts and order.count(name) == 1:
            cuts.append(name)
        done += own
    return cuts


def distributed_convolutions(arena: Arena) -> Step:
    """LLNL's DistConv, where Python finds it: every device has some rows of every map."""
    distconv: Any = importlib.import_module("distconv")
    strategy = distconv.ParallelStrategy(arena.size, device_type="cpu")
    model = distconv.DistConvDDP(arena.build(), grad_reduction_factor=arena.size)  # the loss is of own rows
    return _plain(model, distconv.DCTensor.distribute(arena.images, strategy))


def _has_a_sample_for_each(_: nn.Module, images: Tensor, devices: int) -> bool:
    return len(images) >= devices


def _has_even_rows(model: nn.Module, images: Tensor, devices: int) -> bool:
    """Is every result a map, cut for each device into as many rows and in step with strides?

    Without that DistConv refuses layers, or parts of maps do not fit together.
    """
    fits: list[bool] = []

    def look(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        stride = getattr(module, "stride", 1)
        rows = stride[0] if isinstance(stride, tuple) else stride
        fits.append(result.dim() == 4 and given[0].shape[2] % (devices * rows) == 0)

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return all(fits)


@dataclass(frozen=True)
class Peer:
    """Another way to train."""

    name: str
    make: Callable[[Arena], Step | None]
    local_norms: bool = True  # every part of a batch by itself, so it is not exact where there are some
    lossy: bool = False
    possible: Callable[[nn.Module, Tensor, int], bool] = _has_a_sample_for_each  # both on paper: meta

    def exact(self, model: nn.Module) -> bool:
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        return not self.lossy and not (self.local_norms and norms)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(ONE, one_device, local_norms=False, possible=lambda *_: True),
        Peer(CHANNELS_LAST, one_device_channels_last, local_norms=False, possible=lambda *_: True),
        Peer("DistributedDataParallel", data_parallel),
        Peer("DDP with PowerSGD", data_parallel_powersgd, lossy=True),
        Peer("FSDP2", fully_sharded),
        Peer("pipelining 1F1B", pipelined),
        Peer(DISTCONV, distributed_convolutions, possible=_has_even_rows),
    )
}
