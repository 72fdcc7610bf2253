"""What is measured goes into the user's file, and everything else in it stays."""

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import RequestError
from manyhands.ir.cluster import Link, cores_here
from manyhands.ir.survey import DeviceFacts, Survey, Together
from manyhands.loading import load_cluster, parse_byte_rate, parse_bytes, parse_rate, parse_seconds
from manyhands.writing import (
    bit_rate_text,
    byte_rate_text,
    byte_text,
    require_writable,
    seconds_text,
    survey_text,
    write_survey,
)

FILE = """\
# the shelf
[[device]]            # upstairs
name = "pi-0"         # the old one
address = "10.0.0.1"
gflops = 9            # guessed

# its memory is shared with the camera
[[device]]
name = "pi-1"
address = "10.0.0.2"
memory = "500MB"      # a limit of mine

[network]
latency = "9ms"       # ping
port = 4321
# the end
"""
MEASURED = """\
# the shelf
[[device]]            # upstairs
name = "pi-0"         # the old one
address = "10.0.0.1"
gflops = 4.23            # guessed
memory_bandwidth = "1.53GB/s"
launch = "41.3us"
bare = "201MB"
memory = "812MB"

# its memory is shared with the camera
[[device]]
name = "pi-1"
address = "10.0.0.2"
memory = "500MB"      # a limit of mine
gflops = 4.23
memory_bandwidth = "1.53GB/s"
launch = "41.3us"
bare = "201MB"

[network]
latency = "0.25ms"       # ping
port = 4321
bandwidth = "94.4Mbit"
shared = "96.1Mbit"
# the end
"""


def facts(name: str) -> DeviceFacts:
    return DeviceFacts(
        device=name,
        processor="Raspberry Pi 4",
        cores=4,
        threads=4,
        convolution_flops_per_s=4.234e9,
        product_flops_per_s=8e9,
        memory_bytes_per_s=1.5349e9,
        launch_s=41.3e-6,
        bare_bytes=200_000_001,
        usable_bytes=812_999_999,
        usable_by="free memory",
    )


THERE, BACK = Link("pi-0", "pi-1", 11.8e6, 0.25e-3), Link("pi-1", "pi-0", 11.8e6, 0.25e-3)
SURVEY = Survey((facts("pi-0"), facts("pi-1")), (THERE, BACK), Together(12.01e6, True))


def test_comments_and_order_stay() -> None:
    assert survey_text(FILE, SURVEY) == MEASURED
    assert survey_text(MEASURED, SURVEY) == MEASURED, "measuring again changes nothing but values"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shelf.toml"
    path.write_text(FILE)
    path.chmod(0o640)
    write_survey(path, SURVEY)
    cluster = load_cluster(path, None)
    assert path.stat().st_mode & 0o777 == 0o640 and os.listdir(tmp_path) == ["shelf.toml"]
    assert cluster.shared_bytes_per_s == pytest.approx(12.01e6, rel=5e-3)
    assert (cluster.bytes_per_s, cluster.latency_s) == pytest.approx((11.8e6, 0.25e-3), rel=5e-3)
    first, second = cluster.devices
    assert first.flops_per_s == pytest.approx(4.234e9, rel=5e-3)
    assert first.memory_bytes_per_s == pytest.approx(1.5349e9, rel=5e-3)
    assert first.launch_s == pytest.approx(41.3e-6, rel=5e-3)
    assert first.bare_bytes == 201_000_000, "rounded up: it is memory that is needed"
    assert (first.memory_bytes, second.memory_bytes) == (812_000_000, 500_000_000)
    assert not cluster.links and cluster.port == 4321 and cluster.cores is None


