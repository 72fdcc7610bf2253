"""Where the real data is, for tests that need it."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def real_data(name: str) -> Path:
    """A file of the real data; the test is skipped, with the reason, where it is not there."""
    path = Path(os.environ.get("MANYHANDS_DATA", SHARED)) / name
    if not path.exists():
        pytest.skip(f"{name} is not in {path.parent}; set MANYHANDS_DATA to the folder of the real data")
    return path
