"""A training run inside one device: the loop over steps, with evaluation, checkpoints and reports."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor

from manyhands.data.batches import Loader
from manyhands.errors import RequestError, RunError
from manyhands.ir.codec import decode, encode
from manyhands.ir.geometry import Tile
from manyhands.ir.plan import Cost, Plan
from manyhands.planning.explaining import segments_of
from manyhands.planning.feeding import Feed
from manyhands.runtime.allocator import keep_freed_memory, return_freed_memory
from manyhands.runtime.packets import Packet, receive_packet, send_packet
from manyhands.runtime.process import peak_memory, require_bfloat16
from manyhands.runtime.ranks import Place, say
from manyhands.runtime.transport import Gloo
from manyhands.training import checkpoints, preparing
from manyhands.training.jobs import Job
from manyhands.training.losses import OptimiserChoice, choose_optimiser, make_loss, make_metric
from manyhands.training.manifests import Facts as Saved
from manyhands.training.manifests import OptimiserFacts
from manyhands.training.preparing import Facts
from manyhands.training.trainer import Settings, Trainer, Whole

REPORT_EVERY = 10  # steps between two looks at all devices


@dataclass(frozen=True)
class Run:
    """What a process is told. Plan, facts and checkpoint matter on the first device; it tells the others."""

    job: dict[str, Any]
    plan: Plan | None
    facts: Facts | None
    checkpoint: str | None
    memory_bytes: dict[str, int | None]


@dataclass(frozen=True)
class Agreed:
    """What all devices of a run know alike."""

    plan: Plan
    facts: Facts
    start: int  # the first step to take
    orders: dict[str, tuple[bool, bool]]  # by device, if decided: channels last, 1x1 convolutions as such


class Runner:
    """One device's run of a job."""

    def __init__(self, run: Run, place: Place) -> None:
        self.job, self.place, self.device = Job.model_validate(run.job), place, place.device
        if run.memory_bytes.get(self.device) is not None:
            return_freed_memory()  # where memory is limited, what is freed goes back at once
        else:
            keep_freed_memory()  # elsewhere its pages need not be made anew in every step
        self.transport = Gloo(place.device, place.devices, place.timeout_s)
        self.is_first = self.device == place.devices[0]
        self.stored = checkpoints.read(Path(run.checkpoint)) if run.checkpoint and self.is_first else None
        self.agreed = self._agree(run)
        self.facts, self.num_steps = self.agreed.facts, self.agreed.facts.num_steps(self.job)
        self.choice: OptimiserChoice = choose_optimiser(
            self.job.optimizer.name, self.job.optimizer.model_dump(exclude={"name"})
        )
        self.loss = make_loss(self.job.loss, self.facts.anchors, len(self.facts.class_names) or 1)
        self.trainer = self._trainer()
        decided = self.trainer.channels_last, self.trainer.worker.convolving
        self.orders = [[bool(told) for told in self._everyone([int(own or 0)])] for own in decided]
        self.sent_before, self.step_bytes = self.transport.sent_bytes, 0

    def _agree(self, run: Run) -> Agreed:
        """The first device tells the others what it was told."""
        if self.is_first:
            assert run.plan is not None and run.facts is not None
            start, orders = 0, dict[str, tuple[bool, bool]]()
            if self.stored is not None:
                start, notes = self.stored.manifest.step, self.stored.manifest.notes
                if notes.get("devices") == list(self.place.devices):
                    orders = dict(zip(self.place.devices, checkpoints.orders(notes), strict=True))
            agreed = Agreed(run.plan, run.facts, start, orders)
            for other in self.place.devices[1:]:
                send_packet(self.transport, Packet(encode(agreed), ()), other)
            return agreed
        return decode(Agreed, receive_packet(self.transport, self.place.devices[0]).facts)

    def _trainer(self) -> Trainer:
        job = self.job
        _, mixed = preparing.precision(job)
        if mixed is not None:
            require_bfloat16(self.device)
        model = preparing.build_model(job, self.facts)
        order = self.agreed.orders.get(self.device, (None, None))
        settings = Settings(self.loss, job.seed, job.clip, mixed, Feed(job.feed), *order)
        trainer = Trainer(
            model, (preparing.example(job),), self.agreed.plan, self.transport, self.device, settings
        )
        trainer.worker.use_optimiser(self.choice.make)
        trainer.passes = self.agreed.start * job.accumulate
        if self.agreed.start:
            trainer.restore(
                self.stored.model if self.stored else None,
                dict(self.stored.optimiser) if self.stored else {},
            )
        elif job.init is not None:
            given = checkpoints.load_model_file(Path(job.init)).tensors if self.is_first else None
            trainer.restore(given, {})
        else:  # the first device's weights count: a model of one's own may draw them in its own way
            trainer.restore(Whole(model) if self.is_first else None, {})
        return trainer

    # ---- data ------------------------------------------------------------------------------------------

    @cached_property
    def data(self) -> tuple[Any, Any] | None:
        """The data sets this device reads, if it reads any."""
        if Feed(self.job.feed) is Feed.SOURCE and not self.is_first:
            return None
        train, test = preparing.datasets(self.job, self.device)
        counts = (len(train), 0 if test is None else len(test))
        told = (self.facts.num_images, self.facts.num_test_images)
        first = self.place.devices[0]
        if Feed(self.job.feed) is Feed.REPLICATED and counts != told:
            raise RequestError(
                f"{self.device} has {counts[0]} training and {counts[1]} test images, {first} has "
                f'{told[0]} and {told[1]}. Give all the same files, or use feed = "source".'
            )
        if train.classes != self.facts.class_names:
            raise RequestError(
                f"{self.device} has the classes {', '.join(train.classes)}; {first} has "
                f"{', '.join(self.facts.class_names)}. Give all the same classes."
            )
        return train, test

    def loader(self, *, training: bool) -> Loader | None:
        """Batches of this device's part of the images: its tile, or its samples, or none."""
        if self.data is None:
            return None
        dataset = self.data[0 if training else 1]
        job, feed = self.job, Feed(self.job.feed)
        count = job.batch if feed is not Feed.LOCAL else self.trainer.samples
        tile: Tile | None = self.trainer.worker.territory.inputs[0] if feed is Feed.REPLICATED else None
        return Loader(
            dataset,
            preparing.recipe(job, training=training),
            count,
            job.seed,
            job.shuffle,
            training=training,
            tile=tile,
            damaged_limit=job.damaged_limit,
        )

    def take(self, loader: Loader | None, number: int) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if loader is None:
            return (), None
        images, targets = loader.take(number)
        return (images,), targets

    # ---- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """All steps, from where the run stands to its end or its target."""
        job, loader = self.job, self.loader(training=True)
        seconds, value = 0.0, None
        say("start", step=self.agreed.start, num_steps=self.num_steps, steps_per_epoch=self._epoch_steps)
        damaged = 0
        for step in range(self.agreed.start, self.num_steps):
            self._set_rate(step)
            numbers = range(step * job.accumulate, (step + 1) * job.accumulate)
            start, sent = time.perf_counter(), self.transport.sent_bytes
            loss = self.trainer.step(*(partial(self.take, loader, number) for number in numbers), cut=True)
            seconds += time.perf_counter() - start
            self.step_bytes = self.transport.sent_bytes - sent
            self._check(loss, step)
            if loader is not None and len(loader.damaged) > damaged:
                damaged = len(loader.damaged)
                say("damaged", files=loader.damaged)
            self._report(step, loss, seconds)
            if step == self.agreed.start:  # the first step warms up
                self.trainer.worker.spent_s = [0.0] * len(self.trainer.worker.program.steps)
            done = step + 1
            if saved := self.due(done, job.checkpoint.every):
                self.save(done)
            if self.due(done, job.evaluate.every if job.evaluate else None) and self.facts.num_test_images:
                value = self.evaluate(done)
            if self._reached(value):
                if not saved:
                    self.save(done)
                break
        self.finish(value, done - self.agreed.start if self.num_steps > self.agreed.start else 0)
        if loader is not None:
            loader.close()

    @property
    def _epoch_steps(self) -> int:
        return self.facts.steps_per_epoch(self.job)

    def due(self, done: int, every: int | None) -> bool:
        """After every so many steps, or every epoch, and at the end."""
        return done % (every or self._epoch_steps) == 0 or done == self.num_steps

    def _set_rate(self, step: int) -> None:
        factor = self.job.schedule.at_step(step, self.num_steps)
        self.rate = self.job.optimizer.lr * factor
        if self.trainer.worker.optimiser is not None:
            for group in self.trainer.worker.optimiser.param_groups:
                group["lr"] = self.rate

    def _check(self, loss: float | None, step: int) -> None:
        if loss is not None and not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {step + 1}. Try a lower lr, a warm-up or clip = 1.0; "
                "the last checkpoint is intact."
            )

    def _report(self, step: int, loss: float | None, seconds: float) -> None:
        """Every step its loss; every few steps, what all devices have sent and needed."""
        done = step + 1 - self.agreed.start
        images = self.job.batch * self.job.accumulate
        facts: dict[str, Any] = {
            "step": step + 1,
            "loss": loss,
            "lr": self.rate,
            "images_per_s": done * images / seconds,
        }
        if done == 1 or (step + 1) % REPORT_EVERY == 0 or step + 1 == self.num_steps:
            facts["devices"] = self._devices()
        say("step", **facts)

    def _devices(self) -> dict[str, dict[str, int]]:
        """Bytes sent and peak memory of every device."""
        everyone = self._everyone([self.transport.sent_bytes - self.sent_before, peak_memory()])
        return {
            name: {"sent_bytes": int(sent), "peak_bytes": int(peak)}
            for name, (sent, peak) in zip(self.place.devices, everyone, strict=True)
        }

    def _everyone(self, numbers: list[int]) -> list[Tensor]:
        """Everybody's numbers, in the order of devices; all of them have to ask at once."""
        mine = torch.tensor(numbers)
        everyone = [torch.empty_like(mine) for _ in self.place.devices]
        dist.all_gather(everyone, mine)
        return everyone

    # ---- evaluation ------------------------------------------------------------------------------------

    def evaluate(self, done: int) -> float:
        """The metric on the test images, the same on every device."""
        job = self.job
        assert job.evaluate is not None
        start = time.perf_counter()
        metric = make_metric(
            job.loss, self.loss, self.facts.anchors, len(self.facts.class_names) or 1, job.evaluate.threshold
        )
        loader = self.loader(training=False)
        count = 0
        for number in range(self._evaluation_steps(loader)):
            outputs, targets = self.trainer.predict(*self.take(loader, number), cut=True)
            valid = job.batch
            if Feed(job.feed) is not Feed.LOCAL:
                valid = min(valid, self.facts.num_test_images - number * job.batch)
            count += valid
            if outputs is not None:
                metric.add(_first(outputs, valid), targets[:valid])
        if loader is not None:
            loader.close()
        value = torch.tensor([metric.value() if self.trainer.holds_outputs else 0.0], dtype=torch.float64)
        dist.broadcast(value, self.place.devices.index(self.trainer.output_holder))
        seconds = time.perf_counter() - start
        say(
            "evaluated",
            step=done,
            metric=metric.name,
            value=float(value),
            images=count,
            of="training images" if self.facts.test_is_train else "test images",
            seconds=seconds,
        )
        return float(value)

    def _evaluation_steps(self, loader: Loader | None) -> int:
        """Batches of an evaluation; where images are local, as many whole ones as every device has."""
        if Feed(self.job.feed) is not Feed.LOCAL:
            return -(-self.facts.num_test_images // self.job.batch)
        assert loader is not None
        own = torch.tensor([len(loader.dataset) // max(self.trainer.samples, 1)])
        dist.all_reduce(own, dist.ReduceOp.MIN)
        if not int(own):
            raise RequestError(
                f"a device has fewer test images than its {self.trainer.samples} of a batch. "
                "Give it more, or set evaluate = false."
            )
        return int(own)

    def _reached(self, value: float | None) -> bool:
        target = self.job.evaluate.target if self.job.evaluate else None
        if target is None or value is None:
            return False
        more = self.job.loss in ("cross_entropy", "yolov2")
        return value >= target if more else value <= target

    # ---- saving ----------------------------------------------------------------------------------------

    def save(self, done: int) -> None:
        """A checkpoint of the whole, by the first device."""
        start = time.perf_counter()
        state = self.trainer.collect()
        if state is None:
            return
        job, epoch_steps = self.job, self._epoch_steps
        facts = Saved(
            model=job.model,
            input="x".join(str(size) for size in preparing.input_size(job)),
            plan=encode(self.agreed.plan),
            step=done,
            epoch=done // epoch_steps,
            position=done % epoch_steps * job.batch * job.accumulate,
            seed=job.seed,
            optimiser=OptimiserFacts(
                name=self.choice.kind.__name__, groups=(_plain(self.choice.options | {"lr": self.rate}),)
            ),
            notes=preparing.sample_stream(job, self.facts)
            | {
                "devices": list(self.place.devices),
                "channels_last": list[JsonValue](self.orders[0]),
                "convolving": list[JsonValue](self.orders[1]),
            },
        )
        folder = Path(job.folder or ".") / "checkpoints"
        path = checkpoints.write(folder, facts, state.model, state.optimiser, job.checkpoint.keep)
        say("saved", step=done, path=str(path), seconds=time.perf_counter() - start)

    def finish(self, value: float | None, num_steps: int) -> None:
        """The whole model in one file, under the user's own names; what so many steps cost."""
        state = self.trainer.collect()
        if state is not None and self.job.save is not None:
            facts = {
                "model": self.job.model,
                "input": "x".join(str(size) for size in preparing.input_size(self.job)),
                "classes": json.dumps(self.facts.class_names),
                "anchors": json.dumps(self.facts.anchors),
            }
            if self.facts.num_classes is not None:
                facts["num_classes"] = str(self.facts.num_classes)
            checkpoints.save_model(Path(self.job.save), state.model, facts)
        devices = self._devices()
        say("finished", devices=devices, metric=value, measured=self._measured(devices, num_steps))

    def _measured(self, devices: dict[str, dict[str, int]], num_steps: int) -> Any:
        """What a step cost on every device and in every segment: the forecast's own type."""
        spent, lowered = self.trainer.worker.spent_s, self.trainer.lowered
        segments = [0.0] * len(lowered.plan.segments)
        for position, segment in segments_of(lowered, self.trainer.worker.program).items():
            segments[segment] += spent[position]
        micros = [round(1e6 * seconds) for seconds in (sum(spent), *segments)]
        everyone = [numbers.tolist() for numbers in self._everyone([self.step_bytes, *micros])]
        if num_steps < 2:
            return None
        totals, *columns = zip(
            *([n / 1e6 / (num_steps - 1) for n in numbers[1:]] for numbers in everyone), strict=True
        )
        return encode(
            Cost(
                max(totals),
                sum(numbers[0] for numbers in everyone),
                tuple((name, facts["peak_bytes"]) for name, facts in devices.items()),
                tuple(tuple(zip(self.place.devices, column, strict=True)) for column in columns),
            )
        )


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def _first(outputs: Any, count: int) -> Any:
    return outputs[:count] if isinstance(outputs, Tensor) else tuple(_first(o, count) for o in outputs)


def train(job: dict[str, Any], place: Place) -> None:
    """The task of a rank: one device's part of a job."""
    Runner(decode(Run, job), place).run()
