"""A checkpoint is whole or it is not there, at whatever instant its writer ends."""

import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import RequestError
from manyhands.training import checkpoints as subject
from manyhands.training.checkpoints import (
    Facts,
    checkpoints,
    load_model_file,
    newest,
    read,
    save_model,
    write,
)
from tests.training.saved import FILES, MODEL, OPTIMISER, bits, facts, names, write_small

Tensors = dict[str, torch.Tensor]

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any pattern of bits: NaNs with a payload, infinities, negative zeros, subnormals."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (math.prod(shape) * size,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@given(shape=st.lists(st.integers(0, 4), max_size=4), seed=st.integers(0, 2**32))
@settings(max_examples=4, deadline=None)
def test_every_bit_of_every_type_comes_back(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    tensor = random_bits(dtype, *shape)
    path = write(tmp_path_factory.mktemp("any"), facts(1), {"w": tensor}, {"exp_avg/w": tensor}, 1)
    found = read(path)
    for stored in (found.model["w"], found.optimiser["exp_avg/w"]):
        assert stored.dtype == dtype and stored.shape == tensor.shape
        assert bits(stored) == bits(tensor)


def test_everything_the_run_said_comes_back(tmp_path: Path) -> None:
    said = facts(
        7, seed=2**63 + 1, notes={"best": math.inf, "third": 1 / 3, "name": "größer", "draws": [2**70]}
    )
    found = read(write(tmp_path, said, MODEL, OPTIMISER, 1)).manifest
    assert Facts.model_validate(found.model_dump(include=set(Facts.model_fields))) == said
    assert list(found.tensors.items()) == [
        ("conv1.weight", "float32 2x3x2x2"),
        ("bn1.running_mean", "float32 2"),
    ]


def test_tied_and_sliced_and_transposed_weights_are_written_as_they_are_seen(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    model = {"a": whole, "tied": whole, "rows": whole[1:3], "turned": whole.t(), "last": whole[:, 5]}
    found = read(write(tmp_path, facts(1), model, {}, 1)).model
    assert set(found) == set(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_a_part_is_what_slicing_the_whole_gives(tmp_path: Path) -> None:
    found = read(write_small(tmp_path, 1)).model
    index = (slice(1, 2), slice(0, 2))
    assert torch.equal(found.part("conv1.weight", index), MODEL["conv1.weight"][index])
    for ask in (found.__getitem__, lambda name: found.part(name, ())):
        with pytest.raises(KeyError):
            ask("conv2.weight")


def test_tensors_can_be_read_after_the_checkpoint_was_pruned(tmp_path: Path) -> None:
    found = read(write_small(tmp_path, 1, keep=1))
    write_small(tmp_path, 2, keep=1)
    assert not found.path.exists()
    assert torch.equal(found.model["conv1.weight"], MODEL["conv1.weight"])


def test_files_can_be_read_by_whom_the_user_lets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = write_small(tmp_path, 1)
        save_model(tmp_path / "m.safetensors", MODEL, {})
    finally:
        os.umask(before)
    files = [*(path / name for name in FILES), tmp_path / "m.safetensors"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}


@given(steps=st.lists(st.integers(0, 12), min_size=1, max_size=8), keep=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_the_last_ones_are_kept_and_later_steps_are_left_alone(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    expected: set[int] = set()
    for step in steps:
        write_small(folder, step, keep)
        older = sorted((expected | {step}) & set(range(step + 1)))
        expected = {s for s in expected if s > step} | set(older[-keep:])
    assert names(folder) == [f"step-{step:08d}" for step in sorted(expected)]
    assert [path.name for path in checkpoints(folder)] == names(folder)[::-1]


def test_left_overs_are_cleared_and_strangers_are_not(tmp_path: Path) -> None:
    for name in (
        ".writing-step-00000003",
        ".discarded-step-00000001",
        ".discarded-step-00000002.old",
        "mine",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-notes.txt").write_text("not ours")
    write_small(tmp_path, 4)
    assert names(tmp_path) == ["mine", "step-00000004", "step-notes.txt"]


def test_of_two_checkpoints_of_a_step_the_later_counts_and_the_displaced_one_goes(tmp_path: Path) -> None:
    """As a writer leaves them that was killed just after it had written a step again."""
    path = write_small(tmp_path, 1)
    shutil.copytree(path, tmp_path / "step-00000001.old")
    (tmp_path / "step-00000002").write_text("a file is no checkpoint")
    assert [found.name for found in checkpoints(tmp_path)] == ["step-00000001", "step-00000001.old"]
    found = newest(tmp_path)
    assert found is not None and found.path == path and found.warnings == ()
    write_small(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_whole_checkpoint_is_never_pruned_for_a_damaged_one(tmp_path: Path) -> None:
    """Fewer are to be kept from now on, the newest is damaged, and the write fails."""
    for step in (1, 2):
        write_small(tmp_path, step)
    (tmp_path / "step-00000002" / FILES[1]).write_bytes(b"")
    with pytest.raises(RequestError, match="complex128"):
        write(tmp_path, facts(3), {"w": torch.zeros(1, dtype=torch.complex128)}, {}, 1)
    found = newest(tmp_path)
    assert found is not None and found.manifest.step == 1


# Killed writers.


def write_until_killed(folder: Path, num_floats: int) -> None:
    torch.set_num_threads(1)
    found = newest(folder)
    step = found.manifest.step if found else 0
    while True:
        step += 1
        model = {f"{i}.weight": torch.full((num_floats,), float(step)) for i in range(4)}
        write(folder, facts(step), model, {f"momentum_buffer/{n}": t for n, t in model.items()}, 2)


def write_and_die(folder: Path, step: int, death: int) -> None:
    """Write a checkpoint, and be gone at the death-th time that anything is opened, named or removed."""
    torch.set_num_threads(1)
    left = death

    def hook(event: str, _: object) -> None:
        nonlocal left
        if event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod"}:
            left -= 1
            if left == 0:
                os._exit(9)  # no `finally` is run, as after kill -9

    sys.addaudithook(hook)
    write_small(folder, step, keep=1)
    os._exit(0)


@pytest.fixture(scope="module")
def forked() -> multiprocessing.context.ForkServerContext:
    """Processes that start with torch already imported: seconds matter when there are a hundred of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def test_killed_at_any_instant_a_checkpoint_is_left_that_loads(tmp_path: Path, forked) -> None:
    """30 times kill -9, most of them while a file is being written."""
    generator = random.Random(20)
    mid_write = 0
    for _ in range(30):
        before = checkpoints(tmp_path)
        writer = forked.Process(target=write_until_killed, args=(tmp_path, 500_000))
        writer.start()
        deadline = time.monotonic() + 60
        while checkpoints(tmp_path)[:1] == before[:1]:  # until it has written one
            assert writer.is_alive() and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.2))
        writer.kill()
        writer.join()
        mid_write += any(name.startswith(".writing-") for name in names(tmp_path))
        found = newest(tmp_path)
        assert found is not None and found.warnings == ()
        assert all(read(path) for path in checkpoints(tmp_path))
        step = float(found.manifest.step)
        tensors = [*found.model.values(), *found.optimiser.values()]
        assert len(tensors) == 8 and all(bool((tensor == step).all()) for tensor in tensors)
        assert len(names(tmp_path)) <= 2 + 1
    print(f"{mid_write} of 30 kills landed in the middle of a write")
    assert mid_write >= 8
    write_small(tmp_path, 10**6, keep=2)
    assert [name[0] for name in names(tmp_path)] == ["s", "s"]


@pytest.mark.parametrize(
    ("there", "step"),
    [((1,), 2), ((1,), 1), ((0, 1), 2)],
    ids=["next step", "same step again", "after one that was killed before it pruned"],
)
def test_killed_between_any_two_operations_a_checkpoint_is_left_that_loads(
    tmp_path: Path, forked, there: tuple[int, ...], step: int
) -> None:
    """Only one is kept, so that nothing but the right order can save it."""
    for earlier in there:
        write_small(tmp_path / "first", earlier)
    for death in range(1, 200):
        folder = tmp_path / str(death)
        shutil.copytree(tmp_path / "first", folder)
        writer = forked.Process(target=write_and_die, args=(folder, step, death))
        writer.start()
        writer.join(60)
        found = newest(folder)
        assert found is not None and found.warnings == (), death
        assert all(read(path) for path in checkpoints(folder)), (
            death
        )  # none is half deleted under a good name
        assert len(names(folder)) <= 2, death
        write_small(folder, 3, keep=1)
        assert names(folder) == ["step-00000003"], death
        if writer.exitcode == 0:
            break
        assert writer.exitcode == 9, death
    print(f"{death - 1} places to die at")
    assert 10 < death < 199


# Full disks.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB and 32 files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=32", "none", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if mounted.returncode:
        pytest.skip(f"only root can mount a small disk: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # what was read from it is still open


def fill_bytes(disk: Path) -> None:
    (disk / "other").write_bytes(bytes(3 * 2**20))


def fill_inodes(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        for i in range(100):
            (disk / f"other-{i}").touch()


def leave_two_inodes(disk: Path) -> None:
    """The folder and a file can still be made: it fails halfway."""
    fill_inodes(disk)
    for i in range(2):
        (disk / f"other-{i}").unlink()


@pytest.mark.parametrize("fill", [fill_bytes, fill_inodes, leave_two_inodes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("noticed", ["first", "late"])
def test_a_full_disk_is_refused_and_the_old_checkpoint_is_intact(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, fill, noticed: str
) -> None:
    folder = small_disk / "run"
    write_small(folder, 1, keep=1)
    fill(small_disk)
    if noticed == "late":  # somebody else takes the room after it was found free
        monkeypatch.setattr(subject, "_require_space", lambda *_: None)
    large = {"w": torch.zeros(2**19)}  # 2 MiB
    with pytest.raises(RequestError) as raised:
        write(folder, facts(2), large, {}, keep=1)
    message = str(raised.value)
    assert str(folder) in message and "2.2 MB are needed" in message
    assert "step-00000001, written before, is intact" in message and "\n" not in message
    assert names(folder) == ["step-00000001"]
    found = newest(folder)
    assert found is not None and torch.equal(found.model["conv1.weight"], MODEL["conv1.weight"])


def test_a_model_file_on_a_full_disk_leaves_what_was_there(small_disk: Path) -> None:
    path = small_disk / "model.safetensors"
    save_model(path, MODEL, {"model": "demo"})
    fill_bytes(small_disk)
    with pytest.raises(RequestError, match=r"No space left.* What was there is as it was"):
        save_model(path, {"w": torch.zeros(2**19)}, {})
    assert names(small_disk) == ["model.safetensors", "other"]
    assert load_model_file(path).metadata == {"model": "demo"}


def test_no_room_for_the_first_checkpoint_says_that_there_is_none(small_disk: Path) -> None:
    with pytest.raises(RequestError, match=r"4\.\d MB free; 8\.5 MB are needed\. No checkpoint was there"):
        write(small_disk, facts(1), {"w": torch.zeros(2**21)}, {}, 1)
    assert names(small_disk) == []


@pytest.mark.parametrize("save", [write_small, lambda folder, _: save_model(folder / "m", MODEL, {})])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, save) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="file/sub.* cannot be written"):
        save(tmp_path / "file" / "sub", 1)
