"""What a job calls its data, found and opened: `cifar10:PATH`, `imagefolder:PATH`, `file.py:function`."""

from collections.abc import Callable
from pathlib import Path

from manyhands.data.cifar import open_cifar10
from manyhands.data.coco import open_cards, open_coco
from manyhands.data.fashion import open_fashion_mnist
from manyhands.data.imagefolder import open_imagefolder
from manyhands.data.own import open_own
from manyhands.data.samples import Dataset
from manyhands.data.yolo import open_yolo
from manyhands.errors import RequestError
from manyhands.loading import nearest

READERS: dict[str, Callable[[Path, str], Dataset]] = {
    "cifar10": open_cifar10,
    "fashion-mnist": open_fashion_mnist,
    "imagefolder": open_imagefolder,
    "coco": open_coco,
    "yolo": open_yolo,
    "cards": open_cards,
}
SPLITS = ("train", "test")


def open_dataset(reference: str, split: str) -> Dataset:
    """The data set a reference names: `open_dataset("cifar10:data/cifar10_webp.zip", "train")`."""
    if split not in SPLITS:
        raise RequestError(f"there is no split {split!r}; there are train and test.")
    name, _, path = reference.partition(":")
    if reference.rpartition(":")[0].endswith(".py"):
        return open_own(reference)
    if reference.endswith(".py"):
        raise RequestError(f"{reference} needs the name of its function: {reference}:function.")
    if name not in READERS:
        hint = nearest(name, tuple(READERS)) or f" There are {', '.join(READERS)} and file.py:function."
        raise RequestError(f"no data set is called {name!r}.{hint}")
    if path:
        return READERS[name](Path(path).expanduser(), split)
    if name == "fashion-mnist":
        return open_fashion_mnist(None, split)
    raise RequestError(f"{name} needs to know where its files are: {name}:PATH.")
