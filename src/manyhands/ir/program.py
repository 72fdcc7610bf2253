"""The plan spelled out for one device: a list of steps, each with a text form that reads back as itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from manyhands.ir.geometry import Tile


class Content(Enum):
    """What a message or a buffer holds."""

    VALUE = "value"  # a tile of a layer's result
    GRADIENT = "gradient"  # a tile of the gradient of it
    MOMENTS = "moments"  # partial statistics for a norm: tile over (samples, channels)
    SUMS = "sums"  # partial sums of a norm's backward: tile over (samples, channels)
    SLOPES = "slopes"  # gradients of weights, on their way to the weights' owner: a bucket of them
    WEIGHTS = "weights"  # what the owner made of them, on its way back
    SQUARES = "squares"  # of the gradients that a device owns, for clipping by the norm of all
    LOSS = "loss"  # a device's part of it


NOT_ZERO = 0.55  # of what rectified layers make, about


@dataclass(frozen=True, slots=True)
class Message:
    """A tile on its way, for the sake of the segment that reads it (or read it, for gradients).

    Everyone numbers the messages of a plan alike, so the tag alone identifies it.
    """

    content: Content
    layer: str
    segment: int
    tile: Tile
    source: str
    target: str
    tag: int
    num_bytes: int
    packed: bool = False  # without zeros, and without gradients of those

    def __str__(self) -> str:
        return f"{self.content.value} {self.layer}>{self.segment}[{self.tile}]{' packed' * self.packed}"

    @property
    def expected_bytes(self) -> int:
        """What travels. How many zeros there are is known in the end only."""
        if not self.packed:
            return self.num_bytes
        bits = self.tile.numel // 8 if self.content is Content.VALUE else 0
        return int(NOT_ZERO * self.num_bytes) + bits

    @property
    def patient(self) -> bool:
        """Is it large, and waited for in the end only? Then it goes beside the others and holds up none."""
        return self.content in (Content.SLOPES, Content.WEIGHTS)


@dataclass(frozen=True, slots=True)
class Prepare:
    """Allocate a tile of a layer's result for the segment that reads it."""

    layer: str
    segment: int
    tile: Tile

    def __str__(self) -> str:
        return f"prepare {self.layer}>{self.segment}[{self.tile}]"


@dataclass(frozen=True, slots=True)
class Place:
    """Copy this device's own part of a result into the prepared tile."""

    layer: str
    segment: int
    tile: Tile

    def __str__(self) -> str:
        return f"place {self.layer}>{self.segment}[{self.tile}]"


@dataclass(frozen=True, slots=True)
class Keep:
    """Set aside what others sent of a tile that is put together, for when it is put together again."""

    layer: str
    segment: int
    tile: Tile

    def __str__(self) -> str:
        return f"keep {self.layer}>{self.segment}[{self.tile}]"


@dataclass(frozen=True, slots=True)
class Restore:
    """Put what was set aside into the tile prepared anew."""

    layer: str
    segment: int
    tile: Tile

    def __str__(self) -> str:
        return f"restore {self.layer}>{self.segment}[{self.tile}]"


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute some layers, all of whose inputs are here; keep what backward needs, or leave it to a Redo."""

    chunk: int
    layers: tuple[str, ...]
    keep: bool = True
    bands: int = 1  # of rows, one after another
    ahead: tuple[Tile, ...] = ()  # of the last layer's result: only this is computed by now; (): all of it

    def __str__(self) -> str:
        kept = "" if self.keep else " unkept"
        ahead = " ahead " + "".join(f"[{tile}]" for tile in self.ahead) if self.ahead else ""
        return f"forward {self.chunk}{kept}{_in_bands(self.bands)}{ahead}: {' '.join(self.layers)}"


@dataclass(frozen=True, slots=True)
class Finish:
    """Compute the rest of a layer's result, of which a Forward has computed what others wait for."""

    chunk: int
    layer: str

    def __str__(self) -> str:
        return f"finish {self.chunk} {self.layer}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Take the gradients of a chunk's results back to its inputs and weights; its tape is then gone.

    `later`: those of its convolutions' weights are left to a Slope, so that others get theirs sooner.
    """

    chunk: int
    later: bool = False

    def __str__(self) -> str:
        return f"backward {self.chunk}{' later' if self.later else ''}"


@dataclass(frozen=True, slots=True)
class Slope:
    """The gradients of the weights of a chunk's convolutions, which its Backward has left for later."""

    chunk: int

    def __str__(self) -> str:
        return f"slope {self.chunk}"


@dataclass(frozen=True, slots=True)
class Rerun:
    """Compute a chunk a second time for the sake of its results."""

    chunk: int
    layers: tuple[str, ...]
    bands: int = 1

    def __str__(self) -> str:
        return f"rerun {self.chunk}{_in_bands(self.bands)}: {' '.join(self.layers)}"


