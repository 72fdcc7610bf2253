"""Read IDX files, the format of MNIST and its relatives, and the small part of Fashion-MNIST shipped here."""

import gzip
import math
import struct
import zlib
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GZIP_MAGIC = b"\x1f\x8b"
UNSIGNED_BYTES = b"\x00\x00\x08"  # two zeros, then the code of the element type


def read_idx(path: str | Path) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes, gzipped or plain.

    Example: `read_idx("t10k-labels-idx1-ubyte.gz")` is 10,000 labels, shape (10000,).
    """
    content = _decompressed(Path(path))
    if len(content) < 4 or content[:3] != UNSIGNED_BYTES:
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes: it starts with {content[:4].hex(' ')}"
        )
    header_bytes = 4 + 4 * content[3]
    if len(content) < header_bytes:
        raise ValueError(f"{path} is truncated: {len(content)} bytes, its header alone needs {header_bytes}")
    shape = struct.unpack(f">{content[3]}I", content[4:header_bytes])
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        fault = "is truncated" if len(content) < expected_bytes else "has bytes left over"
        raise ValueError(f"{path} {fault}: {len(content)} bytes, its shape {shape} needs {expected_bytes}")
    return (
        np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape).copy()
    )  # a copy can be written to


def fashion_mnist_small() -> tuple[
    NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]
]:
    """Training images (2000, 28, 28) and labels, test images (500, 28, 28) and labels; ten equal classes."""
    return (
        _packaged("train-images-idx3-ubyte.gz"),
        _packaged("train-labels-idx1-ubyte.gz"),
        _packaged("t10k-images-idx3-ubyte.gz"),
        _packaged("t10k-labels-idx1-ubyte.gz"),
    )


def _packaged(name: str) -> NDArray[np.uint8]:
    with resources.as_file(resources.files("manyhands.data") / "fashion-mnist-small" / name) as path:
        return read_idx(path)


def _decompressed(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except EOFError as error:
        raise ValueError(f"{path} is truncated: its gzip stream ends early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
