"""From a job to what a run needs before it starts: data sets, recipe, model, plan. All mistakes show here."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn

from manyhands import api, models
from manyhands.data.augmentation import Recipe
from manyhands.data.batches import Loader
from manyhands.data.opening import open_dataset
from manyhands.data.samples import Damaged, Dataset, Kind, check_labels, first
from manyhands.detection.anchors import VOC_ANCHORS, Anchors, kmeans_anchors
from manyhands.detection.region import CELL_PIXELS
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster
from manyhands.ir.codec import graph_digest
from manyhands.ir.geometry import Span, Tile
from manyhands.ir.plan import Kept, Plan
from manyhands.loading import default_input, load_cluster, load_model, parse_bytes, parse_inputs
from manyhands.measuring import known_local, threads_each
from manyhands.planning.feeding import Feed, feed_plan
from manyhands.planning.lowering import Lowered
from manyhands.training.jobs import AugmentTable, Job
from manyhands.training.losses import LOSSES, choose_optimiser, make_loss

# Mean and deviation of each channel, 0 to 1, of all training images (CIFAR: Krizhevsky 2009; ImageNet: as
# torchvision has them; Fashion-MNIST: counted).
NORMS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
NUM_ANCHORS = 5


@dataclass(frozen=True)
class Facts:
    """What every device must agree on; the first device tells the others."""

    num_classes: int | None  # for a model of the zoo that takes them
    class_names: tuple[str, ...]
    anchors: Anchors
    num_images: int  # of the first device, where each has its own
    num_test_images: int
    test_is_train: bool  # the data has no test part: what is evaluated was trained on

    own_samples: int  # of each batch: what the first device brings

    def steps_per_epoch(self, job: Job) -> int:
        return max(self.num_images // (self.own_samples * job.accumulate), 1)

    def num_steps(self, job: Job) -> int:
        return job.steps if job.steps is not None else (job.epochs or 1) * self.steps_per_epoch(job)


def datasets(job: Job, device: str) -> tuple[Dataset, Dataset | None]:
    """The images to train on and those to evaluate on; `{device}` in a reference stands for the name."""
    train = open_dataset(job.data.replace("{device}", device), "train")
    train = first(train, job.images) if job.images is not None else train
    if job.evaluate is None:
        return train, None
    reference = (job.evaluate.data or job.data).replace("{device}", device)
    split = "train" if job.evaluate.data == "train" else "test"
    if job.evaluate.data in ("train", "test"):
        reference = job.data.replace("{device}", device)
    test = open_dataset(reference, split)
    return train, first(test, job.evaluate.images) if job.evaluate.images is not None else test


def find_facts(job: Job, train: Dataset, test: Dataset | None) -> Facts:
    """What the data says about the model."""
    return Facts(
        len(train.classes) or None if job.model in models.ZOO and _takes_classes(job.model) else None,
        train.classes,
        _anchors(job, train),
        len(train),
        0 if test is None else len(test),
        test is not None and _same_start(train, test),
        job.batch,
    )


def _same_start(train: Dataset, test: Dataset) -> bool:
    """Is the first test image the first training image? Names of files may agree by chance."""
    if train.kind is Kind.OWN:  # one function, one set; what it gives may differ each time
        return train.name_of(0) == test.name_of(0)
    try:
        one, other = (np.asarray(dataset.read(0).image) for dataset in (train, test))
    except Damaged:
        return False
    return train.name_of(0) == test.name_of(0) and np.array_equal(one, other)


def _takes_classes(name: str) -> bool:
    entry = models.ZOO[name]
    return "num_classes" in signature(getattr(import_module(entry.module), entry.function)).parameters


def _anchors(job: Job, train: Dataset) -> Anchors:
    if job.loss != "yolov2" or job.anchors == "voc":
        return VOC_ANCHORS
    if not isinstance(job.anchors, str):
        return job.anchors
    if train.kind is not Kind.BOXES:
        raise RequestError('anchors = "kmeans" needs data with boxes.')
    sizes = _box_sizes(job, train)
    return kmeans_anchors(sizes, NUM_ANCHORS, job.seed)


def _box_sizes(job: Job, train: Dataset) -> Tensor:
    """Widths and heights of all boxes, in cells, as they are when images are scaled to the input."""
    nothing = Tile(tuple(Span(0, 0) for _ in range(4)))  # no pixel is read
    with Loader(train, recipe(job, training=False), 16, 0, False, training=False, tile=nothing) as loader:
        rows = [loader.take(step)[1][: loader.valid(step)] for step in range(loader.steps_per_epoch)]
    boxes = torch.cat(rows).flatten(0, 1)
    corners = boxes[boxes[:, 0] >= 0, 1:]
    return (corners[:, 2:] - corners[:, :2]).double() / CELL_PIXELS


def input_size(job: Job) -> tuple[int, int, int]:
    if job.input is None and job.model not in models.ZOO:
        raise RequestError('say what one image looks like: input = "3x224x224".')
    shapes = parse_inputs(job.input or default_input(job.model))
    if len(shapes) != 1 or len(shapes[0]) != 3:
        raise RequestError(f"input = {job.input!r}: a job trains on images, channels x rows x columns.")
    channels, rows, columns = shapes[0]
    return channels, rows, columns


def sample_stream(job: Job, facts: Facts) -> dict[str, JsonValue]:
    """What decides which images come in which step: a run that resumes must agree in all of it."""
    augment: dict[str, JsonValue] = job.augment.model_dump(mode="json")
    return {
        "batch": job.batch,
        "accumulate": job.accumulate,
        "shuffle": job.shuffle,
        "images": facts.num_images,
        "augment": augment,
    }


def recipe(job: Job, *, training: bool) -> Recipe:
    """How images become inputs; without random changes for evaluation."""
    size = input_size(job)
    mean, std = NORMS.get(job.data.partition(":")[0], ((0.0,), (1.0,)))
    if len(mean) not in (1, size[0]):
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    given = job.augment
    still = Recipe(size, mean=given.mean or mean, std=given.std or std, resize=given.resize)
    if not training:
        return still
    return replace(still, crop=given.crop, flip=given.flip, colour=given.colour, mosaic=given.mosaic)


def precision(job: Job) -> tuple[torch.dtype, torch.dtype | None]:
    """The type of weights, and the type in which convolutions compute if it is another."""
    if job.precision == "bfloat16":
        return torch.float32, torch.bfloat16
    return getattr(torch, job.precision), None


def build_model(job: Job, facts: Facts, *, seed: int | None = None) -> nn.Module:
    dtype, _ = precision(job)
    chosen = job.seed if seed is None else seed
    return load_model(job.model, seed=chosen, num_classes=facts.num_classes).to(dtype)


def example(job: Job) -> Tensor:
    return torch.empty(job.batch, *input_size(job), dtype=precision(job)[0], device="meta")


def job_cluster(job: Job) -> Cluster:
    """The devices of a job; a memory limit of the job holds for every device that has none of its own.

    On an emulated device they are those that are emulated, whatever the job says.
    """
    cluster = load_cluster(_cluster_file(job), job.devices)
    limit = parse_bytes(job.memory) if job.memory else None
    devices = tuple(replace(d, memory_bytes=d.memory_bytes or limit) for d in cluster.devices)
    return replace(cluster, devices=devices)


def _cluster_file(job: Job) -> Path | None:
    file = os.environ.get("MANYHANDS_CLUSTER") or job.cluster
    return Path(file) if file else None


def make_plan(job: Job, facts: Facts, cluster: Cluster) -> tuple[Facts, Cluster, Lowered]:
    """The plan of a job, on the devices that it uses, and the facts with what follows from it.

    Whatever cannot be is refused here.
    """
    with torch.device("meta"):
        model = build_model(job, facts)
    graph = api.trace(model.train(), example(job)).graph
    if _cluster_file(job) is None:
        count, thrifty = len(cluster.devices), job.memory is not None
        measured = known_local(graph, count, threads=threads_each(count), thrifty=thrifty)
        cluster = replace(measured, devices=cluster.devices)
    kept = _kept(job)
    required = _required(job, cluster)
    axes = LOSSES.get(job.loss, ())
    plan = api.plan(graph, cluster, job.strategy, required=required, kept=kept, wire=job.wire, loss=axes)
    lowered = api.lower(graph, plan, clip=job.clip is not None)
    _refuse_large(lowered, cluster, job)
    samples = feed_plan(lowered, Feed(job.feed)).samples[cluster.names[0]]
    if job.evaluate is not None:
        _check_evaluation(model, job, plan)
    used = tuple(device for device in cluster.devices if device.name in plan.devices)
    smaller = replace(cluster, devices=used, port=cluster.meeting_port)  # where all would meet
    return replace(facts, own_samples=len(samples)), smaller, lowered


def _refuse_large(lowered: Lowered, cluster: Cluster, job: Job) -> None:
    """A plan that is foreseen to need more memory than a device has is not begun."""
    if all(device.memory_bytes is None for device in cluster.devices):
        return
    for name, size in api.simulate(lowered, cluster, kept=_kept(job)).cost.peak_bytes:
        limit = cluster.device(name).memory_bytes
        if limit is not None and size > limit:
            auto = "" if job.strategy == "auto" else "Leave `strategy` to auto, or take"
            raise RequestError(
                f"{job.strategy} does not fit {name}: {size / 1e6:.0f} MB are foreseen, the limit is "
                f"{limit / 1e6:.0f} MB. {auto or 'Take'} a smaller batch or more devices."
            )


def _kept(job: Job) -> Kept:
    """What the job's optimiser keeps of a weight; of one that is not known here, as much as any keeps."""
    options = job.optimizer.model_dump(exclude={"name"})
    copies = 1.0 if options.get("weight_decay") else 0.0
    name = job.optimizer.name.lower()
    if name == "sgd":
        return Kept(1.0 if options.get("momentum") else 0.0, copies)
    if name in ("adagrad", "rmsprop", "rprop"):
        return Kept(2.0, 1.0 + copies)
    return Kept(3.0 if options.get("amsgrad") else 2.0, 2.0 + copies)


