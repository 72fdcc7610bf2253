"""Bytes of an image file -> an array of rows, columns and channels, with Pillow."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import PIL.Image

from manyhands.data.samples import Damaged, Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
GREY = {"1", "L", "LA", "La"}
DEEP_GREY = {"I", "I;16", "I;16B", "I;16L"}


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image, and not a hidden file such as `._1.jpg`."""
    return name.lower().endswith(SUFFIXES) and not name.rpartition("/")[2].startswith(".")


def decode(content: bytes, name: str) -> Image:
    """The picture as it is stored: one channel where it is grey, else three; `Damaged` where it is broken.

    A turn written in the file's camera data is not applied, so boxes stay where their tool put them.
    """
    with _named(name), PIL.Image.open(io.BytesIO(content)) as picture:
        if picture.mode in DEEP_GREY:  # sixteen bits: Pillow would clip them instead of scaling
            return (np.asarray(picture) >> 8).astype(np.uint8)[:, :, None]
        grey = picture.mode in GREY
        pixels = np.asarray(picture.convert("L" if grey else "RGB"))
        return pixels[:, :, None] if grey else pixels


def size_of(content: bytes, name: str) -> tuple[int, int]:
    """Rows and columns, from the file's header alone."""
    with _named(name), PIL.Image.open(io.BytesIO(content)) as picture:
        return picture.height, picture.width


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn everything Pillow raises for a broken file into `Damaged`."""
    try:
        yield
    except PIL.UnidentifiedImageError:
        raise Damaged(name, "is not an image") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ValueError and more
        raise Damaged(name, str(error) or type(error).__name__) from None
