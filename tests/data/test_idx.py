"""The IDX reader refuses damaged files by name, and the packaged data is whole and balanced."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from manyhands.data.idx import fashion_mnist_small, read_idx

TWO_BY_THREE = b"\x00\x00\x08\x02" + b"\x00\x00\x00\x02" + b"\x00\x00\x00\x03" + bytes(range(6))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some-images"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_reads_plain_and_gzipped(path: Path, pack) -> None:
    path.write_bytes(pack(TWO_BY_THREE))
    array = read_idx(path)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert array.dtype == np.uint8 and array.flags.writeable


@pytest.mark.parametrize("num_bytes", [4, 8, len(TWO_BY_THREE) - 1])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_truncated_content_is_refused_by_name(path: Path, pack, num_bytes: int) -> None:
    path.write_bytes(pack(TWO_BY_THREE[:num_bytes]))
    with pytest.raises(ValueError, match=r"some-images is truncated: \d+ bytes, .* needs \d+"):
        read_idx(path)


@pytest.mark.parametrize("num_bytes", [3, 12, 30])
def test_truncated_gzip_stream_is_refused_by_name(path: Path, num_bytes: int) -> None:
    path.write_bytes(gzip.compress(TWO_BY_THREE)[:num_bytes])
    with pytest.raises(ValueError, match="some-images is truncated"):
        read_idx(path)


def test_damaged_gzip_stream_is_refused_by_name(path: Path) -> None:
    content = bytearray(gzip.compress(TWO_BY_THREE))
    content[-8] ^= 1  # one bit of the checksum
    path.write_bytes(content)
    with pytest.raises(ValueError, match="some-images is damaged"):
        read_idx(path)


@pytest.mark.parametrize("content", [b"", b"PNG?", b"\x00\x00\x0d\x01\x00\x00\x00\x00"])
def test_anything_but_unsigned_bytes_is_refused_by_name(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match="some-images is not an IDX file of unsigned bytes"):
        read_idx(path)


def test_bytes_left_over_are_refused_by_name(path: Path) -> None:
    path.write_bytes(TWO_BY_THREE + b"\x00")
    with pytest.raises(ValueError, match="some-images has bytes left over: 19 bytes"):
        read_idx(path)


def test_packaged_data_is_whole_and_balanced() -> None:
    images, labels, test_images, test_labels = fashion_mnist_small()
    assert images.shape == (2000, 28, 28) and test_images.shape == (500, 28, 28)
    assert images.dtype == test_images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [200] * 10
    assert np.bincount(test_labels).tolist() == [50] * 10
    assert images.max() == 255 and images.min() == 0
