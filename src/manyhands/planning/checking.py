"""Run programs on sets: everything is there when used, nothing is left over, nobody waits in vain."""

from __future__ import annotations

from manyhands.errors import RequestError
from manyhands.ir.geometry import Tile
from manyhands.ir.graph import Graph
from manyhands.ir.plan import Plan
from manyhands.ir.program import (
    Backward,
    Content,
    Drop,
    Expect,
    Finish,
    Fold,
    Forward,
    Keep,
    Message,
    Place,
    Prepare,
    Program,
    Receive,
    Redo,
    Restore,
    Send,
    Slope,
    Step,
    Update,
    postponed,
)
from manyhands.planning.assignment import is_source
from manyhands.planning.liveness import Buffer, Liveness
from manyhands.planning.lowering import Lowered


class Flawed(Exception):
    """The programs cannot run as they are: a mistake of ours in lowering, never of the user's."""


def validate(graph: Graph, plan: Plan) -> None:
    """Refuse a plan, perhaps written by hand, that leaves out or repeats layers or names unknown devices."""
    wanted = [layer.name for layer in graph.layers if not is_source(layer)]
    planned = [name for segment in plan.segments for name in segment.layers]
    if planned != wanted:
        place = next((i for i, (a, b) in enumerate(zip(wanted, planned, strict=False)) if a != b), None)
        missing = wanted[place if place is not None else min(len(planned), len(wanted) - 1)]
        raise RequestError(f"the plan's segments must list every layer once and in order; see {missing}.")
    for segment in plan.segments:
        if unknown := [d for d in segment.layout.devices if d not in plan.devices]:
            raise RequestError(
                f"the segment at {segment.layers[0]} names {unknown[0]}, no device of the plan."
            )
        if len(set(segment.layout.devices)) != len(segment.layout.devices):
            raise RequestError(f"the segment at {segment.layers[0]} names a device twice.")
        if segment.redo < 0:
            raise RequestError(f"the segment at {segment.layers[0]} redoes {segment.redo} samples at a time.")
        if segment.bands < 1 or (segment.bands > 1 and not segment.redo):
            raise RequestError(
                f"the segment at {segment.layers[0]} has {segment.bands} bands: at least one, and more only "
                "where it is redone."
            )
        if min(segment.layout.shares) < 0 or not sum(segment.layout.shares):
            raise RequestError(f"the segment at {segment.layers[0]} has shares below zero, or none above it.")


def check(lowered: Lowered) -> None:
    """Raise Flawed unless all devices, taken together, can run their programs to the end."""
    devices = [_Device(lowered, program) for program in lowered.programs]
    late = {message for program in lowered.programs for message in postponed(program)}
    letters = set(late)
    while unfinished := [device for device in devices if device.position < len(device.steps)]:
        if not any([device.advance(letters) for device in unfinished]):
            waiting = "; ".join(f"{d.name} waits at {d.steps[d.position]}" for d in unfinished)
            raise Flawed(f"deadlock: {waiting}")
    if letters != late:
        raise Flawed(f"nobody sends and receives {sorted(str(letter) for letter in letters ^ late)[0]}")
    for device in devices:
        device.finish()


def _weights_in(lowered: Lowered, message: Message) -> set[str]:
    bucket = next(bucket for bucket in lowered.buckets if bucket.index == message.segment)
    return {piece.parameter for piece in bucket.part(message.source)}


