"""Fashion-MNIST, or any set of the same four IDX files; the small part in the package where none is named."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.data.blocks import Block, held
from manyhands.data.idx import fashion_mnist_small, read_idx
from manyhands.errors import RequestError

CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
PREFIXES = {"train": "train", "test": "t10k"}


def open_fashion_mnist(path: Path | None, split: str) -> Block:
    """The images of a folder with `train-images-idx3-ubyte.gz` and its three fellows, packed or plain."""
    if path is None:
        train_images, train_labels, test_images, test_labels = fashion_mnist_small()
        images, labels = (train_images, train_labels) if split == "train" else (test_images, test_labels)
        return held("fashion-mnist", CLASSES, images[..., None], labels)
    if not path.is_dir():
        raise RequestError(f"there is no folder {path}; fashion-mnist wants the folder of its IDX files.")
    images = _array(path, f"{PREFIXES[split]}-images-idx3-ubyte", 3)
    labels = _array(path, f"{PREFIXES[split]}-labels-idx1-ubyte", 1)
    return held(str(path), CLASSES, images[..., None], labels)


def _array(folder: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    found = [folder / option for option in (name, f"{name}.gz") if (folder / option).is_file()]
    if not found:
        raise RequestError(f"{folder} holds neither {name} nor {name}.gz.")
    try:
        array = read_idx(found[0])
    except (ValueError, OSError) as error:
        raise RequestError(f"{error}.") from None
    if array.ndim != dimensions:
        raise RequestError(f"{found[0]} has {array.ndim} dimensions, {dimensions} are right.")
    return array
