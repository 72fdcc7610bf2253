"""In one's own script: join the other devices, prepare model and optimiser, step, save.

hands = manyhands.join()
training = hands.prepare(model, optimiser, loss, images)
for images, labels in loader:
    loss = training.step(images, labels)
training.save("model.safetensors")
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Device, local_cluster
from manyhands.ir.plan import LEAST_IN_FLIGHT, Plan
from manyhands.planning.feeding import Feed
from manyhands.runtime.hosts import interface_to, local_addresses
from manyhands.runtime.transport import Gloo
from manyhands.training.checkpoints import StoredTensors, load_model_file, require_shapes, save_model
from manyhands.training.trainer import Settings, Trainer, Whole

TIMEOUT_S = 120.0
CHECK_EVERY = 50  # steps between two looks whether all devices got the same batch


def join(timeout_s: float = TIMEOUT_S) -> Hands:
    """This process's place among the devices, as torchrun or `manyhands run` started it; else alone.

    `timeout_s` is how long a device waits for another before it says that it is lost.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        if size == 1:
            store = dist.HashStore()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        else:
            first = Device("device-0", os.environ["MASTER_ADDR"])
            way = interface_to(first, int(os.environ.get("MASTER_PORT", "0")), local_addresses())
            os.environ.setdefault("GLOO_SOCKET_IFNAME", way)
            dist.init_process_group("gloo", timeout=timeout)
    return Hands(rank, tuple(f"device-{index}" for index in range(size)), timeout_s)


@dataclass(frozen=True)
class Hands:
    """One device among others."""

    rank: int
    devices: tuple[str, ...]
    timeout_s: float

    @property
    def device(self) -> str:
        return self.devices[self.rank]

    @property
    def first(self) -> bool:
        """Is this the device that prints and saves?"""
        return self.rank == 0

    def prepare(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        example: Tensor | Sequence[Tensor],
        *,
        plan: str | Plan = "auto",
        wire: str | None = None,
        feed: str = "replicated",
        clip: float | None = None,
        seed: int = 0,
    ) -> Training:
        """Divide model and optimiser among the devices. The first device's weights count.

        `example` is one whole batch (its shape is what matters); `plan` a strategy such as `rows`, or a
        plan; `feed` says where the images are: `replicated` (every device is given the whole batch),
        `source` (the first is, the others give None) or `local` (each is given its own part). `wire`: round
        tiles and gradients to this type for their way (bfloat16): fewer bytes, and NOT exact.
        """
        examples = (example,) if isinstance(example, Tensor) else tuple(example)
        if feed not in [each.value for each in Feed]:
            raise RequestError(f"feed = {feed!r}: there are {', '.join(each.value for each in Feed)}.")
        graph = api.trace(model.train(), *(tensor.to("meta") for tensor in examples)).graph
        cluster = replace(local_cluster(len(self.devices)), cores=None)  # the same plan on every machine
        if not isinstance(plan, Plan):  # without room: a script may end after any step
            plan = api.plan(graph, cluster, plan, required=cluster.names, room=False, wire=wire)
        chosen = replace(plan, in_flight_bytes=LEAST_IN_FLIGHT, wire=wire or plan.wire)
        if chosen.devices != self.devices:
            raise RequestError(
                f"the plan is for {', '.join(chosen.devices)}; here are {', '.join(self.devices)}."
            )
        transport = Gloo(self.device, self.devices, self.timeout_s)
        settings = Settings(loss, seed, clip, None, Feed(feed))
        trainer = Trainer(model, examples, chosen, transport, self.device, settings)
        return Training(trainer, model, optimiser)


