"""CIFAR-10's python batches, read without unpickling: the list of instructions is walked, never obeyed."""

import pickletools
from collections.abc import Iterator

ALLOWED = {
    f"{module} {name}"
    for module, name in (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    )
}
NOISE = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME", "PROTO"}
NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"}
LIST_PARTS = {"EMPTY_LIST", "MARK", "APPENDS", "APPEND", "LIST"}
# Ways to name something by earlier pieces or to build it directly; the original batches use none of them.
OTHER_OBJECTS = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID"}
OTHER_OBJECTS |= {"EXT1", "EXT2", "EXT4"}
IMAGE_BYTES = 3 * 32 * 32

Instruction = tuple[str, object]


def read_batch(content: bytes) -> tuple[bytes, list[int]]:
    """The pixels and the labels of a batch; ValueError for anything that is not such a batch.

    A batch is a dictionary; its `data` is one array of bytes and its `labels` one list of small numbers.
    """
    pixels: bytes | None = None
    labels: list[int] = []
    in_labels = False
    before: Instruction = ("", None)
    for name, argument in _instructions(content):
        _check(name, argument)
        text = _text(argument)
        if text is not None and len(text) >= IMAGE_BYTES:
            if pixels is not None:
                raise ValueError("it holds more than one array")
            if before not in (("NEWFALSE", None), ("INT", False)):
                raise ValueError("its array is not stored row by row")
            pixels = text
        if in_labels and name in NUMBERS and isinstance(argument, int):
            labels.append(argument)
        elif name not in LIST_PARTS:
            in_labels = text == b"labels"
        before = (name, argument)
    if pixels is None or len(pixels) != IMAGE_BYTES * len(labels):
        raise ValueError(f"{len(pixels or b'')} bytes of images and {len(labels)} labels do not go together")
    if not all(0 <= label < 10 for label in labels):
        raise ValueError(f"label {next(x for x in labels if not 0 <= x < 10)} is none of 0 to 9")
    return pixels, labels


def _instructions(content: bytes) -> Iterator[Instruction]:
    """Names and arguments, without those that only number things for later."""
    try:
        for operation, argument, _ in pickletools.genops(content):
            if operation.name not in NOISE:
                yield operation.name, argument
    except Exception as error:  # a file that is no such list fails in many ways
        raise ValueError(f"it cannot be followed ({error})") from None


def _text(argument: object) -> bytes | None:
    """Text and bytes alike: python 2 wrote its bytes as text of one byte a letter."""
    if isinstance(argument, str):
        return argument.encode("latin-1", "replace")
    return bytes(argument) if isinstance(argument, bytes | bytearray) else None


def _check(name: str, argument: object) -> None:
    """Refuse what a batch does not need: a real one builds one numpy array and nothing else."""
    if name == "GLOBAL" and argument not in ALLOWED:
        raise ValueError(f"it asks for {argument}")
    if name in OTHER_OBJECTS:
        raise ValueError(f"it asks for objects by {name}")
