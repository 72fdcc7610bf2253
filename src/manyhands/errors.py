"""Everything manyhands raises on purpose.

    ManyhandsError
    ├── RequestError        the request was wrong: nothing has started (exit code 2)
    └── RunError            it ran and failed (exit code 1)
        └── DeviceLost      a device died or did not answer

A message names the thing, the number, the limit and the way out.
"""


class ManyhandsError(Exception):
    """Any failure that manyhands explains in one line instead of a traceback."""


class RequestError(ManyhandsError):
    """What was asked for cannot be done; asking differently helps."""


class RunError(ManyhandsError):
    """The request was sound, and running it failed."""


class DeviceLost(RunError):
    """A device died or did not answer: `DeviceLost("pi-2", "did not answer within 30 s")`.

    It prints as `pi-2: did not answer within 30 s`, so that no message forgets the name.
    """

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(device, reason)
        self.device = device
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.device}: {self.reason}"
