"""What a system shows of heat, throttling and memory limits is read as it is meant."""

from pathlib import Path

import pytest

from manyhands.errors import RunError
from manyhands.profiling.device import Rounds, measure_device
from manyhands.profiling.system import frequency, health, last_cache_bytes, processor, refuse_throttled, room
from tests.profiling.trees import COUNT, FLAGS, PI, PI_MEMORY, ZONE, lay_out

KIB, GIB = 2**10, 2**30
VCGENCMD = "#!/bin/sh\n[ $1 = get_throttled ] && echo throttled=0x50005\n"

THROTTLED = {
    "under-voltage": ({FLAGS: "50001\n"}, "under-voltage. Use a stronger power supply"),
    "capped": ({FLAGS: "20002\n"}, "the firmware caps its frequency"),
    "throttled": ({FLAGS: "e0006\n"}, "caps its frequency"),
    "soft limit": ({FLAGS: "80008\n"}, "soft temperature limit is reached. Cool it"),
    "passive trip": (
        {
            f"{ZONE}/temp": "97500\n",
            f"{ZONE}/trip_point_1_type": "passive\n",
            f"{ZONE}/trip_point_1_temp": "97000\n",
        },
        "cpu-thermal is at 98 °C, where it is held back from 97 °C",
    ),
    "cooling": (
        {
            "sys/class/thermal/cooling_device0/type": "thermal-cpufreq-0\n",
            "sys/class/thermal/cooling_device0/cur_state": "3\n",
        },
        "slows the processor",
    ),
}
FINE = {
    "a cool Pi": {},
    "below a passive trip": {
        f"{ZONE}/trip_point_1_type": "passive\n",
        f"{ZONE}/trip_point_1_temp": "80000\n",
    },
    "a trip that is not set": {f"{ZONE}/trip_point_1_type": "passive\n", f"{ZONE}/trip_point_1_temp": "0\n"},
    "a fan that turns": {
        "sys/class/thermal/cooling_device0/type": "gpio-fan\n",
        "sys/class/thermal/cooling_device0/cur_state": "1\n",
    },
    "throttled long ago": {FLAGS: "f0000\n"},
    "counted before": {COUNT: "17\n"},
}


@pytest.mark.parametrize("case", THROTTLED)
def test_a_throttled_device_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    files, words = THROTTLED[case]
    with pytest.raises(RunError, match="throttled") as caught:
        measure_device("pi", root=lay_out(tmp_path, PI | files), seconds=0)
    assert words in str(caught.value) and "measure again" in str(caught.value)


@pytest.mark.parametrize("case", FINE)
def test_a_device_that_is_not_held_back_is_not_refused(case: str, tmp_path: Path) -> None:
    found = health(lay_out(tmp_path, PI | FINE[case]))
    refuse_throttled(found, found)
    assert not found.throttled and found.temperature_c == pytest.approx(48.2, abs=0.01)
    assert bool(found.notes) == (case == "throttled long ago")


def test_throttling_while_measuring_is_refused(tmp_path: Path) -> None:
    before = health(lay_out(tmp_path, PI | {COUNT: "17\n"}))
    after = health(lay_out(tmp_path, {COUNT: "20\n"}))
    with pytest.raises(RunError, match="throttled 3 times while it was measured"):
        refuse_throttled(after, before)


def test_the_firmware_is_asked_by_its_command_where_there_is_no_file(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"usr/bin/vcgencmd": VCGENCMD})
    assert not health(root).throttled, "a command that may not be run says nothing"
    (root / "usr/bin/vcgencmd").chmod(0o755)
    assert "under-voltage" in health(root).throttled[0][0]


def test_a_system_that_shows_nothing_is_not_refused(tmp_path: Path) -> None:
    found = health(tmp_path)
    assert found.temperature_c is None and not found.throttled and not found.notes
    assert frequency(tmp_path) == (None, None, ())
    assert processor(tmp_path) and last_cache_bytes(tmp_path) == 0


CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ""),
        ({f"{CPUFREQ}/scaling_governor": "powersave"}, "governor powersave"),
        ({f"{CPUFREQ}/scaling_governor": "powersave", f"{CPUFREQ}/scaling_driver": "intel_pstate"}, ""),
        ({f"{CPUFREQ}/scaling_max_freq": "600000"}, "limited to 0.6 of 1.5 GHz"),
    ],
)
def test_a_slow_governor_is_told(files: dict[str, str], words: str, tmp_path: Path) -> None:
    hertz, _, notes = frequency(lay_out(tmp_path, PI | files))
    assert hertz == 1.5e9
    assert words in " ".join(notes) and bool(words) == bool(notes)


