"""CIFAR-10 reads the same from every form, and a python batch is never unpickled."""

import hashlib
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from manyhands.data.opening import open_dataset
from manyhands.data.pickled import read_batch
from manyhands.errors import RequestError
from tests.data.places import real_data

PER_BATCH = 4
BATCHES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
IMAGES = np.random.default_rng(0).integers(256, size=(6 * PER_BATCH, 32, 32, 3), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(10, size=6 * PER_BATCH, dtype=np.uint8)


def planes(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)


def binary(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    return np.concatenate([labels[:, None], planes(images)], axis=1).tobytes()


def python_2(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    """A batch as the original has it, instruction by instruction: python 2.7's cPickle, protocol 2."""

    def text(words: bytes) -> bytes:
        return b"U" + bytes([len(words)]) + words

    pixels = planes(images).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85" + text(b"b") + b"\x87R"
    )
    dtype = (
        b"cnumpy\ndtype\nq\x05"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xff"
    )
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01M" + struct.pack("<H", len(images)) + b"M\x00\x0c\x86" + dtype + b"\x89"
    state += b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    halves = [b"(" + b"".join(b"K" + bytes([x]) for x in half) + b"e" for half in np.split(labels, 2)]
    numbers = b"]q\x09" + b"".join(halves)  # a long list comes in parts
    names = b"](" + b"".join(text(b"cat_%d.png" % n) for n in range(len(images))) + b"e"
    pairs = text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + numbers
    return b"\x80\x02}q\x00(" + pairs + text(b"data") + array + state + text(b"filenames") + names + b"u."


def python_3(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    return pickle.dumps({b"data": planes(images), b"labels": labels.tolist()}, protocol=3)


def strips(path: Path) -> Path:
    """The packed form, two images a strip."""
    meta = {"classes": [str(n) for n in range(10)], "per_strip": 2, "train": 20, "test": 4}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta.json", json.dumps(meta))
        archive.writestr("labels.bin", LABELS.tobytes())
        for number in range(12):
            buffer = io.BytesIO()
            strip = IMAGES[2 * number : 2 * number + 2].reshape(64, 32, 3)
            PIL.Image.fromarray(strip).save(buffer, "WEBP", lossless=True, exact=True)
            archive.writestr(f"strips/{number:03}.webp", buffer.getvalue())
    return path


FORMS = {"binary": (binary, ".bin"), "python 2": (python_2, ""), "python 3": (python_3, "")}


def folder(path: Path, form: str) -> Path:
    writer, ending = FORMS[form]
    path.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        part = slice(number * PER_BATCH, (number + 1) * PER_BATCH)
        (path / f"{name}{ending}").write_bytes(writer(IMAGES[part], LABELS[part]))
    return path


def assert_is_all(reference: str) -> None:
    for split, part in (("train", slice(0, 20)), ("test", slice(20, 24))):
        data = open_dataset(reference, split)
        samples = [data.read(number) for number in range(len(data))]
        assert np.array_equal([sample.image for sample in samples], IMAGES[part])
        assert [sample.target for sample in samples] == LABELS[part].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_batches_in_a_folder_and_in_an_archive(tmp_path: Path, form: str) -> None:
    path = folder(tmp_path / "set" / "cifar-10-batches-py", form)
    assert_is_all(f"cifar10:{path}")
    assert_is_all(f"cifar10:{path.parent}")
    with tarfile.open(tmp_path / "set.tar.gz", "w:gz") as archive:
        archive.add(path, path.name)
    assert_is_all(f"cifar10:{tmp_path / 'set.tar.gz'}")


def test_packed_strips(tmp_path: Path) -> None:
    assert_is_all(f"cifar10:{strips(tmp_path / 'set.zip')}")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_batch_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps({"labels": [1], "x": Evil()}, protocol=protocol)
    with pytest.raises(ValueError, match="it asks for"):
        read_batch(content)
    assert not (tmp_path / "pwned").exists()


def test_an_array_of_another_order_or_number_is_refused() -> None:
    data = np.asfortranarray(planes(IMAGES[:2]))
    with pytest.raises(ValueError, match="its array is not stored row by row"):
        read_batch(pickle.dumps({"labels": [1, 2], "data": data}, protocol=3))
    with pytest.raises(ValueError, match="6144 bytes of images and 3 labels do not go together"):
        read_batch(pickle.dumps({"labels": [1, 2, 3], "data": planes(IMAGES[:2])}, protocol=3))
    with pytest.raises(ValueError, match="it holds more than one array"):
        read_batch(
            pickle.dumps({"labels": [1], "a": planes(IMAGES[:1]), "b": planes(IMAGES[1:2])}, protocol=3)
        )
    with pytest.raises(ValueError, match="label 12 is none of 0 to 9"):
        read_batch(pickle.dumps({"labels": [1, 12], "data": planes(IMAGES[:2])}, protocol=3))


def test_damage_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "bin", "binary")
    file = path / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RequestError, match=r"data_batch_3.bin is damaged: 12291 bytes are no whole number"):
        open_dataset(f"cifar10:{path}", "train")
    file.unlink()
    with pytest.raises(
        RequestError, match=r"bin has no data_batch_3.bin, which CIFAR-10's train images need"
    ):
        open_dataset(f"cifar10:{path}", "train")
    path = folder(tmp_path / "py", "python 2")
    (path / "test_batch").write_bytes((path / "test_batch").read_bytes()[:-200])
    with pytest.raises(
        RequestError, match=r"test_batch is not a python batch of CIFAR-10: it cannot be followed"
    ):
        open_dataset(f"cifar10:{path}", "test")
    whole = strips(tmp_path / "set.zip").read_bytes()
    place = whole.index(b"strips/001.webp") + 200
    (tmp_path / "set.zip").write_bytes(whole[:place] + b"damage" + whole[place + 6 :])
    with pytest.raises(RequestError, match=r"set.zip is damaged: strips/001.webp: Bad CRC-32"):
        open_dataset(f"cifar10:{tmp_path / 'set.zip'}", "train").read(2)
    (tmp_path / "set.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match=r"set.zip is damaged or neither a folder, a tar nor a zip"):
        open_dataset(f"cifar10:{tmp_path / 'set.zip'}", "train")


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_real_one_is_pixel_exact(split: str) -> None:
    path = real_data("cifar10_webp.zip")
    data = open_dataset(f"cifar10:{path}", split)
    meta = json.loads(zipfile.ZipFile(path).read("meta.json"))
    digest = hashlib.sha256()
    for number in range(len(data)):
        digest.update(data.read(number).image.tobytes())
    assert (len(data), digest.hexdigest()) == (meta[split], meta[f"sha256_{split}_images_HWC"])
    assert [data.target(number) for number in range(3)] == {"train": [6, 9, 9], "test": [3, 8, 8]}[split]
