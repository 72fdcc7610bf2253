"""What of a result is computed first because others wait for it: it travels while the rest is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from manyhands.ir.choices import can_be_parted
from manyhands.ir.geometry import Span, Tile, rest_of
from manyhands.ir.graph import Layer
from manyhands.ir.plan import Plan
from manyhands.ir.program import Content, Finish, Message
from manyhands.planning.assignment import Assignment
from manyhands.planning.chunks import Chunk

Boxes = dict[str, tuple[Tile, ...]]  # by device

MOST = 0.5  # of the rows of a tile: more of them are no border
LEAST_BYTES = 64 << 10  # of what is sent: less is on its way in no time
BATCH, ROWS = 0, 2


def first_boxes(tile: Tile, sent: Collection[Tile]) -> tuple[Tile, ...]:
    """The boxes of a tile to compute first, given what of it is sent.

    Rows at its ends, or samples, where all that is sent lies there; else the first half of the samples, or of
    the rows of one. Nothing where there is nothing to part.
    """
    for axis in (ROWS, BATCH):
        ends = _ends(tile.spans[axis], [each.spans[axis] for each in sent])
        if sum(map(len, ends)) <= MOST * len(tile.spans[axis]):
            return tuple(tile.with_span(axis, span) for span in ends)
    axis = BATCH if len(tile.spans[BATCH]) > 1 else ROWS
    span = tile.spans[axis]
    half = Span(span.start, span.start + len(span) // 2)
    return (tile.with_span(axis, half),) if len(half) else ()


def _ends(span: Span, sent: Collection[Span]) -> list[Span]:
    """What is sent, as one piece at each end: each belongs to the end that is nearer."""
    upper = [s for s in sent if s.start - span.start <= span.stop - s.stop]
    start = max((s.stop for s in upper), default=span.start)
    stop = min((s.start for s in sent if s not in upper), default=span.stop)
    return [end for end in (Span(span.start, start), Span(max(start, stop), span.stop)) if len(end)]


class Ahead:
    """Of a plan's chunks, what each device computes first of the one before, and how that travels.

    `values`: what each chunk is brought, by its number; `part` makes a message of a part of what one carries.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Mapping[str, Layer],
        regions: Assignment,
        chunks: Sequence[Chunk],
        values: Mapping[int, list[Message]],
        part: Callable[[Message, Tile], Message],
    ) -> None:
        self.plan, self.layers, self.regions, self.chunks, self.part = plan, layers, regions, chunks, part
        self.boxes = {number: self._boxes(number, messages) for number, messages in values.items()}
        self.brought = {number: self._in_parts(number, messages) for number, messages in values.items()}

    def _boxes(self, number: int, messages: list[Message]) -> Boxes:
        if not self.plan.ahead or not number:
            return {}
        maker, found = self.chunks[number - 1], {}
        name = maker.layers[-1]
        if self.plan.segments[maker.segment].redo or not can_be_parted(self.layers[name]):
            return {}
        for device in self.plan.devices:
            sent = [m for m in messages if m.source == device and m.layer == name]
            if sum(m.num_bytes for m in sent) >= LEAST_BYTES:
                found[device] = first_boxes(self.regions.computed[name][device], [m.tile for m in sent])
        return {device: boxes for device, boxes in found.items() if boxes}

    def _in_parts(self, number: int, messages: list[Message]) -> list[Message]:
        """What is computed first travels by itself."""
        found = []
        for message in messages:
            boxes = self._of(message, number)
            rest = [rest_of(self.regions.computed[message.layer][message.source], boxes)] if boxes else []
            parts = [part for box in (*boxes, *rest) if (part := message.tile & box).numel]
            found += [self.part(message, part) for part in parts] if parts[1:] else [message]
        return found

    def _of(self, message: Message, number: int) -> tuple[Tile, ...]:
        """The boxes computed first of what a message carries, if it is what the chunk before makes last."""
        made = self.chunks[number - 1].layers[-1] if number else ""
        new = message.content is Content.VALUE and message.layer == made
        return self.boxes[number].get(message.source, ()) if new else ()

    def is_first(self, message: Message, chunk: Chunk) -> bool:
        """Is what it carries computed first?"""
        return any(box.covers(message.tile) for box in self._of(message, chunk.index))

    def rest(self, chunk: Chunk) -> dict[str, Finish]:
        """By device, the step that computes the rest."""
        maker = self.chunks[chunk.index - 1]
        return {device: Finish(maker.index, maker.layers[-1]) for device in self.boxes[chunk.index]}