GROUP_1 = "sys/fs/cgroup/memory/box"
LIMITS = {
    "nothing but free memory": ({}, 700_000 * KIB, "free memory"),
    "second version": (
        {
            "proc/self/cgroup": "0::/box/inner\n",
            "sys/fs/cgroup/box/memory.max": f"{400_000 * KIB}\n",
            "sys/fs/cgroup/box/memory.current": f"{250_000 * KIB}\n",
            "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {50_000 * KIB}\n",
            "sys/fs/cgroup/box/inner/memory.max": "max\n",
            "sys/fs/cgroup/box/inner/memory.current": f"{250_000 * KIB}\n",
        },
        200_000 * KIB,
        "cgroup",
    ),
    "first version": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box\n1:cpu,cpuacct:/\n0::/\n",
            f"{GROUP_1}/memory.limit_in_bytes": f"{300_000 * KIB}\n",
            f"{GROUP_1}/memory.usage_in_bytes": f"{220_000 * KIB}\n",
            f"{GROUP_1}/memory.stat": f"inactive_file 5\ntotal_inactive_file {20_000 * KIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        },
        100_000 * KIB,
        "cgroup",
    ),
    "a container that shows its own group as the root": (
        {
            "proc/self/cgroup": "0::/somewhere/on/the/host\n",
            "sys/fs/cgroup/memory.max": f"{300_000 * KIB}\n",
            "sys/fs/cgroup/memory.current": f"{200_000 * KIB}\n",
        },
        100_000 * KIB,
        "cgroup",
    ),
    "a group that is full": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{100 * KIB}\n",
            "sys/fs/cgroup/memory.current": f"{200 * KIB}\n",
        },
        0,
        "cgroup",
    ),
    "address space": (
        {"proc/self/limits": f"Max address space         {1_000_000 * KIB}           unlimited    bytes\n"},
        100_000 * KIB,
        "address space",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_smallest_limit_counts(case: str, tmp_path: Path) -> None:
    files, left, by = LIMITS[case]
    found = room(lay_out(tmp_path, PI_MEMORY | files))
    assert (found.left_bytes, found.by) == (left, by)


def test_processes_of_one_machine_divide_its_memory_but_not_their_address_space(tmp_path: Path) -> None:
    assert room(lay_out(tmp_path, PI_MEMORY), 4).left_bytes == 175_000 * KIB
    files, left, by = LIMITS["address space"]
    assert room(lay_out(tmp_path, files), 4) == room(tmp_path) and room(tmp_path).by == by


def test_a_device_is_measured(tmp_path: Path) -> None:
    """On the processor at hand, with the heat and memory of a Pi."""
    facts = measure_device("pi", root=lay_out(tmp_path, PI | {FLAGS: "50000\n"}), seconds=0)
    assert facts.processor == "Raspberry Pi 4 Model B Rev 1.4"
    assert facts.bare_bytes == 200_000 * KIB
    assert facts.bare_bytes < facts.usable_bytes < facts.bare_bytes + 700_000 * KIB
    assert (facts.governor, facts.frequency_hz) == ("ondemand", 1.5e9)
    assert facts.temperature_c == pytest.approx(48.2, abs=0.01)
    assert any("under-voltage" in warning for warning in facts.warnings)
    # Between a wrist watch and a supercomputer: a slip of a factor thousand shows.
    assert 1e8 < facts.convolution_flops_per_s < 1e13 and 1e8 < facts.product_flops_per_s < 1e13
    assert 1e8 < facts.memory_bytes_per_s < 1e12 and 1e-7 < facts.launch_s < 1e-2


def test_a_device_that_tires_is_noticed() -> None:
    steady = Rounds(10**9, (0.5, 0.52, 0.49, 0.5, 0.9, 0.5, 0.51, 0.5, 0.5))
    tired = Rounds(10**9, (0.5, 0.5, 0.5, 0.6, 0.65, 0.7, 0.75, 0.75, 0.75))
    assert steady.drift == pytest.approx(1, abs=0.05) and tired.drift == pytest.approx(1.5)
    assert steady.flops_per_s == 2e9
