"""The plan spelled out for one device: a list of steps, each with a text form that reads back as itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from manyhands.ir.geometry import Tile


class Content(Enum):
    """What a message or a buffer holds."""

    VALUE = "value"  # a tile of a layer's result
    GRADIENT = "gradient"  # a tile of the gradient of it
    MOMENTS = "moments"  # partial statistics for a norm: tile over (samples, channels)
    SUMS = "sums"  # partial sums of a norm's backward: tile over (samples, channels)


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

    def __str__(self) -> str:
        return f"{self.content.value} {self.layer}>{self.segment}[{self.tile}]"


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
class Forward:
    """Compute some layers, all of whose inputs are here."""

    chunk: int
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return f"forward {self.chunk}: {' '.join(self.layers)}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Take the gradients of a chunk's results back to its inputs and weights; its tape is then gone."""

    chunk: int

    def __str__(self) -> str:
        return f"backward {self.chunk}"


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
    """Evaluate the loss on the whole outputs and keep the gradient of this device's own tiles."""

    def __str__(self) -> str:
        return "loss"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a weight."""

    parameter: str
    tile: Tile

    def __str__(self) -> str:
        return f"{self.parameter}[{self.tile}]"


@dataclass(frozen=True, slots=True)
class Sum:
    """Start adding up the gradients of some weights among the devices that hold them."""

    bucket: int
    among: tuple[str, ...]
    pieces: tuple[Piece, ...]
    num_bytes: int

    def __str__(self) -> str:
        pieces = " ".join(str(piece) for piece in self.pieces)
        return f"sum {self.bucket}: {pieces} among {' '.join(self.among)} {self.num_bytes}"


@dataclass(frozen=True, slots=True)
class Collect:
    """Wait for a sum and put it into the weights' gradients."""

    bucket: int

    def __str__(self) -> str:
        return f"collect {self.bucket}"


@dataclass(frozen=True, slots=True)
class Update:
    """Clip, if asked to, and let the optimiser step."""

    def __str__(self) -> str:
        return "update"


Step = (
    Prepare
    | Place
    | Forward
    | Backward
    | Measure
    | Correct
    | Send
    | Expect
    | Receive
    | Return
    | Drop
    | Loss
    | Sum
    | Collect
    | Update
)


@dataclass(frozen=True, slots=True)
class Program:
    device: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"program {self.device}", *(f"  {step}" for step in self.steps)])


def sent_bytes(program: Program) -> int:
    """Bytes this device hands to the network in one step, sums counted as a ring moves them."""
    sends = sum(s.message.num_bytes for s in program.steps if isinstance(s, Send))
    return sends + sum(ring_bytes(s.num_bytes, len(s.among)) for s in program.steps if isinstance(s, Sum))


def ring_bytes(num_bytes: int, num_devices: int) -> int:
    """What each device sends when a tensor is added up in a ring: all of it, twice, but for its own share."""
    return 2 * num_bytes * (num_devices - 1) // num_devices


_MESSAGE = re.compile(r"(send|expect|receive) (\w+) (\S+)>(\d+)\[(.*?)\] (to|from) (\S+) #(\d+) (\d+)")
_TILED = re.compile(r"(prepare|place|return) (\S+)>(\d+)\[(.*?)\]")
_SUM = re.compile(r"sum (\d+): (.*) among (.*) (\d+)")
_PIECE = re.compile(r"(\S+)\[(.*?)\]")


def parse_step(text: str, device: str) -> Step:
    """The step of its text form, as one of `device`'s."""
    if match := _MESSAGE.fullmatch(text):
        verb, content, layer, segment, tile, way, other, tag, size = match.groups()
        source, target = (device, other) if way == "to" else (other, device)
        where = (Content(content), layer, int(segment), Tile.parse(tile))
        message = Message(*where, source, target, int(tag), int(size))
        return Send(message) if verb == "send" else Expect(message) if verb == "expect" else Receive(message)
    if match := _TILED.fullmatch(text):
        verb, layer, segment, tile = match.groups()
        parts = layer, int(segment), Tile.parse(tile)
        return Prepare(*parts) if verb == "prepare" else Place(*parts) if verb == "place" else Return(*parts)
    if match := _SUM.fullmatch(text):
        pieces = tuple(Piece(name, Tile.parse(tile)) for name, tile in _PIECE.findall(match[2]))
        return Sum(int(match[1]), tuple(match[3].split()), pieces, int(match[4]))
    verb, _, rest = text.partition(" ")
    match verb:
        case "forward":
            chunk, _, layers = rest.partition(": ")
            return Forward(int(chunk), tuple(layers.split()))
        case "backward":
            return Backward(int(rest))
        case "collect":
            return Collect(int(rest))
        case "measure":
            return Measure(rest)
        case "correct":
            return Correct(rest)
        case "drop":
            layer, _, number = rest.partition(">")
            return Drop(layer, int(number) if number else None)
        case "loss":
            return Loss()
        case "update":
            return Update()
        case _:
            raise ValueError(f"not a step: {text!r}")


def parse_program(text: str) -> Program:
    first, *rest = text.strip().splitlines()
    device = first.removeprefix("program ").strip()
    return Program(device, tuple(parse_step(line.strip(), device) for line in rest))
