"""`plan --draw` writes a file beside what it prints; the drawing in the docs is what the command draws."""

import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

from tests.cli.commands import in_process

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_drawing_in_the_docs_is_made_by_the_command_above_it(tmp_path: Path) -> None:
    lines = (DOCS / "strategies.md").read_text().splitlines()
    command = next(shlex.split(line) for line in lines if line.endswith("--draw plan.svg"))
    ended = in_process(*command[1:-1], str(tmp_path / "plan.svg"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "plan.svg").read_bytes() == (DOCS / "drawn-plan.svg").read_bytes()


def test_a_drawing_goes_with_json_and_with_a_program(tmp_path: Path) -> None:
    for extra in (("--json",), ("--program", "device-1")):
        path = tmp_path / f"{extra[0]}.svg"
        ended = in_process("plan", "demo", "--devices", "2", "--draw", str(path), *extra)
        assert ended.returncode == 0, ended.stderr
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert json.loads(ended.stdout) if extra == ("--json",) else "program device-1" in ended.stdout
