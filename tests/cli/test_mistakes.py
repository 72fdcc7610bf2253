"""A user's mistake is one line and exit code 2, never a traceback."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import in_process

CLUSTER = """
[[device]]
name = "pi-0"
memory = "900MB"
[[device]]
name = "pi-1"
"""


def manyhands(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "manyhands.cli", *arguments], capture_output=True, text=True, timeout=120
    )


MISTAKES = {
    "unknown model": (("plan", "resnet19"), "Did you mean 'resnet18'?"),
    "file without a function": (("plan", "net.py"), "net.py:build"),
    "input of too few sizes": (("plan", "resnet18", "--input", "3x64"), "where the model is given 8x3x64: "),
    "input with commas": (
        ("plan", "resnet18", "--input", "3,64,64"),
        "ResNet cannot be given 8x3, 8x64, 8x64: too many positional arguments.",
    ),
    "profile of a batch of nothing": (("profile", "--batch", "4"), "name it with --model"),
    "missing file": (("plan", "nowhere.py:build", "--input", "3x8x8"), "nowhere.py is not a file"),
    "no such function": (("plan", "{folder}/net.py:biuld", "--input", "3x8x8"), "Did you mean 'build'?"),
    "not a module": (("plan", "{folder}/net.py:number", "--input", "3x8x8"), "not an nn.Module"),
    "own model without input": (("plan", "{folder}/net.py:build"), "--input 3x224x224"),
    "input that is no size": (("plan", "resnet18", "--input", "3x2a4"), "is not an input size"),
    "input of too many channels": (
        ("plan", "resnet18", "--input", "4x64x64"),
        "conv1 does not fit its input",
    ),
    "input that is too small": (("plan", "vgg11", "--input", "3x8x8"), "does not fit its input"),
    "untraceable model": (
        ("plan", "{folder}/net.py:branching", "--input", "3x8x8"),
        "Branching cannot be traced",
    ),
    "unknown strategy": (
        ("plan", "demo", "--devices", "2", "--strategy", "diagonal"),
        "no strategy is called",
    ),
    "product that does not fit": (
        ("plan", "demo", "--devices", "4", "--strategy", "batch:3"),
        "3 tiles for 4",
    ),
    "unknown layer in strategy": (
        ("plan", "demo", "--devices", "2", "--strategy", "rows; nolayer = batch"),
        "no layer is called 'nolayer'",
    ),
    "unknown layer to fuse": (
        ("plan", "demo", "--devices", "2", "--strategy", "rows", "--fuse", "nolayer"),
        "no layer is called so",
    ),
    "batch too small": (
        ("plan", "demo", "--devices", "3", "--batch", "2", "--strategy", "batch"),
        "cannot be cut among 3 devices",
    ),
    "shares without a strategy": (
        ("plan", "demo", "--devices", "2", "--shares", "1,2"),
        "need a strategy by name",
    ),
    "a peer without a race": (("bench", "memory", "--rotor", "."), "add --race"),
    "less than the process alone": (
        ("plan", "demo", "--devices", "2", "--memory", "5MB"),
        "the process alone takes 343 MB. Allow it more.",
    ),
    "nothing fits": (
        ("plan", "demo", "--devices", "2", "--memory", "350MB"),
        "nothing fits: under the smallest plan",
    ),
    "memory without a unit": (
        ("plan", "demo", "--devices", "2", "--memory", "20"),
        "is not an amount of memory",
    ),
    "shares for other devices": (
        ("plan", "demo", "--devices", "2", "--strategy", "rows", "--shares", "1,2,3"),
        "3 shares for 2 devices",
    ),
    "shares that are no numbers": (("plan", "demo", "--devices", "2", "--shares", "a,b"), "whole number"),
    "shares in other digits": (("plan", "demo", "--devices", "2", "--shares", "²,1"), "whole number"),
    "build that fails": (("plan", "{folder}/net.py:boom", "--input", "3x8x8"), "KeyError: 'cfg'"),
    "save where nothing is": (("plan", "demo", "--save", "{folder}/no/plan.json"), "cannot be written"),
    "drawing of another kind": (("plan", "demo", "--draw", "{folder}/plan.png"), "Name it plan.svg"),
    "drawing where nothing is": (("plan", "demo", "--draw", "{folder}/no/plan.svg"), "there is no folder"),
    "drawing onto a folder": (("plan", "demo", "--draw", "{folder}/taken.svg"), "cannot be written"),
    "no devices": (("plan", "demo", "--devices", "0"), "at least one"),
    "type on the wire": (("plan", "demo", "--devices", "2", "--wire", "int4"), "there is only bfloat16"),
    "cluster and devices": (
        ("plan", "demo", "--devices", "2", "--cluster", "{folder}/good.toml"),
        "either --cluster or --devices",
    ),
    "misspelt key": (("plan", "demo", "--cluster", "{folder}/misspelt.toml"), "Did you mean 'memory'?"),
    "misspelt table": (("plan", "demo", "--cluster", "{folder}/table.toml"), "Did you mean 'network'?"),
    "bad memory": (("plan", "demo", "--cluster", "{folder}/memory.toml"), "is not an amount of memory"),
    "same name twice": (("plan", "demo", "--cluster", "{folder}/twice.toml"), "two devices are named"),
    "no cluster file": (("plan", "demo", "--cluster", "{folder}/none.toml"), "there is no file"),
    "not TOML": (("plan", "demo", "--cluster", "{folder}/net.py"), "is not TOML"),
    "unknown device": (("plan", "demo", "--devices", "2", "--program", "device-7"), "no device is called"),
    "not a plan": (("verify", "demo", "--devices", "2", "--plan", "{folder}/good.toml"), "is not a plan"),
    "profile of no file": (("profile", "--cluster", "{folder}/none.toml"), "there is no file"),
    "profile as nobody": (("profile", "--cluster", "{folder}/good.toml", "--as", "pi-7"), "no such device"),
    "profile as one without address": (
        ("profile", "--cluster", "{folder}/good.toml", "--as", "pi-0"),
        "pi-0 has no address",
    ),
    "profile without saying as whom": (("profile", "--cluster", "{folder}/far.toml"), "--as NAME"),
    "profile as, without a file": (("profile", "--as", "pi-0"), "give it with --cluster"),
    "profile of file and devices": (
        ("profile", "--devices", "2", "--cluster", "{folder}/good.toml"),
        "either --cluster or --devices",
    ),
    "profile of no devices": (("profile", "--devices", "0"), "at least one"),
    "profile without threads": (("profile", "--threads", "0"), "--threads"),
    "misspelt rate": (
        ("profile", "--cluster", "{folder}/rate.toml"),
        "Did you mean 'memory_bandwidth'?",
    ),
    "misspelt shared": (("profile", "--cluster", "{folder}/sharde.toml"), "Did you mean 'shared'?"),
    "bad rate of memory": (("profile", "--cluster", "{folder}/fast.toml"), "Write 1.5GB/s"),
    "no bandwidth at all": (("profile", "--cluster", "{folder}/dead.toml"), "there must be some"),
    "unknown option": (("plan", "demo", "--devcies", "2"), "--devcies"),
    "unknown command": (("paln", "demo"), "paln"),
    "batch of nothing": (("plan", "demo", "--batch", "0"), "--batch"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "good.toml").write_text(CLUSTER)
    (folder / "taken.svg").mkdir()
    (folder / "misspelt.toml").write_text(CLUSTER.replace("memory", "memmory"))
    (folder / "table.toml").write_text(CLUSTER + '[netwrk]\nlatency = "1ms"\n')
    (folder / "memory.toml").write_text(CLUSTER.replace("900MB", "plenty"))
    (folder / "twice.toml").write_text(CLUSTER.replace("pi-1", "pi-0"))
    (folder / "far.toml").write_text(CLUSTER.replace("memory =", 'address = "10.9.8.7"\nmemory ='))
    (folder / "rate.toml").write_text(CLUSTER + 'memory_bandwith = "1GB/s"\n')
    (folder / "sharde.toml").write_text(CLUSTER + '[network]\nsharde = "40Mbit"\n')
    (folder / "fast.toml").write_text(CLUSTER + 'memory_bandwidth = "fast"\n')
    (folder / "dead.toml").write_text(CLUSTER + '[network]\nbandwidth = "0Mbit"\n')
    (folder / "net.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Conv2d(3, 4, 3)\n"
        "def number(): return 3\n"
        "def boom(): return {}['cfg']\n"
        "class Branching(nn.Module):\n"
        "    def forward(self, x): return x if x.sum() > 0 else -x\n"
        "def branching(): return Branching()\n"
    )
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(name: str, folder: Path) -> None:
    arguments, words = MISTAKES[name]
    ended = in_process(*(argument.format(folder=folder) for argument in arguments))
    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert not ended.stdout


def test_a_plan_that_is_not_exact_is_exit_code_1_and_names_the_layer(folder: Path) -> None:
    """A module that knows in which process it is gives every device another network."""
    (folder / "liar.py").write_text(
        "import os, torch\n"
        "from torch import nn\n"
        "class Liar(nn.Module):\n"
        "    def forward(self, x): return x * (2 + os.getpid() % 97) if len(x.shape) else x\n"
        "def build(): return nn.Sequential(nn.Conv2d(3, 4, 3), Liar(), nn.Conv2d(4, 2, 3))\n"
    )
    ended = manyhands("verify", f"{folder}/liar.py:build", "--input", "3x12x12", "--devices", "2")
    assert ended.returncode == 1, ended.stderr
    assert "NOT exact, first in 0" in ended.stdout


def test_a_plan_that_is_exact_is_exit_code_0_and_json_says_so() -> None:
    ended = manyhands("verify", "demo", "--devices", "2", "--strategy", "rows", "--json")
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert facts["exact"] and 0 < facts["gradients"] < 1e-9


def test_rounded_messages_are_found_and_called_not_exact() -> None:
    ended = manyhands(
        "verify", "demo", "--devices", "2", "--strategy", "rows", "--wire", "bfloat16", "--json"
    )
    assert ended.returncode == 1, ended.stderr
    facts = json.loads(ended.stdout)
    assert not facts["exact"] and 1e-6 < facts["loss"] < 1e-2


def test_a_saved_plan_is_verified_as_it_is(tmp_path: Path) -> None:
    """It was made for float32, and is proved in float64."""
    path = tmp_path / "plan.json"
    saved = in_process("plan", "demo", "--devices", "2", "--strategy", "columns", "--save", str(path))
    assert saved.returncode == 0 and path.is_file()
    ended = manyhands("verify", "demo", "--devices", "2", "--batch", "8", "--plan", str(path), "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["exact"]


@pytest.mark.parametrize(("verdict", "code"), [("EXACT", 0), ("WRONG", 1)])
def test_the_exit_code_of_the_conformance_bench_is_its_verdict(verdict: str, code: int) -> None:
    """The bench itself takes minutes: one row of it stands in, and the command judges that."""
    script = (
        "import sys\n"
        "from manyhands import cli\n"
        "from manyhands.benches import conformance as bench, conformance_cases as cases\n"
        "peers = next(iter(cases.CASES)).peers\n"
        f"row = bench.Row('a row', bench.Verdict.{verdict}, 1, 1, 0.0, (), (), peers)\n"
        "bench.run = lambda progress: (row,)\n"
        "sys.argv = ['manyhands', 'bench', 'conformance']\n"
        "cli.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert "a row" in ended.stdout


def test_help_answers_at_once() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert manyhands("--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_a_named_plan_that_does_not_fit_is_shown_and_fails() -> None:
    asked = ("plan", "resnet18", "--devices", "2", "--strategy", "single", "--memory", "450MB")
    ended = in_process(*asked)
    assert ended.returncode == 2 and "Does NOT fit: device-0" in ended.stdout
    as_json = in_process(*asked, "--json")
    assert as_json.returncode == 2 and json.loads(as_json.stdout)["facts"]
