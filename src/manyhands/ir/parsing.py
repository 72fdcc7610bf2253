"""Programs from their text form."""

from __future__ import annotations

import re

from manyhands.ir.geometry import Tile
from manyhands.ir.program import (
    Backward,
    Content,
    Correct,
    Drop,
    Expect,
    Finish,
    Fold,
    Forward,
    Keep,
    Loss,
    Measure,
    Message,
    Place,
    Prepare,
    Program,
    Receive,
    Redo,
    Rerun,
    Restore,
    Return,
    Send,
    Slope,
    Square,
    Step,
    Update,
)

_MESSAGE = re.compile(
    r"(send|expect|receive) (\w+) (\S+)>(\d+)\[(.*?)\]( packed)? (to|from) (\S+) #(\d+) (\d+)"
)
_TILED = re.compile(r"(prepare|place|keep|restore|return) (\S+)>(\d+)\[(.*?)\]")

_COMPUTED = re.compile(
    r"(forward|rerun|redo) (\d+)( unkept)?(?: by (\d+))?(?: in (\d+))?(?: ahead (\S+))?: (.*)"
)

_TILED_STEPS: dict[str, type[Prepare | Place | Keep | Restore | Return]] = {
    "prepare": Prepare,
    "place": Place,
    "keep": Keep,
    "restore": Restore,
    "return": Return,
}


def parse_step(text: str, device: str) -> Step:
    """The step of its text form, as one of `device`'s."""
    if match := _MESSAGE.fullmatch(text):
        verb, content, layer, segment, tile, packed, way, other, tag, size = match.groups()
        source, target = (device, other) if way == "to" else (other, device)
        where = (Content(content), layer, int(segment), Tile.parse(tile))
        message = Message(*where, source, target, int(tag), int(size), bool(packed))
        return Send(message) if verb == "send" else Expect(message) if verb == "expect" else Receive(message)
    if match := _TILED.fullmatch(text):
        verb, layer, segment, tile = match.groups()
        return _TILED_STEPS[verb](layer, int(segment), Tile.parse(tile))
    if match := _COMPUTED.fullmatch(text):
        return _computed(*match.groups())
    verb, _, rest = text.partition(" ")
    match verb:
        case "backward":
            return Backward(int(rest.removesuffix(" later")), rest.endswith(" later"))
        case "slope":
            return Slope(int(rest))
        case "finish":
            chunk, _, layer = rest.partition(" ")
            return Finish(int(chunk), layer)
        case "fold":
            return Fold(int(rest))
        case "measure":
            return Measure(rest)
        case "correct":
            return Correct(rest)
        case "drop":
            layer, _, number = rest.partition(">")
            return Drop(layer, int(number) if number else None)
        case "loss" if not rest:
            return Loss()
        case "square" if not rest:
            return Square()
        case "update" if not rest:
            return Update()
        case _:
            raise ValueError(f"not a step: {text!r}")


def _computed(
    verb: str, chunk: str, unkept: str, samples: str, bands: str, ahead: str | None, layers: str
) -> Step:
    names, count = tuple(layers.split()), int(bands or 1)
    if ahead and verb != "forward":
        raise ValueError(f"not a step: {verb} {chunk} ahead {ahead}")
    if verb == "forward":
        first = tuple(Tile.parse(text) for text in ahead[1:-1].split("][")) if ahead else ()
        return Forward(int(chunk), names, not unkept, count, first)
    if verb == "rerun":
        return Rerun(int(chunk), names, count)
    return Redo(int(chunk), names, int(samples or 0), count)


def parse_program(text: str) -> Program:
    first, *rest = text.strip().splitlines()
    device = first.removeprefix("program ").strip()
    return Program(device, tuple(parse_step(line.strip(), device) for line in rest))