class _Device:
    """One program in progress."""

    def __init__(self, lowered: Lowered, program: Program) -> None:
        self.name, self.steps, self.position = program.device, program.steps, 0
        self.liveness = Liveness(lowered.graph, lowered.regions, program.device)
        self.alive: set[Buffer] = set()
        self.late = {message.tag: _weights_in(lowered, message) for message in postponed(program)}
        self.expected, self.owed = set(self.late), dict(self.late)
        self.layers = lowered.graph.by_name()
        self.missing: dict[Buffer, int] = {}  # elements of a prepared tile that have not arrived
        self.tapes: set[int] = set()
        self.unkept: set[int] = set()  # computed, and to be computed again
        self.aside: set[tuple[str, int, Tile]] = set()
        self.left: set[int] = set()  # chunks whose weights' gradients were left for later
        self.folded: set[int] = set()
        self.updated = False
        self.begun: tuple[str, tuple[Tile, ...]] | None = None  # a layer of which some is computed

    def advance(self, letters: set[Message]) -> bool:
        """Take steps until one has to wait; whether any was taken."""
        start = self.position
        while self.position < len(self.steps) and self._take(self.steps[self.position], letters):
            self.position += 1
        return self.position > start

    def _take(self, step: Step, letters: set[Message]) -> bool:
        match step:
            case Receive(message) if message not in letters:
                return False
        for buffer in self.liveness.read(step):
            self._require(buffer in self.alive, step, f"{buffer} is not there")
            ready = isinstance(step, Place | Keep | Restore) or not self.missing.get(buffer)
            self._require(ready, step, f"{buffer} is incomplete")
        if self.begun is not None and not isinstance(step, Finish):
            self._require(self._is_ahead(step, *self.begun), step, f"{self.begun[0]} is not finished")
        self.alive |= set(self.liveness.made(step))
        self._act(step, letters)
        return True

    def _is_ahead(self, step: Step, layer: str, ahead: tuple[Tile, ...]) -> bool:
        """Does it send what is computed already of a layer that was begun, or let go of something else?"""
        if isinstance(step, Drop):
            return step.layer != layer
        if not isinstance(step, Send) or step.message.content is not Content.VALUE:
            return False
        return step.message.layer == layer and any(tile.covers(step.message.tile) for tile in ahead)

    def _act(self, step: Step, letters: set[Message]) -> None:
        match step:
            case Prepare(layer, segment, tile):
                self.missing[layer, segment] = tile.numel
            case Place(layer, segment, tile):
                self.missing[layer, segment] -= tile.numel
            case Forward():
                self._compute(step)
            case Finish(_, layer):
                self._require(self.begun is not None and self.begun[0] == layer, step, "it was not begun")
                self.begun = None
            case Keep(layer, segment, tile):
                self.aside.add((layer, segment, tile))
            case Restore(layer, segment, tile):
                self._require((layer, segment, tile) in self.aside, step, "it was not set aside")
                self.aside.discard((layer, segment, tile))
                self.missing[layer, segment] -= tile.numel
            case Redo(chunk):
                self._require(chunk in self.unkept, step, "it was kept, not computed, or is done already")
                self.unkept.discard(chunk)
            case Backward(chunk, later):
                self._require(chunk in self.tapes, step, "it was not computed, or is done already")
                self.tapes.discard(chunk)
                self.left |= {chunk} if later else set()
            case Slope(chunk):
                self._require(chunk in self.left, step, "nothing was left of it, or it is done already")
                self.left.discard(chunk)
            case Send(message):
                self._require(message not in letters, step, "it is on its way already")
                if message.content is Content.WEIGHTS:
                    self._require(self.updated, step, "the weights are those of the step before")
                if message.content is Content.SLOPES:
                    self._require(not self.left, step, "some gradients of weights are left")
                letters.add(message)
            case Expect(message):
                self.expected.add(message.tag)
            case Receive(message):
                self._require(message.tag in self.expected, step, "it was not expected")
                self.expected.discard(message.tag)
                self.owed.pop(message.tag, None)
                letters.discard(message)
                if message.content is Content.SLOPES:
                    self._require(not self.updated, step, "the weights are changed already")
                if message.content is Content.VALUE:
                    self.missing[message.layer, message.segment] -= message.tile.numel
            case Fold(bucket):
                self._require(bucket not in self.folded, step, "it is done already")
                self._require(not self.left, step, "some gradients of weights are left")
                self.folded.add(bucket)
            case Update():
                self._require(not self.updated, step, "it is done already")
                self._require(not self.left, step, "some gradients of weights are left")
                self.updated = True
            case Drop(layer, segment):
                self._require((layer, segment) in self.alive, step, "it is not there")
                self.alive.discard((layer, segment))
            case _:
                pass

    def _compute(self, step: Forward) -> None:
        self._require(not step.keep or step.bands == 1, step, "what is kept is computed all at once")
        stale = set().union(*self.owed.values()) & self._weights_of(step.layers)
        self._require(not stale, step, "some weights are those of the step before")
        (self.tapes if step.keep else self.unkept).add(step.chunk)
        self._require(step.keep or not step.ahead, step, "what is computed again is computed all at once")
        self.begun = (step.layers[-1], step.ahead) if step.ahead else None

    def _weights_of(self, names: tuple[str, ...]) -> set[str]:
        """What some layers read, also by a source of theirs that is a weight itself."""
        layers = [self.layers[name] for name in names]
        sources = (self.layers[source] for layer in layers for source in layer.inputs)
        read = (*layers, *(source for source in sources if is_source(source)))
        return {parameter.name for layer in read for parameter in layer.parameters}

    def _require(self, condition: bool, step: Step, reason: str) -> None:
        if not condition:
            raise Flawed(f"{self.name} cannot {step}: {reason}")

    def finish(self) -> None:
        incomplete = [buffer for buffer, count in self.missing.items() if count]
        for left, what in ((self.alive | self.aside, "values"), (self.expected ^ set(self.late), "messages")):
            if left:
                raise Flawed(f"{self.name} ends with {what} left over: {sorted(map(str, left))[0]}")
        if incomplete:
            raise Flawed(f"{self.name} never fills {incomplete[0]}")
