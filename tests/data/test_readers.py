"""Every form of a data set gives the same samples, and what is not one is refused in one line."""

import gzip
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from manyhands.data.opening import open_dataset
from manyhands.data.samples import Damaged, Kind, check_labels, first
from manyhands.errors import RequestError
from tests.data import sets
from tests.data.places import real_data


def test_an_image_folder_is_its_files_in_order(tmp_path: Path) -> None:
    data = open_dataset(f"imagefolder:{sets.image_folder(tmp_path)}", "train")
    assert (data.classes, data.kind, len(data)) == (("cat", "dog"), Kind.CLASSES, 6)
    assert [data.read(n).target for n in range(6)] == [data.target(n) for n in range(6)] == [0, 0, 0, 1, 1, 1]
    assert all(np.array_equal(data.read(n).image, sets.picture(n)) for n in range(6))
    assert data.name_of(4) == "dog/04.png"


def test_grey_images_have_one_channel_and_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    deep = np.array([[0, 255, 256], [20000, 65280, 65535]], np.uint16)
    PIL.Image.fromarray(deep).save(sets.write(tmp_path / "a" / "deep.png", b""))
    PIL.Image.fromarray(sets.picture(0)[:, :, 0]).save(sets.write(tmp_path / "a" / "grey.png", b""))
    data = open_dataset(f"imagefolder:{tmp_path}", "train")
    assert data.read(0).image[:, :, 0].tolist() == [[0, 0, 1], [78, 255, 255]]
    assert np.array_equal(data.read(1).image, sets.picture(0)[:, :, :1])


def test_splits_of_an_image_folder_share_the_classes_of_the_training_images(tmp_path: Path) -> None:
    sets.image_folder(tmp_path / "train")
    sets.write(tmp_path / "val" / "dog" / "a.png", sets.png(sets.picture(9)))
    data = open_dataset(f"imagefolder:{tmp_path}", "test")
    assert (data.classes, len(data), data.target(0)) == (("cat", "dog"), 1, 1)
    sets.write(tmp_path / "val" / "dogs" / "a.png", sets.png(sets.picture(9)))
    with pytest.raises(RequestError, match=r"dogs is no class of the training images. Did you mean 'dog'\?"):
        open_dataset(f"imagefolder:{tmp_path}", "test")


@pytest.mark.parametrize("pack", ["folder", "tar", "zip"])
@pytest.mark.parametrize("form", ["cards", "coco", "yolo"])
def test_boxes_are_the_same_in_every_form(tmp_path: Path, form: str, pack: str) -> None:
    path = getattr(sets, form)(tmp_path / "set")
    if pack == "tar":
        path = sets.packed(path, tmp_path / "set.tar")
    if pack == "zip":
        path = Path(shutil.make_archive(str(tmp_path / "set"), "zip", path))
    data = open_dataset(f"{form}:{path}", "train")
    assert (data.classes, data.kind, len(data)) == (("cat", "dog"), Kind.BOXES, len(sets.SIZES))
    for number, size in enumerate(sets.SIZES):
        sample = data.read(number)
        assert np.array_equal(sample.image, sets.picture(number, *size))
        for target in (sample.target, data.target(number)):
            assert isinstance(target, np.ndarray) and target.dtype == np.float32
            np.testing.assert_allclose(target, [[number % 2, *sets.BOX]], rtol=1e-6)


def test_coco_finds_images_the_way_coco_keeps_them(tmp_path: Path) -> None:
    sets.coco(tmp_path / "plain")
    for split in ("train", "val"):
        shutil.copytree(tmp_path / "plain" / "images", tmp_path / f"{split}2017")
        name = f"instances_{split}2017.json"
        sets.write(tmp_path / "annotations" / name, (tmp_path / "plain" / "annotations.json").read_bytes())
        sets.write(tmp_path / "annotations" / f"captions_{split}2017.json", "{}")
    shutil.rmtree(tmp_path / "plain")
    for split, folder in (("train", "train2017"), ("test", "val2017")):
        data = open_dataset(f"coco:{tmp_path}", split)
        assert data.name_of(0) == f"{folder}/0.png"
        assert np.array_equal(data.read(0).image, sets.picture(0, *sets.SIZES[0]))


def test_crowds_are_left_out(tmp_path: Path) -> None:
    file = sets.coco(tmp_path) / "annotations.json"
    content = json.loads(file.read_text())
    content["annotations"][1]["iscrowd"] = 1
    file.write_text(json.dumps(content))
    data = open_dataset(f"coco:{file}", "train")
    assert [len(data.target(n)) for n in range(3)] == [1, 0, 1]


def test_without_names_the_classes_of_yolo_are_numbers(tmp_path: Path) -> None:
    (sets.yolo(tmp_path) / "classes.txt").unlink()
    assert open_dataset(f"yolo:{tmp_path}", "train").classes == ("0", "1")


