"""How a command ends that is told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from manyhands import cli

def sleep(standalone_mode):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("tidying up", flush=True)
        time.sleep(0.3)
        print("tidied up", flush=True)

cli.app = sleep
cli.main()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_terminated_tidies_up_and_says_so_in_one_line(how: signal.Signals) -> None:
    """As control groups and processes must not be left behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(how)
    assert process.stdout.readline() == "tidying up\n"
    process.send_signal(signal.SIGTERM)  # as who stops a whole group of processes does
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("tidied up\n", "manyhands: stopped\n", 128 + how)
