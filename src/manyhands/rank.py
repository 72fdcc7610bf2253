"""One process of a run: `python -m manyhands.rank` reads its job from standard input and does its part."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import Any, NoReturn

from manyhands.errors import DeviceLost, ManyhandsError, RequestError
from manyhands.runtime.ranks import Place, die_with_starter, join, say
from manyhands.runtime.watching import Failure

_ending = threading.Lock()


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    die_with_starter()
    place: Place | None = None
    try:
        from manyhands.tasks import TASKS

        place = join(spec, _end)
        TASKS[spec["task"]](spec["job"], place)
        if place.watch:
            place.watch.finish()
        say("done")
    except BaseException as error:
        failure = _failure(error, spec["devices"][spec["rank"]])
        _end(place.watch.settle(failure) if place and place.watch else failure)
    _leave(0)


def _failure(error: BaseException, device: str) -> Failure:
    """What went wrong, of which kind, who is at fault and who says so."""
    if isinstance(error, DeviceLost):
        return {"kind": "lost", "device": error.device, "message": error.reason, "by": device}
    if isinstance(error, RequestError):
        return {"kind": "request", "device": device, "message": str(error), "by": device}
    traceback.print_exc()
    text = str(error) if isinstance(error, ManyhandsError) else f"{type(error).__name__}: {error}"
    message = (text.splitlines() or ["no message"])[0]
    return {"kind": "error", "device": device, "message": message, "by": device}


def _end(failure: Failure) -> NoReturn:
    """Say what went wrong and go. Whoever of the threads comes second waits for the end."""
    _ending.acquire()
    say("failed", **failure)
    _leave(1)


def _leave(code: int) -> NoReturn:
    """Without waiting for the network's threads: a lost peer may hold them for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