class Training:
    """Steps of one model on this device; every device calls the same methods in the same order."""

    @property
    def exact(self) -> bool:
        """Does it train as one device would, to rounding? Not with a `wire`."""
        return self.trainer.plan.exact

    def __init__(self, trainer: Trainer, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self.trainer, self.model, self.optimiser, self.steps = trainer, model, optimiser, 0
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._groups = [{self._name(p) for p in group["params"]} for group in optimiser.param_groups]
        self._left_out(model)
        trainer.worker.use_optimiser(self._divided)
        first = trainer.device == trainer.plan.devices[0]
        trainer.restore(Whole(model) if first else None, self._state())

    def _name(self, parameter: nn.Parameter) -> str:
        if id(parameter) not in self._names:
            shape = "x".join(str(size) for size in parameter.shape)
            raise RequestError(f"the optimiser has a parameter ({shape}) that is not the model's.")
        return self._names[id(parameter)]

    def _state(self) -> dict[str, Tensor]:
        """What the optimiser has learned so far, of whole parameters."""
        return {
            f"{kind}/{self._names[id(parameter)]}": value
            for parameter, state in self.optimiser.state.items()
            for kind, value in state.items()
            if isinstance(value, Tensor)
        }

    def _left_out(self, model: nn.Module) -> None:
        """What the optimiser was not given does not learn; a plan has to know that before it is made."""
        given = set().union(*self._groups)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name not in given:
                raise RequestError(f"the optimiser was not given {name}. Give it, or freeze it.")

    def _divided(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The same optimiser over this device's pieces, in the same groups."""
        owned = self.trainer.worker.weights.owned
        groups = []
        for names, group in zip(self._groups, self.optimiser.param_groups, strict=True):
            own = [parameter for piece, parameter in owned.items() if piece.parameter in names]
            groups.append({key: value for key, value in group.items() if key != "params"} | {"params": own})
        return type(self.optimiser)([group for group in groups if group["params"]])  # type: ignore[call-arg]

    @property
    def samples(self) -> slice:
        """Which samples of a whole batch this device brings: for `feed = "local"`."""
        span = self.trainer.feeding.samples[self.trainer.device]
        return slice(span.start, span.stop)

    def step(self, images: Tensor | Sequence[Tensor] | None, targets: Tensor | None = None) -> float | None:
        """One training step; its loss. Learning rates are read from the optimiser that was given."""
        inputs = () if images is None else (images,) if isinstance(images, Tensor) else tuple(images)
        if self.steps % CHECK_EVERY == 0:
            self._same_batch(inputs, targets)
        self._follow_rates()
        self.steps += 1
        self.optimiser._opt_called = True  # type: ignore[attr-defined]  # or a scheduler warns that it never was
        return self.trainer.step((inputs, targets))

    def _follow_rates(self) -> None:
        """Whatever a scheduler changed in the given optimiser holds for the pieces."""
        if self.trainer.worker.optimiser is None:
            return
        owned = {piece.parameter for piece in self.trainer.worker.weights.owned}
        theirs = [
            group
            for names, group in zip(self._groups, self.optimiser.param_groups, strict=True)
            if names & owned
        ]
        for ours, group in zip(self.trainer.worker.optimiser.param_groups, theirs, strict=True):
            ours.update({key: value for key, value in group.items() if key != "params"})

    def _same_batch(self, inputs: Sequence[Tensor], targets: Tensor | None) -> None:
        """Devices that are given other images would train something, silently: look from time to time."""
        if self.trainer.settings.feed is not Feed.REPLICATED or targets is None:
            return
        digest = hashlib.blake2b(digest_size=7)
        for tensor in (*inputs, targets):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        mine = torch.tensor([int.from_bytes(digest.digest(), "big")])
        everyone = [torch.empty_like(mine) for _ in self.trainer.plan.devices]
        dist.all_gather(everyone, mine)
        for device, other in zip(self.trainer.plan.devices, everyone, strict=True):
            if int(other) != int(everyone[0]):
                raise RequestError(
                    f"{device} was given other images than {self.trainer.plan.devices[0]} at step "
                    f"{self.steps}. "
                    'Seed the shuffling alike on all devices, or use feed = "source".'
                )

    def predict(self, images: Tensor | Sequence[Tensor] | None) -> Any:
        """The outputs of one batch in evaluation mode, on devices that hold them; else None."""
        inputs = () if images is None else (images,) if isinstance(images, Tensor) else tuple(images)
        return self.trainer.predict(inputs, torch.zeros(len(inputs[0]) if inputs else 0))[0]

    def save(self, path: str | Path) -> None:
        """The whole model in one file under its own parameter names, written by the first device."""
        state = self.trainer.collect()
        if state is not None:
            save_model(Path(path), state.model, {})

    def load(self, path: str | Path) -> None:
        """Take the weights of a file that the first device has."""
        stored: StoredTensors | None = None
        if self.trainer.device == self.trainer.plan.devices[0]:
            file = load_model_file(Path(path))
            require_shapes(file, self.model.state_dict(), type(self.model).__name__)
            stored = file.tensors
        self.trainer.restore(stored, {})
