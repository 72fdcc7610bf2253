"""A mistake in a job is one line and exit code 2; nothing that was there before is lost."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
from PIL import Image

from manyhands import models
from manyhands.runtime.hosts import local_addresses
from manyhands.training import checkpoints
from manyhands.training.checkpoints import Facts, OptimiserFacts
from tests.cli.commands import in_process

JOB = """
model = "demo"
data = "fashion-mnist"
batch = 4
steps = 2
devices = 1
folder = "{folder}/run"
"""
CLUSTER = """
[[device]]
name = "pi-0"
address = "{first}"
[[device]]
name = "pi-1"
address = "{second}"
[network]
port = {port}
"""


def job(folder: Path, old: str = "", new: str = "", more: str = "") -> str:
    text = JOB.format(folder=folder)
    assert old in text
    path = folder / "job.toml"
    path.write_text(text.replace(old, new) + more)
    return str(path)


def picture(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size)).save(path)


def write_checkpoint(folder: Path, model: str) -> Path:
    built = models.build(model)
    optimiser = OptimiserFacts(name="SGD", groups=({"lr": 0.1},))
    facts = Facts(
        model=model, input="1x28x28", plan=None, step=1, epoch=0, position=4, seed=0, optimiser=optimiser
    )
    return checkpoints.write(folder / "run" / "checkpoints", facts, built.state_dict(), {}, 3)


def misspelt_key(folder: Path) -> list[str]:
    return [job(folder, "batch = 4", "bacth = 4")]


def misspelt_inner_key(folder: Path) -> list[str]:
    return [job(folder, more="augment = { filp = true }\n")]


def misspelt_option(folder: Path) -> list[str]:
    return [job(folder, more='optimizer = { name = "sgd", lr = 0.1, momentun = 0.9 }\n')]


def unknown_optimizer(folder: Path) -> list[str]:
    return [job(folder, more='optimizer = { name = "sgdd", lr = 0.1 }\n')]


def unknown_loss(folder: Path) -> list[str]:
    return [job(folder, more='loss = "cross_entrpy"\n')]


def steps_and_epochs(folder: Path) -> list[str]:
    return [job(folder, more="epochs = 2\n")]


def not_toml(folder: Path) -> list[str]:
    return [job(folder, "batch = 4", "batch : 4")]


def missing_job(folder: Path) -> list[str]:
    return [str(folder / "nowhere.toml")]


def missing_data(folder: Path) -> list[str]:
    return [job(folder, '"fashion-mnist"', f'"cifar10:{folder}/nowhere.zip"')]


def missing_model(folder: Path) -> list[str]:
    return [job(folder, '"demo"', '"demmo"')]


def wrong_image_size(folder: Path) -> list[str]:
    for name in ("a", "b"):
        for number in range(4):
            picture(folder / "images" / name / f"{number}.png", 40)
    return [job(folder, '"fashion-mnist"', f'"imagefolder:{folder}/images"')]


def label_out_of_range(folder: Path) -> list[str]:
    for number in range(4):
        picture(folder / "set" / "images" / f"{number}.png", 64)
        (folder / "set" / "labels").mkdir(exist_ok=True)
        (folder / "set" / "labels" / f"{number}.txt").write_text("7 0.5 0.5 0.2 0.2\n")
    (folder / "set" / "classes.txt").write_text("cat\ndog\n")
    text = job(folder, '"fashion-mnist"', f'"yolo:{folder}/set"', 'loss = "yolov2"\n')
    Path(text).write_text(Path(text).read_text().replace('"demo"', '"yolov2"'))
    return [text]


def own_label_out_of_range(folder: Path) -> list[str]:
    own = Path(__file__).parent.parent / "dist" / "own_data.py"
    path = job(folder, '"fashion-mnist"', f'"{own}:wrong_labels"', 'input = "3x12x12"\nevaluate = false\n')
    Path(path).write_text(Path(path).read_text().replace('"demo"', f'"{own}:build"'))
    return [path]


def empty_folder(folder: Path) -> list[str]:
    (folder / "images").mkdir()
    return [job(folder, '"fashion-mnist"', f'"imagefolder:{folder}/images"')]


def batch_of_more_than_all(folder: Path) -> list[str]:
    return [job(folder, "batch = 4", "batch = 5000")]


def there_is_a_checkpoint(folder: Path) -> list[str]:
    write_checkpoint(folder, "demo")
    return [job(folder)]


def truncated_checkpoint(folder: Path) -> list[str]:
    path = write_checkpoint(folder, "demo") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return [job(folder), "--resume"]


def checkpoint_of_another_model(folder: Path) -> list[str]:
    write_checkpoint(folder, "paper4-8")
    return [job(folder), "--resume"]


def checkpoint_of_another_seed(folder: Path) -> list[str]:
    write_checkpoint(folder, "demo")
    return [job(folder, more="seed = 3\n"), "--resume"]


def init_of_another_shape(folder: Path) -> list[str]:
    path = folder / "other.safetensors"
    checkpoints.save_model(path, models.build("demo", 7).state_dict(), {})
    return [job(folder, more=f'init = "{path}"\n')]


def local_classes_that_differ(folder: Path) -> list[str]:
    for device, names in (("device-0", "ab"), ("device-1", "bc")):
        for name in names:
            for number in range(4):
                picture(folder / device / name / f"{number}.png", 28)
    path = job(folder, '"fashion-mnist"', f'"imagefolder:{folder}/{{device}}"', 'feed = "local"\n')
    Path(path).write_text(Path(path).read_text().replace("devices = 1", 'devices = 2\nstrategy = "batch"'))
    return [path]


def schedule_key_that_means_nothing(folder: Path) -> list[str]:
    return [job(folder, more='schedule = { name = "cosine", factor = 0.5 }\n')]


def optimizer_without_rate(folder: Path) -> list[str]:
    return [job(folder, more='optimizer = { name = "adam" }\n')]


def missing_init(folder: Path) -> list[str]:
    return [job(folder, more=f'init = "{folder}/nowhere.safetensors"\n')]


def clusters(folder: Path, first: str, second: str, port: int) -> str:
    path = folder / "cluster.toml"
    path.write_text(CLUSTER.format(first=first, second=second, port=port))
    return job(folder, "devices = 1", f'cluster = "{path}"\nstrategy = "rows"')


def nameless_machine(folder: Path) -> list[str]:
    return [clusters(folder, "127.0.0.1", "127.0.0.1", 23456)]


def unknown_device(folder: Path) -> list[str]:
    return [clusters(folder, "127.0.0.1", "127.0.0.1", 23456), "--as", "pi-7"]


def unreachable_host(folder: Path) -> list[str]:
    own = [address for address in local_addresses() if not ip_address(address).is_loopback]
    if not own:
        pytest.skip("this machine has no network")
    return [clusters(folder, "no-such-machine.invalid", own[0], 23456), "--as", "pi-1"]


def too_much_memory_wanted(folder: Path) -> list[str]:
    return [job(folder, more='memory = "lots"\n')]


def too_little_memory(folder: Path) -> list[str]:
    return [job(folder, more='memory = "200MB"\nstrategy = "batch"\n')]


def too_little_memory_for_any_plan(folder: Path) -> list[str]:
    return [job(folder, more='memory = "200MB"\n')]


MISTAKES: dict[Callable[[Path], list[str]], str] = {
    misspelt_key: "there is no key 'bacth'. Did you mean 'batch'?",
    misspelt_inner_key: "there is no key 'augment.filp'. Did you mean 'flip'?",
    misspelt_option: "sgd has no option 'momentun'. Did you mean 'momentum'?",
    unknown_optimizer: "no optimizer is called 'sgdd'. Did you mean 'sgd'?",
    unknown_loss: "Did you mean 'cross_entropy'?",
    steps_and_epochs: "either steps or epochs",
    not_toml: "is not TOML",
    missing_job: "there is no file",
    missing_data: "nowhere.zip",
    missing_model: "Did you mean 'demo'?",
    wrong_image_size: "40x40",
    label_out_of_range: "class 7",
    own_label_out_of_range: "there is a label 7, and the model has 4 outputs",
    empty_folder: "no image",
    batch_of_more_than_all: "5000",
    there_is_a_checkpoint: "--resume",
    truncated_checkpoint: "model.safetensors",
    checkpoint_of_another_model: "is of paper4-8, not demo",
    checkpoint_of_another_seed: "was made with seed = 0, the job has 3",
    missing_init: "nowhere.safetensors",
    init_of_another_shape: "head.weight is (7, 80) there and (10, 80) here",
    local_classes_that_differ: "device-1 has the classes b, c; device-0 has a, b",
    schedule_key_that_means_nothing: "factor means nothing to cosine",
    optimizer_without_rate: "the key 'optimizer.lr' is missing",
    nameless_machine: "--as",
    unknown_device: "pi-7",
    unreachable_host: "no-such-machine.invalid",
    too_much_memory_wanted: "is not an amount of memory",
    too_little_memory: "batch does not fit device-0",
    too_little_memory_for_any_plan: "nothing fits: on device-0 the process alone takes 343 MB",
}


def one_line_and_two(finished: subprocess.CompletedProcess[str]) -> str:
    """The one line that was said, of a command that refused."""
    assert finished.returncode == 2, finished.stderr
    (line,) = finished.stderr.strip().splitlines()
    assert line.startswith("manyhands: ")
    return line


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_one_line(mistake: Callable[[Path], list[str]], tmp_path: Path) -> None:
    line = one_line_and_two(in_process("train", *mistake(tmp_path), "--quiet"))
    assert MISTAKES[mistake] in line


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = clusters(tmp_path, "127.0.0.1", "127.0.0.1", port)
        line = one_line_and_two(in_process("train", path, "--as", "pi-0", "--quiet"))
    assert str(port) in line and "port" in line


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "450k") as disk:
        old = write_checkpoint(disk, "demo")
        path = job(tmp_path, f'"{tmp_path}/run"', f'"{disk}/run"')
        line = one_line_and_two(in_process("train", path, "--resume", "--quiet"))
        assert "cannot be written" in line and "step-00000002" in line
        newest = checkpoints.newest(disk / "run" / "checkpoints")
        assert newest is not None and newest.path == old


@pytest.mark.parametrize("more", ["", "evaluate = false\n", 'schedule = { name = "steps", at = [3, 4] }\n'])
def test_what_will_be_used_is_printed_and_can_be_read_again(tmp_path: Path, more: str) -> None:
    first = in_process("train", job(tmp_path, more=more), "--print-config")
    assert first.returncode == 0 and 'precision = "float32"' in first.stdout
    again = tmp_path / "again.toml"
    again.write_text(first.stdout)
    assert in_process("train", str(again), "--print-config").stdout == first.stdout
    assert ("evaluate = false" in first.stdout) == ("evaluate" in more)


def test_nothing_to_go_on_from_is_said(tmp_path: Path) -> None:
    ended = in_process("train", job(tmp_path, more="evaluate = false\n"), "--resume")
    assert ended.returncode == 0 and "no checkpoint to go on from: it begins anew" in ended.stdout
