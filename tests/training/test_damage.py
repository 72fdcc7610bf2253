"""Whatever stands in the place of a checkpoint and is none, or none of this model, is refused by name."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from manyhands.errors import RequestError
from manyhands.training import checkpoints as subject
from manyhands.training.checkpoints import (
    load_model_file,
    newest,
    read,
    require_model,
    save_model,
)
from tests.training.saved import FILES, MODEL, bits, names, write_small


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("sound"), 1)


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / sound.name))


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_refused_by_name(copy: Path, name: str) -> None:
    content = (copy / name).read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        (copy / name).write_bytes(damaged)
        with pytest.raises(RequestError, match=name):
            read(copy)
    (copy / name).write_bytes(content)
    read(copy)


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_refused_by_name(copy: Path, name: str) -> None:
    content = (copy / name).read_bytes()
    for length in range(len(content)):
        (copy / name).write_bytes(content[:length])
        with pytest.raises(RequestError, match=f"{name} is (truncated|damaged)"):
            read(copy)
    (copy / name).write_bytes(content + b" ")
    with pytest.raises(RequestError, match=name):
        read(copy)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_refused_by_name(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(RequestError, match=f"{name} is missing"):
        read(copy)


def sign(path: Path, change: dict[str, object], drop: str = "") -> None:
    """Rewrite a manifest with a right checksum, so that only its content is wrong."""
    values = json.loads((path / "manifest.json").read_text()) | change
    values.pop(drop, None)
    content = json.dumps(values | {"checksum": "0" * 64}).encode()
    signed = content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)
    (path / "manifest.json").write_bytes(signed)


WRONG_MANIFESTS = {
    "of a later format": ({"format": 2, "manyhands": "0.9"}, "", "format 2, written by manyhands 0.9;"),
    "of no format": ({}, "format", "format None"),
    "with an unknown key": ({"stpe": 3}, "", "stpe: extra inputs are not permitted"),
    "without a step": ({}, "step", "step: field required"),
    "with a step before the first": ({"step": -1}, "", "step: input should be greater"),
    "with a stranger's file": ({"files": {"../x": {"num_bytes": 1, "sha256": "0"}}}, "", "files"),
    "with no files": ({"files": {}}, "", "files"),
}


@pytest.mark.parametrize("what", WRONG_MANIFESTS)
def test_a_manifest_of_another_kind_is_refused(copy: Path, what: str) -> None:
    sign(copy, {})
    read(copy)  # the signature is right: what is refused below is the content
    change, drop, words = WRONG_MANIFESTS[what]
    sign(copy, change, drop)
    with pytest.raises(RequestError, match="manifest.json") as raised:
        read(copy)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_no_checkpoint_is_refused_with_a_way_out(sound: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", sound / FILES[1]):
        with pytest.raises(RequestError, match=r"is not a checkpoint: it has no manifest\.json"):
            read(path)
    with pytest.raises(RequestError, match=r"it holds some, the newest is .*step-00000001"):
        read(sound.parent)


def test_the_newest_whole_one_is_found_and_the_damaged_ones_are_told(tmp_path: Path) -> None:
    assert newest(tmp_path) is None and newest(tmp_path / "nowhere") is None
    paths = [write_small(tmp_path, step) for step in (1, 2, 3)]
    damaged = (paths[2] / FILES[1], paths[1] / FILES[0])
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1])
    found = newest(tmp_path)
    assert found is not None and found.manifest.step == 1
    assert len(found.warnings) == 2
    assert all(str(file) in warning for file, warning in zip(damaged, found.warnings, strict=True))
    (paths[0] / FILES[2]).unlink()
    with pytest.raises(
        RequestError, match=r"no checkpoint in .* can be used; of the newest, .*step-00000003"
    ):
        newest(tmp_path)


# Another model.


OTHER_MODELS = {
    "shape": (
        {"conv1.weight": torch.zeros(2, 3, 7, 7)},
        "conv1.weight is float32 2x3x2x2 there and float32 2x3x7x7 here",
    ),
    "type": ({"bn1.running_mean": torch.ones(2).double()}, "is float32 2 there and float64 2 here"),
    "more": ({"fc.bias": torch.tensor(0.0)}, "fc.bias is missing there and float32 scalar here"),
    "less": ({"conv1.weight": None}, "conv1.weight is float32 2x3x2x2 there and missing here"),
}


@pytest.mark.parametrize("what", OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(sound: Path, what: str) -> None:
    change, words = OTHER_MODELS[what]
    other = {name: tensor for name, tensor in (MODEL | change).items() if tensor is not None}
    with pytest.raises(RequestError) as raised:
        require_model(read(sound), other, "resnet18")
    assert words in str(raised.value) and f"{sound} is of demo, not resnet18" in str(raised.value)
    with pytest.raises(RequestError, match="another form of demo"):
        require_model(read(sound), other, "demo")


def test_the_same_model_is_recognised_without_its_weights(sound: Path) -> None:
    meta = {name: tensor.to("meta") for name, tensor in reversed(MODEL.items())}
    require_model(read(sound), meta, "elsewhere/net.py:build")


# Whole models in one file.


def test_a_model_file_comes_back_with_what_it_says_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.safetensors"
    for metadata in ({"model": "demo", "input": "1x28x28", "anchors": "[[1, 2]]"}, {}):
        save_model(path, MODEL, metadata)
        found = load_model_file(path)
        assert found.metadata == metadata
        assert {name: bits(t) for name, t in found.tensors.items()} == {n: bits(t) for n, t in MODEL.items()}
    assert names(path.parent) == [path.name]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle", b"\x80\x02" * 40])
def test_what_is_no_model_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"model\.pt is not a whole safetensors file"):
        load_model_file(path)
    with pytest.raises(RequestError, match="there is no file"):
        load_model_file(tmp_path / "nowhere")


def test_a_truncated_model_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, MODEL, {"model": "demo"})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(RequestError, match="is not a whole safetensors file"):
            load_model_file(path)


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(RequestError, match=f"keep = {keep}"):
        write_small(tmp_path, 1, keep)


def test_two_writers_in_one_folder_are_refused(tmp_path: Path) -> None:
    with subject._only_writer(tmp_path), pytest.raises(RequestError, match="another process is writing"):
        write_small(tmp_path, 1)
    write_small(tmp_path, 1)
