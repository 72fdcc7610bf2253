"""Any tiling of any step puts together to the same batch, whatever is damaged and wherever one starts."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.data.augmentation import Recipe
from manyhands.data.batches import Loader
from manyhands.data.opening import open_dataset
from manyhands.data.own import OwnData
from manyhands.data.samples import Dataset, First, Sample
from manyhands.errors import RequestError, RunError
from manyhands.ir.geometry import Axis, Cut, Layout, Tile
from tests.data import sets
from tests.data.places import real_data

EVERYTHING = {"crop": 2, "flip": True, "colour": 0.4, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
LABELLED = Recipe((3, 8, 8), **EVERYTHING)
BOXED = Recipe((3, 16, 12), mosaic=True, max_boxes=6, **EVERYTHING)
SHAPES = {"imagefolder": (4, 3, 8, 8), "cards": (4, 3, 16, 12)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """One labelled and one boxed data set, each with a damaged image."""
    folder = tmp_path_factory.mktemp("data")
    labelled = sets.image_folder(folder / "labelled", 10)
    (labelled / "cat" / "03.png").write_bytes((labelled / "cat" / "03.png").read_bytes()[:90])
    boxed = sets.cards(folder / "boxed")
    (boxed / "images" / "2.png").unlink()
    return {
        "imagefolder": open_dataset(f"imagefolder:{labelled}", "train"),
        "cards": open_dataset(f"cards:{boxed}", "train"),
    }


RECIPES = {"imagefolder": LABELLED, "cards": BOXED}


def whole(dataset: Dataset, recipe: Recipe, step: int, **options: object) -> tuple[Tensor, Tensor]:
    with Loader(dataset, recipe, 4, 3, True, workers=1, ahead=0, **options) as loader:
        return loader.take(step)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    cuts = tuple(Cut(axis, draw(st.integers(1, 3))) for axis in draw(st.permutations(list(Axis)))[:2])
    count = cuts[0].count * cuts[1].count
    shares = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count).filter(any))
    return Layout(tuple(f"d{number}" for number in range(count)), cuts, tuple(shares))


@pytest.mark.parametrize("form", RECIPES)
@settings(max_examples=40, deadline=None)
@given(layout=layouts(), step=st.integers(0, 12))
def test_the_tiles_of_any_layout_put_together_are_the_batch(
    data, form: str, layout: Layout, step: int
) -> None:
    images, targets = whole(data[form], RECIPES[form], step)
    together = torch.full_like(images, torch.nan)
    for tile in layout.tiles(SHAPES[form]).values():
        part, all_targets = whole(data[form], RECIPES[form], step, tile=tile)
        assert part.shape == tile.shape and part.dtype == torch.float32
        together[tile.within(Tile.whole(images.shape))] = part
        assert torch.equal(all_targets, targets)
    assert torch.equal(together, images)


@pytest.mark.parametrize("form", RECIPES)
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.integers(0, 9), min_size=1, max_size=8), ahead=st.integers(0, 3))
def test_a_step_is_the_same_however_one_comes_to_it(data, form: str, steps: list[int], ahead: int) -> None:
    with Loader(data[form], RECIPES[form], 4, 3, True, ahead=ahead, workers=3) as loader:
        for step in steps:
            images, targets = loader.take(step)
            expected = whole(data[form], RECIPES[form], step)
            assert torch.equal(images, expected[0]) and torch.equal(targets, expected[1])


@pytest.mark.parametrize("form", RECIPES)
def test_seed_epoch_and_sample_each_change_the_picture(data, form: str) -> None:
    """Two epochs of one sample differ, two seeds differ; with nothing random nothing differs."""
    one = First(data[form], 1)
    loaders = [Loader(one, RECIPES[form], 1, seed, False) for seed in (0, 1)]
    plain = Loader(one, Recipe(RECIPES[form].size), 1, 0, False)
    pictures = [loader.take(step)[0] for loader in loaders for step in (0, 1)]
    assert not any(torch.equal(a, b) for n, a in enumerate(pictures) for b in pictures[:n])
    assert torch.equal(plain.take(0)[0], plain.take(1)[0])
    for loader in (*loaders, plain):
        loader.close()


def test_an_epoch_has_every_sample_once_and_the_next_another_order(data) -> None:
    with Loader(data["imagefolder"], LABELLED, 5, 3, True) as loader:
        assert loader.steps_per_epoch == 2
        epochs = [loader.samples(2 * epoch) + loader.samples(2 * epoch + 1) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    with Loader(data["imagefolder"], LABELLED, 4, 3, False) as loader:
        assert [loader.samples(step)[0] for step in range(4)] == [0, 4, 0, 4]  # the last two are left out


def test_evaluation_is_every_sample_in_order_unchanged(data) -> None:
    with Loader(data["imagefolder"], LABELLED, 4, 3, True, training=False) as loader:
        batches = [loader.take(step) for step in range(loader.steps_per_epoch)]
        valid = [loader.valid(step) for step in range(loader.steps_per_epoch)]
    assert valid == [4, 4, 2]
    images = torch.cat([batch[0][:count] for batch, count in zip(batches, valid, strict=True)])
    labels = torch.cat([batch[1][:count] for batch, count in zip(batches, valid, strict=True)])
    order = [0, 1, 2, 4, 4, 5, 6, 7, 8, 9]  # image 3 is damaged, the next stands in
    pixels = torch.from_numpy(np.stack([sets.picture(n) for n in order])).permute(0, 3, 1, 2)
    mean, std = torch.tensor(LABELLED.mean).view(3, 1, 1), torch.tensor(LABELLED.std).view(3, 1, 1)
    assert torch.equal(images, (pixels.float() / 255 - mean) / std)
    assert labels.dtype == torch.int64 and labels.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert batches[2][0].shape == (4, 3, 8, 8) and torch.equal(batches[2][0][3], batches[2][0][1])


def test_boxes_are_filled_up_with_label_minus_one(data) -> None:
    recipe = Recipe((3, 16, 12), max_boxes=6)
    with Loader(data["cards"], recipe, 2, 0, False, training=False) as loader:
        _, boxes = loader.take(0)
    assert boxes.shape == (2, 6, 5) and boxes.dtype == torch.float32
    assert boxes[:, :, 0].tolist() == [[0, -1, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]]
    assert boxes[1, 0].tolist() == [1, *sets.BOX]  # the size it has already
    assert boxes[0, 0].tolist() == [0, 2, 1 + 4, 10, 7 + 4]  # four rows of grey above


@pytest.mark.parametrize("form", RECIPES)
def test_damaged_images_are_named_counted_and_replaced_alike(data, form: str) -> None:
    tiles = [
        None,
        *(Tile.whole(SHAPES[form]).with_span(0, Tile.parse(span).spans[0]) for span in ("0:2", "2:4")),
    ]
    found = []
    for tile in tiles:
        with Loader(data[form], RECIPES[form], 4, 3, True, tile=tile) as loader:
            for step in range(2 * loader.steps_per_epoch + 3):
                loader.take(step)
            found.append(loader.damaged)
    name = {"imagefolder": "cat/03.png", "cards": "images/2.png"}[form]
    assert found[0] == found[1] == found[2]
    assert (
        list(found[0]) == [name] and ("truncated" if form == "imagefolder" else "missing") in found[0][name]
    )


def test_more_damaged_images_than_allowed_are_refused(tmp_path: Path) -> None:
    folder = sets.image_folder(tmp_path, 8)
    for number in (1, 2, 6):
        next(folder.rglob(f"{number:02}.png")).write_bytes(b"nonsense")
    dataset = open_dataset(f"imagefolder:{folder}", "train")
    with Loader(dataset, LABELLED, 4, 0, False, damaged_limit=3) as loader:
        assert len(loader.take(0)[1]) == len(loader.take(1)[1]) == 4
        assert list(loader.damaged) == ["cat/01.png", "cat/02.png", "dog/06.png"]
    message = "3 images cannot be read, and 2 are allowed; the first is cat/01.png: is not an image."
    with Loader(dataset, LABELLED, 4, 0, False, damaged_limit=2) as loader:
        loader.take(0)
        with pytest.raises(RequestError, match=message):
            loader.take(1)


def test_a_data_set_with_nothing_sound_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        sets.write(tmp_path / "cat" / f"{number}.png", b"nonsense")
    with (
        Loader(open_dataset(f"imagefolder:{tmp_path}", "train"), LABELLED, 2, 0, False) as loader,
        pytest.raises(RequestError, match="3 images cannot be read"),
    ):
        loader.take(0)


def test_an_image_lost_on_the_way_stops_the_run(tmp_path: Path) -> None:
    """The other devices still count on it, so nothing may stand in for it here."""
    folder = sets.image_folder(tmp_path, 4)
    with Loader(open_dataset(f"imagefolder:{folder}", "train"), LABELLED, 4, 0, False, ahead=0) as loader:
        loader.take(0)
        (folder / "dog" / "02.png").unlink()
        with pytest.raises(RunError, match=r"dog/02.png could be read before and cannot now: is missing"):
            loader.take(1)


def test_wrong_sizes_are_refused_with_both(data, tmp_path: Path) -> None:
    sets.write(sets.image_folder(tmp_path) / "cat" / "01.png", sets.png(sets.picture(1, 6, 9)))
    dataset = open_dataset(f"imagefolder:{tmp_path}", "train")
    with (
        Loader(dataset, LABELLED, 2, 0, False) as loader,
        pytest.raises(RequestError, match=r"cat/01.png is 6x9 and the model takes 8x8. .*resize = true"),
    ):
        loader.take(0)
    with Loader(dataset, Recipe((3, 8, 8), resize=True), 2, 0, False) as loader:
        assert loader.take(0)[0].shape == (2, 3, 8, 8)
    with pytest.raises(RequestError, match="a batch of 11 cannot be had of 10 samples"):
        Loader(data["imagefolder"], LABELLED, 11, 0, False)


class Counting:
    """A data set that counts what is decoded."""

    kind, classes = property(lambda self: self.whole.kind), ("cat", "dog")

    def __init__(self, whole: Dataset) -> None:
        self.whole = whole
        self.read_count: dict[int, int] = {}
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, index: int) -> Sample:
        self.read_count[index] = self.read_count.get(index, 0) + 1
        self.threads.add(threading.current_thread().name)
        return self.whole.read(index)

    def target(self, index: int):
        return self.whole.target(index)

    def name_of(self, index: int) -> str:
        return self.whole.name_of(index)


@pytest.mark.parametrize("form", RECIPES)
def test_only_the_samples_of_the_tile_are_decoded_once_all_are_known(tmp_path: Path, form: str) -> None:
    folder = sets.image_folder(tmp_path, 4) if form == "imagefolder" else sets.cards(tmp_path)
    dataset = Counting(First(open_dataset(f"{form}:{folder}", "train"), 4))
    tile = Tile.whole(SHAPES[form]).with_span(0, Tile.parse("1:2").spans[0])
    with Loader(dataset, Recipe(RECIPES[form].size), 4, 0, False, tile=tile, ahead=0) as loader:
        for step in range(3):
            loader.take(step)
    assert dataset.read_count == {0: 1, 1: 3, 2: 1, 3: 1}


def test_the_next_steps_are_read_in_the_background(data) -> None:
    dataset = Counting(First(data["cards"], 2))
    with Loader(dataset, BOXED, 1, 0, False, ahead=2) as loader:
        loader.take(0)
        waiting = list(loader._waiting.values())
        assert len(waiting) == 2 and all(future.result(timeout=20) for future in waiting)
    assert all(name.startswith("reading") for name in dataset.threads)
    before = threading.active_count()
    loader.close()
    assert threading.active_count() <= before
    assert not any(thread.name in dataset.threads for thread in threading.enumerate())


class Own:
    """A person's own data set with random transforms of three kinds, slow enough to be disturbed."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        if index == 4:
            raise OSError("lost")
        time.sleep(0.002)
        noise = torch.rand(1, 4, 4) + np.random.random() + random.random()
        return noise + 100 * index, float(index)