def test_links_that_differ_get_tables_and_those_that_are_there_are_renewed() -> None:
    """a to b and back; of the three others one is slower."""
    names = ("pi-0", "pi-1", "pi-2")
    rates = {(a, b): 11.8e6 for a in names for b in names if a != b} | {("pi-2", "pi-0"): 2.5e6}
    survey = Survey((), tuple(Link(a, b, rate, 0.25e-3) for (a, b), rate in rates.items()))
    more = '\n[[link]]  # by hand\nsource = "pi-0"\ntarget = "pi-1"\nbandwidth = "1Mbit"\n'
    read = tomllib.loads(survey_text(FILE + more, survey))
    assert read["link"] == [
        {"source": "pi-0", "target": "pi-1", "bandwidth": "94.4Mbit", "latency": "0.25ms"},
        {"source": "pi-2", "target": "pi-0", "bandwidth": "20Mbit", "latency": "0.25ms"},
    ]
    assert "# by hand" in survey_text(FILE + more, survey)


def test_a_network_that_is_not_shared_any_more_says_so() -> None:
    switched = Survey(SURVEY.devices, SURVEY.links, Together(20e6, False))
    assert "shared" not in tomllib.loads(survey_text(MEASURED, switched))["network"]


def test_processes_of_one_machine_get_no_links_and_share_its_cores(tmp_path: Path) -> None:
    """One line for each device is a way to write the file, too."""
    path = tmp_path / "local.toml"
    path.write_text('device = [{ name = "pi-0" }, { name = "pi-1" }]  # both here\n')
    write_survey(path, Survey(SURVEY.devices, (THERE, Link("pi-1", "pi-0", 1e6, 1e-3))))
    cluster = load_cluster(path, None)
    assert not cluster.links and cluster.cores == cores_here() == load_cluster(None, 3).cores
    assert cluster.devices[1].memory_bytes == 812_000_000 and "# both here" in path.read_text()


def test_processes_of_one_machine_are_taken_to_be_alike() -> None:
    """Of three, one was disturbed while it was measured; the least memory is what all are sure to have."""
    slow = replace(facts("pi-1"), convolution_flops_per_s=1e9, launch_s=1e-3, usable_bytes=600_000_000)
    alike = Survey((facts("pi-0"), slow, facts("pi-2")), (THERE,)).alike
    assert [d.device for d in alike.devices] == ["pi-0", "pi-1", "pi-2"] and alike.links == (THERE,)
    for found in alike.devices:
        assert (found.convolution_flops_per_s, found.launch_s) == (4.234e9, 41.3e-6)
        assert found.usable_bytes == 600_000_000


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text(FILE)
    (tmp_path / "shelf.toml").symlink_to("real.toml")
    write_survey(tmp_path / "shelf.toml", SURVEY)
    assert (tmp_path / "shelf.toml").is_symlink() and (tmp_path / "real.toml").read_text() == MEASURED


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written"):
        require_writable(tmp_path / "gone" / "shelf.toml")
    with pytest.raises(RequestError, match="cannot be written: No such file"):
        write_survey(tmp_path / "shelf.toml", SURVEY)
    (tmp_path / "shelf.toml").write_text(FILE.replace("pi-1", "pi-9"))
    with pytest.raises(RequestError, match="pi-1 was measured, but is not in the cluster file"):
        write_survey(tmp_path / "shelf.toml", SURVEY)
    assert os.listdir(tmp_path) == ["shelf.toml"] and "pi-9" in (tmp_path / "shelf.toml").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_without_the_right_to_write_is_refused_beforehand(tmp_path: Path) -> None:
    path = tmp_path / "shelf.toml"
    path.write_text(FILE)
    path.chmod(0o400)
    with pytest.raises(RequestError, match="cannot be written"):
        require_writable(path)


@given(st.floats(1e-7, 1e12))
def test_every_rate_and_time_is_written_so_that_it_can_be_read(value: float) -> None:
    assert parse_rate(bit_rate_text(value)) == pytest.approx(value, rel=6e-3, abs=1e-1)
    assert parse_byte_rate(byte_rate_text(value)) == pytest.approx(value, rel=6e-3, abs=1e-1)
    assert parse_seconds(seconds_text(value / 1e6)) == pytest.approx(value / 1e6, rel=6e-3, abs=1e-9)
    assert value - 1e6 <= parse_bytes(byte_text(value)) <= value