def _required(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """Devices that must take part: the first, and all that bring images or wait for the first's plan."""
    remote = any(device.address is not None for device in cluster.devices)
    return cluster.names if job.feed == "local" or (remote and job.feed == "source") else cluster.names[:1]


def _check_evaluation(model: nn.Module, job: Job, plan: Plan) -> None:
    """A model that computes other layers in evaluation would fail only after an epoch."""
    graph = api.trace(model.eval(), example(job)).graph
    try:
        api.lower(graph, plan.evaluating(graph_digest(graph)))
    except RequestError as error:
        raise RequestError(
            f"{job.model} computes other layers in evaluation than in training ({error}). "
            "Set evaluate = false, or let it compute the same ones."
        ) from None


def check(job: Job, train: Dataset, facts: Facts, lowered: Lowered) -> None:
    """Refuse what would only fail inside a device."""
    choose_optimiser(job.optimizer.name, job.optimizer.model_dump(exclude={"name"}))
    make_loss(job.loss, facts.anchors, len(facts.class_names) or 1)
    recipe(job, training=True)
    if job.loss == "yolov2" and train.kind is not Kind.BOXES:
        raise RequestError(f'loss = "yolov2" needs data with boxes; {job.data} has none.')
    if job.loss != "yolov2" and ":" not in job.loss and train.kind is Kind.BOXES:
        raise RequestError(
            f'{job.data} has boxes, which loss = "{job.loss}" cannot learn. Use loss = "yolov2".'
        )
    if train.kind is Kind.OWN and job.augment != AugmentTable():
        raise RequestError("augment is for images; a data set of one's own gives its tensors as they are.")
    outputs = lowered.graph.by_name()[lowered.graph.outputs[0]].shape
    if job.loss == "cross_entropy" and len(outputs) >= 2:
        check_labels(train, outputs[1])
    if train.kind is not Kind.OWN:
        with Loader(train, recipe(job, training=False), 1, 0, False, training=False, ahead=0) as loader:
            loader.take(0)  # an image of another size shows here already
    if len(train) < facts.own_samples * job.accumulate:
        raise RequestError(
            f"a step takes {facts.own_samples * job.accumulate} images, {job.data} has {len(train)}. "
            "Take a smaller batch."
        )
