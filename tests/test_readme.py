"""What the README and the docs say is run: code blocks work, and every command and option exists."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_python_in_the_readme_runs() -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert blocks
    for block in blocks:
        ended = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        assert float(ended.stdout.splitlines()[-1]) < 1e-9


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    listed = set()
    for group in ("", "bench"):
        ended = subprocess.run(
            [sys.executable, "-m", "manyhands.cli", *group.split(), "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"COLUMNS": "200", "TERM": "dumb", "PATH": ""},
        )
        names = re.findall(r"^\W*([a-z]+) {2,}\S", ended.stdout.partition("Commands")[2], re.MULTILINE)
        listed |= {f"{group} {name}".strip() for name in names}
    documented = set(
        re.findall(
            r"^## manyhands ((?:bench )?[a-z]+)", (ROOT / "docs/commands.md").read_text(), re.MULTILINE
        )
    )
    assert listed - {"bench"} == documented


def test_no_placeholder_is_left_in_the_readme() -> None:
    assert not re.search(r"@[A-Z_]+@", (ROOT / "README.md").read_text())
