"""One process of a run: `python -m manyhands.rank` reads its job from standard input and does its part."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from manyhands.errors import DeviceLost, ManyhandsError, RequestError
from manyhands.runtime.ranks import die_with_starter, join, say


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    die_with_starter()
    try:
        from manyhands.tasks import TASKS

        TASKS[spec["task"]](spec["job"], join(spec))
        say("done")
    except DeviceLost as error:
        say("failed", kind="lost", device=error.device, message=error.reason)
        _leave(1)
    except RequestError as error:
        say("failed", kind="request", message=str(error))
        _leave(1)
    except BaseException as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, ManyhandsError) else f"{type(error).__name__}: {error}"
        say("failed", kind="error", message=(text.splitlines() or ["no message"])[0])
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """Without waiting for the network's threads: a lost peer may hold them for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
