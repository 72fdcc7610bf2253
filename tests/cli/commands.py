"""The command line inside this process: its words and exit code, without seconds of importing torch."""

import io
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from manyhands import cli


def in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Everything that goes to standard error counts, warnings too, as a user would see it."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with patch.object(sys, "argv", ["manyhands", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
                cli.main()
        except SystemExit as ended:
            code = ended.code
    number = code if isinstance(code, int) else 0 if code is None else 1
    return subprocess.CompletedProcess(["manyhands", *arguments], number, out.getvalue(), err.getvalue())