def test_ones_own_data_draws_the_same_on_every_device_and_disturbs_nobody() -> None:
    dataset, recipe = OwnData("mine.py:train", Own()), Recipe((1, 4, 4))
    state = torch.get_rng_state()
    with Loader(dataset, recipe, 3, 7, True) as loader, Loader(dataset, recipe, 3, 7, True, ahead=0) as again:
        for step in (0, 1, 2, 5):
            images, targets = loader.take(step)
            until = time.monotonic() + 0.03  # as a training step with dropout draws while images are read
            while time.monotonic() < until:
                torch.rand(3), random.random(), np.random.random()
            same, _ = again.take(step)
            assert torch.equal(images, same)
            assert torch.equal((images.mean((1, 2, 3)) // 100), targets)
        assert loader.damaged == {"mine.py:train sample 4": "OSError: lost"}
    tile = Tile.parse("1:3,0:1,2:4,0:3")
    with Loader(dataset, recipe, 3, 7, True, tile=tile) as part:
        assert torch.equal(part.take(5)[0], images[1:3, :, 2:4, :3])
        assert torch.equal(part.take(5)[1], targets)
    with Loader(First(dataset, 1), recipe, 1, 7, True) as loader:
        assert not torch.equal(loader.take(0)[0], loader.take(1)[0])  # one sample, two epochs
    torch.set_rng_state(state)
    with Loader(dataset, recipe, 3, 7, True, ahead=0) as loader:
        loader.take(0)
        assert torch.equal(torch.get_rng_state(), state)


def test_ones_own_data_of_another_shape_is_refused() -> None:
    with (
        Loader(OwnData("mine.py:train", Own()), Recipe((1, 4, 5)), 2, 0, False) as loader,
        pytest.raises(RequestError, match=r"sample 0 has shape \(1, 4, 4\) and the model takes \(1, 4, 5\)"),
    ):
        loader.take(0)


def test_real_cards_with_everything_in_four_strips() -> None:
    dataset = open_dataset(f"cards:{real_data('detection/cards.tar')}", "train")
    recipe = Recipe((3, 96, 96), crop=8, flip=True, colour=0.3, mosaic=True)
    images, targets = whole(dataset, recipe, 70)
    layout = Layout(("a", "b", "c", "d"), (Cut(Axis.ROWS, 4),), (1, 2, 3, 1))
    parts = [whole(dataset, recipe, 70, tile=tile) for tile in layout.tiles(tuple(images.shape)).values()]
    assert torch.equal(torch.cat([part[0] for part in parts], dim=2), images)
    assert all(torch.equal(part[1], targets) for part in parts)
