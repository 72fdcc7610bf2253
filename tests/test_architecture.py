"""The house rules that a machine can check."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "manyhands"
FILES = sorted(SRC.rglob("*.py"))
STAGES = {"tracing", "profiling", "planning", "runtime", "reporting"}
MAY_IMPORT = {"ir": {"ir", "errors"}} | {stage: {stage, "ir", "errors"} for stage in STAGES}
TORCH_FREE = {"ir", "planning", "reporting"}
MAX_FILE_LINES = 400
FUNCTIONS_STAY_UNDER_LINES = 60

# All of these unpickle what they read, and unpickling runs whatever the sender likes.
UNPICKLING_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}
UNPICKLING_NAMES = {"torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def folder(path: Path) -> str:
    """The stage a file belongs to: `planning` for planning/costs.py, and for a planning.py too."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def each(files: list[Path]) -> pytest.MarkDecorator:
    """Run a test once for each file, under the file's name."""
    return pytest.mark.parametrize("path", files, ids=[str(file.relative_to(SRC)) for file in files])


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> list[tuple[str, str]]:
    """Every import in a file, also inside functions: local name and full dotted name.

    Read aloud: in `from torch import distributed as dist`, dist stands for torch.distributed.
    """
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def imported(path: Path) -> set[str]:
    """Full dotted names a file imports."""
    return {full for _, full in imports(path)}


def used(path: Path) -> set[str]:
    """Full dotted names a file imports or reaches through its imports, and every a.b.c as written."""
    chains = {ast.unparse(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
    return (
        chains
        | imported(path)
        | {
            full + chain.removeprefix(local)
            for local, full in imports(path)
            for chain in chains
            if chain.startswith(f"{local}.")
        }
    )


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


@each([file for file in FILES if folder(file) in MAY_IMPORT])
def test_stages_know_only_the_ir(path: Path) -> None:
    ours = [name.split(".") for name in imported(path) if name.split(".")[0] == "manyhands"]
    strangers = {
        ".".join(parts) for parts in ours if parts[1:2] == [] or parts[1] not in MAY_IMPORT[folder(path)]
    }
    assert not strangers, f"{folder(path)} may import only {sorted(MAY_IMPORT[folder(path)])} of manyhands"


@each([file for file in FILES if folder(file) == "ir"])
def test_the_ir_needs_only_the_standard_library(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots - sys.stdlib_module_names - {"manyhands"}


@each([file for file in FILES if folder(file) in TORCH_FREE])
def test_planning_needs_no_torch(path: Path) -> None:
    assert not {name for name in imported(path) if name.split(".")[0] in {"torch", "torchvision"}}


@each(FILES)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    too_long = {name: lines for name, lines in functions(path) if lines >= FUNCTIONS_STAY_UNDER_LINES}
    assert not too_long, f"functions stay under {FUNCTIONS_STAY_UNDER_LINES} lines"


@each(FILES)
def test_imports_are_absolute(path: Path) -> None:
    relative = {n.lineno for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom) and n.level > 0}
    assert not relative, "relative imports on these lines"


@each(FILES)
def test_nothing_unpickles(path: Path) -> None:
    names = used(path)
    modules = {name for name in names if name.split(".")[0] in UNPICKLING_MODULES}
    collectives = {name for name in names if name.split(".")[-1] in OBJECT_COLLECTIVES}
    assert not modules | collectives | (names & UNPICKLING_NAMES), "use JSON, safetensors or raw tensors"


@each(FILES)
def test_every_file_has_an_idea_of_its_own(path: Path) -> None:
    assert "utils" not in {part.removesuffix(".py") for part in path.relative_to(SRC).parts}


@each([file for file in FILES if file == SRC / "cli.py"])
def test_the_command_line_starts_without_torch(path: Path) -> None:
    """`manyhands --help` answers at once; torch alone takes seconds to import."""
    search = os.pathsep.join([str(SRC.parent), os.environ.get("PYTHONPATH", "")])
    code = "import sys, manyhands.cli; sys.exit('torch' in sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr or "importing manyhands.cli imports torch"