@pytest.mark.parametrize("first_folder", ["train", "images"])
def test_yolo_knows_both_ways_to_name_splits(tmp_path: Path, first_folder: str) -> None:
    sets.yolo(tmp_path / "plain")
    for split in ("train", "valid"):
        for part in ("images", "labels"):
            place = f"{split}/{part}" if first_folder == "train" else f"{part}/{split}"
            shutil.copytree(tmp_path / "plain" / part, tmp_path / place)
    shutil.rmtree(tmp_path / "plain")
    for split, folder in (("train", "train"), ("test", "valid")):
        data = open_dataset(f"yolo:{tmp_path}", split)
        assert len(data) == len(sets.SIZES) and folder in data.name_of(0)
        np.testing.assert_allclose(data.target(1), [[1, *sets.BOX]], rtol=1e-6)


def test_fashion_mnist_comes_with_the_package() -> None:
    train, test = (open_dataset("fashion-mnist", split) for split in ("train", "test"))
    assert (len(train), len(test), len(train.classes)) == (2000, 500, 10)
    assert train.read(3).image.shape == (28, 28, 1)
    assert sorted({train.target(n) for n in range(2000)}) == list(range(10))


def test_the_playing_cards() -> None:
    path = real_data("detection/cards.tar")
    train, test = (open_dataset(f"cards:{path}", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (296, 67)
    assert sum(len(data.target(n)) for data in (train, test) for n in range(len(data))) == 670
    assert all(
        max(data.read(n).image.shape) == 416 for data in (train, test) for n in range(0, len(data), 20)
    )


OWN = """
import torch
class Pairs:
    classes = ["a", "b"]
    def __len__(self): return 4
    def __getitem__(self, index):
        if index > 3: raise IndexError
        return torch.full((1, 2, 2), float(index)), index % 2
def train(): return Pairs()
def empty(): return []
def fails(): raise OSError("no disk")
def words(): return [("a", "b")]
"""


def test_own_data(tmp_path: Path) -> None:
    file = sets.write(tmp_path / "mine.py", OWN)
    data = open_dataset(f"{file}:train", "train")
    assert (len(data), data.kind, data.classes) == (4, Kind.OWN, ("a", "b"))
    assert torch.equal(data.read(3).image, torch.full((1, 2, 2), 3.0)) and data.target(3) == 1


def test_first_is_a_part_and_labels_are_counted() -> None:
    data = first(open_dataset("fashion-mnist", "test"), 20)
    assert len(data) == 20
    check_labels(data, 10)
    with pytest.raises(RequestError, match=r"labels go up to 9 \(ankle boot\) and the model tells 6 classes"):
        check_labels(data, 6)
    with pytest.raises(RequestError, match="21 samples were asked for and the data set has 20"):
        first(data, 21)


def idx(*shape: int, value: int = 0) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return b"\x00\x00\x08" + bytes([len(shape)]) + sizes + bytes([value]) * int(np.prod(shape))


def damage(folder: Path) -> None:
    """Everything that can be wrong, side by side."""
    sets.write(folder / "mine.py", OWN)
    (folder / "bare").mkdir()
    sets.write(folder / "flat" / "1.png", sets.png(sets.picture(0)))
    sets.write(folder / "one-split" / "train" / "cat" / "1.png", sets.png(sets.picture(0)))
    sets.write(folder / "noise.tar", b"not an archive" * 100)
    sets.write(folder / "packed.tar.gz", gzip.compress(b"x" * 2000))
    for name, images, labels in (("many", 3, 2), ("far", 2, 2)):
        sets.write(folder / name / "train-images-idx3-ubyte", idx(images, 4, 4))
        sets.write(folder / name / "train-labels-idx1-ubyte", idx(labels, value=17))
    for name, line in (("word", "cat 0.5 0.5 1 1"), ("pixels", "0 120 80 40 40"), ("class", "5 .5 .5 .1 .1")):
        sets.write(sets.yolo(folder / name) / "labels" / "1.txt", f"0 .5 .5 .1 .1\n{line}\n")
    sets.write(folder / "unlabelled" / "images" / "1.png", sets.png(sets.picture(0)))
    file = sets.cards(folder / "backwards") / "annotations.json"
    file.write_text(file.read_text().replace("2.0, 1.0", "22.0, 1.0"))
    sets.write(folder / "nojson" / "annotations.json", '{"classes": [')
    sets.write(folder / "other" / "annotations.json", '{"classes": ["a"], "images": [{"file": "x"}]}')
    file = sets.coco(folder / "orphan") / "annotations.json"
    file.write_text(file.read_text().replace('"image_id": 11', '"image_id": 99'))
    with zipfile.ZipFile(folder / "strange.zip", "w") as archive:
        archive.writestr("readme", "hello")


MISTAKES = {
    "misspelt name": ("cifar", "no data set is called 'cifar'. Did you mean 'cifar10'?"),
    "unknown name": (
        "xyzzy:1",
        "There are cifar10, fashion-mnist, imagefolder, coco, yolo, cards and file.py",
    ),
    "no path": ("yolo", "yolo needs to know where its files are: yolo:PATH."),
    "no function": ("mine.py", "mine.py needs the name of its function: mine.py:function."),
    "missing file": ("cifar10:nowhere.zip", "there is no file or folder nowhere.zip."),
    "missing folder": ("imagefolder:nowhere", "there is no file or folder nowhere."),
    "missing json": ("coco:nowhere.json", "there is no file nowhere.json."),
    "missing own file": (
        "nowhere.py:train",
        "there is no file nowhere.py; one's own data is file.py:function.",
    ),
    "misspelt function": ("mine.py:trian", "mine.py has no function 'trian'. Did you mean 'train'?"),
    "empty own data": ("mine.py:empty", "mine.py:empty returned an empty data set."),
    "failing own data": ("mine.py:fails", "mine.py:fails failed: OSError: no disk"),
    "own words": ("mine.py:words", "A sample is a pair (x, y) of tensors, arrays or numbers."),
    "empty folder": ("imagefolder:bare", "bare holds no images in folders; it wants one folder a class."),
    "folder without classes": ("imagefolder:flat", "flat holds no images in folders"),
    "missing IDX": ("fashion-mnist:bare", "bare holds neither train-images-idx3-ubyte nor"),
    "too few labels": ("fashion-mnist:many", "many has 3 images and 2 labels."),
    "label out of range": (
        "fashion-mnist:far",
        "far image 0 has label 17, and the labels of 10 classes end at 9.",
    ),
    "no archive": ("cards:noise.tar", "noise.tar is damaged or neither a folder, a tar nor a zip"),
    "compressed archive": (
        "imagefolder:packed.tar.gz",
        "compressed as a whole, so it cannot be read by parts",
    ),
    "no CIFAR": ("cifar10:strange.zip", "strange.zip is no CIFAR-10: CIFAR-10 is cifar10_webp.zip,"),
    "no CIFAR folder": ("cifar10:bare", "bare holds no train batches: CIFAR-10 is"),
    "no cards": ("cards:bare", "bare has no annotations.json."),
    "broken json": ("cards:nojson", "nojson/annotations.json: Invalid JSON"),
    "other json": ("cards:other", "other/annotations.json: images.0.width: Field required."),
    "backward box": ("cards:backwards", "images/0.png has a box from (22, 1) to (10, 7), which ends before"),
    "box of no image": ("coco:orphan", "has a box for image 99, which it does not list."),
    "word for a class": ("yolo:word", "word/labels/1.txt line 2 is 'cat 0.5 0.5 1 1', not: class x y width"),
    "pixels for shares": (
        "yolo:pixels",
        "pixels/labels/1.txt line 2 has 120; x, y, width and height are shares",
    ),
    "box class out of range": (
        "yolo:class",
        "images/1.png has a box of class 5, and there are 2 classes (0 to 1).",
    ),
    "no labels": ("yolo:unlabelled", "unlabelled has no labels: labels/1.txt and 0 others are missing."),
    "no YOLO": ("yolo:bare", "bare holds no images/ for train"),
}


@pytest.mark.parametrize(("reference", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    damage(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as caught:
        open_dataset(reference, "train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    damage(tmp_path)
    with pytest.raises(RequestError, match="one-split has no folder test"):
        open_dataset(f"imagefolder:{tmp_path / 'one-split'}", "test")
    with pytest.raises(RequestError, match="there is no split 'exam'; there are train and test"):
        open_dataset("fashion-mnist", "exam")
    with pytest.raises(RequestError, match="holds no images with boxes for this split"):
        open_dataset(f"cards:{sets.cards(tmp_path / 'cards')}", "test")


def test_an_image_of_another_size_than_its_boxes_is_damaged(tmp_path: Path) -> None:
    sets.write(sets.cards(tmp_path) / "images" / "1.png", sets.png(sets.picture(1, 5, 5)))
    with pytest.raises(Damaged, match="5x5 pixels, its boxes are for 16x12"):
        open_dataset(f"cards:{tmp_path}", "train").read(1)


def test_names_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    sets.write(tmp_path / "secret.png", sets.png(sets.picture(0, 8, 12)))
    file = sets.cards(tmp_path / "set") / "annotations.json"
    file.write_text(file.read_text().replace("images/0.png", "../secret.png"))
    with pytest.raises(Damaged, match="lies outside the data set"):
        open_dataset(f"cards:{tmp_path / 'set'}", "train").read(0)