@dataclass(frozen=True, slots=True)
class Redo:
    """Compute a chunk a second time and take its gradients back, some samples at a time; 0: all at once."""

    chunk: int
    layers: tuple[str, ...]
    samples: int
    bands: int = 1

    def __str__(self) -> str:
        some = f" by {self.samples}" if self.samples else ""
        return f"redo {self.chunk}{some}{_in_bands(self.bands)}: {' '.join(self.layers)}"


@dataclass(frozen=True, slots=True)
class Measure:
    """Partial statistics, over this device's own tile, of the input of a norm."""

    layer: str

    def __str__(self) -> str:
        return f"measure {self.layer}"


@dataclass(frozen=True, slots=True)
class Correct:
    """Add to the gradient of a norm's input what flows back through its statistics."""

    layer: str

    def __str__(self) -> str:
        return f"correct {self.layer}"


@dataclass(frozen=True, slots=True)
class Send:
    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"send {m} to {m.target} #{m.tag} {m.num_bytes}"


@dataclass(frozen=True, slots=True)
class Expect:
    """Make ready to receive, so that the message can come in while something else is computed."""

    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"expect {m} from {m.source} #{m.tag} {m.num_bytes}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message; gradients and sums are added to what is there."""

    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"receive {m} from {m.source} #{m.tag} {m.num_bytes}"


@dataclass(frozen=True, slots=True)
class Return:
    """Add the gradient of a tile that was put together to this device's own part of it."""

    layer: str
    segment: int
    tile: Tile

    def __str__(self) -> str:
        return f"return {self.layer}>{self.segment}[{self.tile}]"


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a layer's result, or the tile of it that was put together for a segment."""

    layer: str
    segment: int | None = None

    def __str__(self) -> str:
        return f"drop {self.layer}" if self.segment is None else f"drop {self.layer}>{self.segment}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Evaluate the loss, or this device's part of it, and keep the gradient of this device's own tiles."""

    def __str__(self) -> str:
        return "loss"


@dataclass(frozen=True, slots=True)
class Fold:
    """Of the gradients in a bucket of weights, keep the part that this device owns; the rest was sent."""

    bucket: int

    def __str__(self) -> str:
        return f"fold {self.bucket}"


@dataclass(frozen=True, slots=True)
class Square:
    """Sum the squares of the gradients that this device owns."""

    def __str__(self) -> str:
        return "square"


@dataclass(frozen=True, slots=True)
class Update:
    """Let the optimiser change what this device owns, with gradients clipped if that is asked for."""

    def __str__(self) -> str:
        return "update"


Step = (
    Prepare
    | Place
    | Keep
    | Restore
    | Forward
    | Finish
    | Backward
    | Slope
    | Rerun
    | Redo
    | Measure
    | Correct
    | Send
    | Expect
    | Receive
    | Return
    | Drop
    | Loss
    | Fold
    | Square
    | Update
)


def _in_bands(count: int) -> str:
    return f" in {count}" if count > 1 else ""


@dataclass(frozen=True, slots=True)
class Program:
    device: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"program {self.device}", *(f"  {step}" for step in self.steps)])


def sent_bytes(program: Program) -> int:
    """Bytes this device hands to the network in one step; of packed messages, as many as are expected."""
    return sum(step.message.expected_bytes for step in program.steps if isinstance(step, Send))


def postponed(program: Program) -> tuple[Message, ...]:
    """Weights that the step before left on their way, received before this one's are expected.

    In the first step there are none.
    """
    found: dict[int, Message] = {}
    expected: set[int] = set()
    for step in program.steps:
        if isinstance(step, Expect):
            expected.add(step.message.tag)
        elif isinstance(step, Receive) and step.message.tag not in expected:
            found[step.message.tag] = step.message
    return tuple(message for message in found.values() if message.content is Content.WEIGHTS)


_FORWARD = {Content.VALUE, Content.MOMENTS}
_ALONE = _FORWARD | {Content.GRADIENT, Content.SUMS, Content.LOSS}


def forward_steps(program: Program) -> tuple[Step, ...]:
    """Those before the loss: enough to predict."""

    def before_loss(step: Step) -> bool:
        if isinstance(step, Send | Expect | Receive):
            return step.message.content in _FORWARD
        return not isinstance(step, Loss | Backward | Slope | Rerun | Restore | Redo | Fold | Square | Update)

    late = {Receive(message) for message in postponed(program)}
    return tuple(takewhile(before_loss, (step for step in program.steps if step not in late)))


def gradient_steps(program: Program) -> tuple[Step, ...]:
    """All but adding gradients up over devices and what follows: enough for one batch of several."""
    late = {Receive(message) for message in postponed(program)}

    def of_one_batch(step: Step) -> bool:
        if isinstance(step, Send | Expect | Receive):
            return step.message.content in _ALONE or step in late
        return not isinstance(step, Fold | Square | Update)

    return tuple(filter(of_one_batch, program.steps))
