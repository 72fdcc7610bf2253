"""Emulated devices: their limits hold, a command runs on each of them, and nothing is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from manyhands import emulating
from manyhands.emulation import devices, network, others
from manyhands.emulation.names import FAMILY, is_leftover, own_prefix
from manyhands.errors import RequestError
from manyhands.ir.cluster import DELAY, Cluster, Device
from manyhands.ir.report import EmulatedRun, Outcome
from manyhands.loading import load_cluster
from manyhands.reporting.emulated import emulated_view
from tests.dist.test_training import events, losses, write_job

needs_root = pytest.mark.skipif(bool(devices.why_not()), reason=str(devices.why_not()))
GPUS = "CUDA_VISIBLE_DEVICES"
FAST = 100e9  # operations a second of a core of this machine, where nothing is timed
PAIR = Cluster((Device("a", flops_per_s=20e9), Device("b", flops_per_s=20e9)), 5e6, 0.0)


def links() -> set[str]:
    """Of this machine's own network."""
    return {f"link {name}" for name in os.listdir("/sys/class/net")}


LINKS = links() if Path("/sys/class/net").is_dir() else set()


def left_over(pid: int) -> set[str]:
    """What a process has made in the kernel, and links that this machine did not have before."""
    ours = f"{FAMILY}{pid}-*"
    places = [Path("/sys/fs/cgroup", kind) for kind in ("", "cpu", "memory")] + [network.NAMESPACES]
    return {str(path) for place in places if place.is_dir() for path in place.glob(ours)} | (links() - LINKS)


def start(within: tuple[str, ...], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*within, *words], stdout=subprocess.PIPE, text=True)


@needs_root
def test_fifty_times_up_and_down_leave_nothing() -> None:
    """With every kind of limit, and where the kernel knows how, packets that are delayed."""
    assert not left_over(os.getpid())
    children = len(psutil.Process().children(recursive=True))
    limited = tuple(replace(device, memory_bytes=500_000_000) for device in PAIR.devices)
    for _ in range(50):
        with devices.emulated(replace(PAIR, devices=limited, latency_s=1e-3), FAST) as emulation:
            subprocess.run([*emulation.within["a"], "true"], check=True)
            assert left_over(os.getpid())
    assert not left_over(os.getpid())
    assert len(psutil.Process().children(recursive=True)) == children


def cluster_file(folder: Path, memory: str = "2GB") -> Path:
    path = folder / "cluster.toml"
    lines = [f'[[device]]\nname = "pi-{i}"\nboard = "raspberry-pi-3"\nmemory = "{memory}"' for i in range(2)]
    path.write_text("\n".join([*lines, '[network]\nbandwidth = "100Mbit"']))
    return path


def emulate(path: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "manyhands.cli", "emulate", str(path), *options, "--", *words]
    pipes: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipes["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in the background
    return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


SLEEP = (sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(600)")
DETACHED = """
import subprocess, time
own = subprocess.Popen(["sleep", "600"], start_new_session=True)
print('asleep', flush=True)
time.sleep(600)
"""


def asleep(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run whose commands sleep on both devices."""
    process = emulate(cluster_file(folder), *(words or SLEEP))
    assert process.stdout is not None
    for line in process.stdout:
        if "pi-1 asleep" in line or "pi-0 asleep" in line:
            return process
    pytest.fail(f"it ended: {process.communicate()[1]}")


@needs_root
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_takes_everything_down(tmp_path: Path, how: signal.Signals) -> None:
    process = asleep(tmp_path)
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + how and errors.strip() == "manyhands: stopped"
    assert not left_over(process.pid)


@needs_root
def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    """Also what its commands have started themselves, which does not end with them."""
    process = asleep(tmp_path, sys.executable, "-c", DETACHED)
    commands = psutil.Process(process.pid).children()
    assert len(commands) == 2
    own = [each for command in commands for each in command.children()]
    assert own and all(each.name() == "sleep" for each in own)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(commands, timeout=10)
    assert not alive and all(each.is_running() for each in own)
    assert left_over(process.pid)
    folders = list(Path(tempfile.gettempdir()).glob(f"{FAMILY}{process.pid}-*"))
    devices.remove_leftovers()
    assert folders and not any(folder.exists() for folder in folders)
    assert not left_over(process.pid) and not psutil.wait_procs(own, timeout=10)[1]


@needs_root
def test_memory_that_is_short_is_told_and_not_a_broken_socket(tmp_path: Path) -> None:
    take = "import os; x = bytearray(b'1') * (200_000_000 if os.environ['MANYHANDS_AS'] == 'pi-1' else 1)"
    process = emulate(cluster_file(tmp_path, "80MB"), sys.executable, "-c", take)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip() == "manyhands: pi-1 needed more than 80 MB."
    assert "of 80.0 MB" in output and "killed by SIGKILL" in output


@needs_root
def test_a_job_trains_on_emulated_devices_as_it_does_locally(tmp_path: Path) -> None:
    """In float64. The job says two local processes, and takes the emulated ones."""
    job = write_job(tmp_path / "emulated.toml", steps=6)
    train = (sys.executable, "-m", "manyhands.cli", "train", str(job), "--json")
    process = emulate(cluster_file(tmp_path), *train, options=("--json",))
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    result = json.loads(output)
    outcomes = result["devices"]
    assert [each["device"] for each in outcomes] == ["pi-0", "pi-1"]
    assert all(each["sent_bytes"] > 10_000 and not each["stopped"] for each in outcomes)
    part = result["dilation"] * 3.62e9 / result["core_flops_per_s"]
    assert outcomes[0]["cores"] == pytest.approx(part) and outcomes[0]["memory_bytes"] == 2 * 10**9
    assert result["bytes_per_s"] == pytest.approx(result["dilation"] * 12.5e6)
    assert "of a core" in errors
    lines = [line.removeprefix("pi-0 ") for line in errors.splitlines() if line.startswith("pi-0 {")]
    emulated = losses([json.loads(line) for line in lines])
    local = losses(events(write_job(tmp_path / "local.toml", steps=6)))
    assert len(local) == 6 and emulated == pytest.approx(local, rel=1e-9)


FIRST = """
import os, sys, time
sys.stdout.buffer.write(b"\\xff is no text\\n")
time.sleep(0.1 if os.environ["MANYHANDS_AS"] == "pi-0" else 0)
sys.exit(1 if os.environ["MANYHANDS_AS"] == "pi-0" else 3)
"""


@needs_root
def test_the_exit_code_is_that_of_who_failed_first(tmp_path: Path) -> None:
    """Others fail for want of it. What is printed need not be text."""
    process = emulate(cluster_file(tmp_path), sys.executable, "-c", FIRST, options=("--json",))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 3 and errors.count("is no text") == 2
    ended = {each["device"]: each for each in json.loads(output)["devices"]}
    assert (ended["pi-0"]["exit_code"], ended["pi-1"]["exit_code"]) == (1, 3)
    assert ended["pi-0"]["seconds"] > ended["pi-1"]["seconds"]


TALKS = "import sys\nwhile True:\n    print('still here, ' * 100, flush=True)"


@needs_root
def test_a_run_whose_reader_has_gone_ends(tmp_path: Path) -> None:
    """As of `manyhands emulate ... | head`."""
    process = emulate(cluster_file(tmp_path), sys.executable, "-c", TALKS)
    assert process.stdout is not None and process.stderr is not None
    while "still here" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read().strip() == "manyhands: whoever read what it prints has gone, so it stopped."
    assert not left_over(process.pid)


def test_a_table_says_how_each_device_ended_and_how_long_that_is_on_what_was_asked_for() -> None:
    ends = (("a", 0, False), ("b", 3, False), ("c", -9, False), ("d", -15, True))
    outcomes = tuple(Outcome(n, code, 2.0, 0.5, 10, None, None, stopped) for n, code, stopped in ends)
    console = Console(width=150)
    with console.capture() as captured:
        console.print(emulated_view(EmulatedRun(3.5, 1e9, 1e6, 0.0, outcomes, 0.0)))
    text = captured.get()
    assert "3.5 times as fast as asked for" in text and text.count("7.0 s") == 4
    for end in ("done", "exit code 3", "killed by SIGKILL", "stopped, since another had failed"):
        assert end in text


def test_what_other_programs_take_is_told_apart_from_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0, "busy": 50.0, "own": 7.0}
    monkeypatch.setattr(others, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    monkeypatch.setattr(others, "_busy_s", lambda: clock["busy"])
    monkeypatch.setattr(others, "_own_s", lambda: clock["own"])
    monkeypatch.setattr(others, "cores_here", lambda: 2)
    counted = others.Others()
    clock.update(now=110.0, busy=65.0, own=17.0)
    assert counted.cores() == pytest.approx(0.5)
    assert others.note(0.5).startswith("others took 0.5 of 2 cores meanwhile") and not others.note(0.1)


def test_what_we_have_started_is_our_own() -> None:
    """Once it has ended."""
    before, busy = others._own_s(), others._busy_s()
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    assert others._own_s() - before > 0.1 and others._busy_s() - busy > 0.1


# ---- without root -------------------------------------------------------------------------------------


def test_without_root_it_says_what_it_needs_and_what_there_is_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RequestError, match="need root"), devices.emulated(PAIR, FAST):
        pass
    with pytest.raises(RequestError, match="need root.*--plain"):  # at once, before anything is timed
        emulating.run(cluster_file(tmp_path), ["true"], None, lambda *_: pytest.fail("it began"))


@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_a_command_that_is_not_there_is_told_at_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    if devices.why_not() and not options:
        pytest.skip(str(devices.why_not()))
    (tmp_path / "a-file").write_text("")
    for words, said in (
        ("no-such-command", "no-such-command: there is no such command."),
        (str(tmp_path / "a-file"), "a-file: cannot be executed."),
        ("--dilute", "emulate has no option --dilute"),
    ):
        process = emulate(cluster_file(tmp_path), words, options=options)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2 and said in errors


def test_a_plain_command_that_is_killed_ends_as_a_shell_says(tmp_path: Path) -> None:
    kill = "import os; os.kill(os.getpid(), 9)"
    process = emulate(cluster_file(tmp_path), sys.executable, "-c", kill, options=("--plain",))
    process.communicate(timeout=60)
    assert process.returncode == 137


def test_what_cannot_be_executed_is_told_in_a_line(tmp_path: Path) -> None:
    script = tmp_path / "no-shebang"
    script.write_text("echo here")
    script.chmod(0o755)
    process = emulate(cluster_file(tmp_path), str(script), options=("--plain",))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.splitlines()[-1].endswith("cannot be run: Exec format error.")


def test_a_container_without_rights_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "_capable", lambda *_: False)
    assert "root with all its rights" in str(network.why_not())


@needs_root
@pytest.mark.parametrize(("right", "lacking"), [("net_admin", True), ("sys_admin", True), ("chown", False)])
def test_root_without_its_rights_is_told_so(right: str, lacking: bool) -> None:
    """As in most containers."""
    asking = "from manyhands.emulation import network; print(network.why_not())"
    words = ("setpriv", f"--bounding-set=-{right}", f"--inh-caps=-{right}", sys.executable, "-c", asking)
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert ("root with all its rights" in said) is lacking


def test_plain_processes_have_no_links_that_could_be_kept_to(tmp_path: Path) -> None:
    path = cluster_file(tmp_path)
    path.write_text(path.read_text() + '\nshared = "40Mbit"')
    process = emulate(path, "true", options=("--plain",))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "leave out [[link]] and `shared`" in errors


def test_a_console_that_lacks_a_sign_shows_another(tmp_path: Path) -> None:
    """And goes on: else whoever printed it would wait for ever."""
    command = [sys.executable, "-m", "manyhands.cli", "plan", "demo", "--devices", "2"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C.UTF-8"}
    ended = subprocess.run(command, capture_output=True, text=True, env=ascii_only)
    assert ended.returncode == 0 and not ended.stderr


def test_plain_processes_are_labelled_as_such(tmp_path: Path) -> None:
    show = "import os; print(open(os.environ['MANYHANDS_CLUSTER']).read(), 'MANYHANDS_AS' in os.environ)"
    process = emulate(cluster_file(tmp_path), sys.executable, "-c", show, options=("--plain",))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "not emulated" in errors
    assert "address" not in output and output.split()[-1] == "False"


@needs_root
@pytest.mark.parametrize(
    ("cluster", "dilation", "words"),
    [
        (PAIR, 50.0, "fast enough for 4.5 at most"),
        (replace(PAIR, bytes_per_s=1e9), 4.0, "fast enough for 3 at most"),
        (PAIR, 0.1, "2.0% of a core.*--dilate 0.25"),
        (replace(PAIR, shared_bytes_per_s=1e6), None, "leave out"),
        (replace(PAIR, bytes_per_s=1e12), None, "ask for a slower network, .* faster than 24 Gbit/s"),
        (replace(PAIR, bytes_per_s=400.0), 2.0, "of 6.4 kbit/s is too slow to emulate: ask for 4 kbit/s"),
    ],
)
def test_what_cannot_be_emulated_is_refused(cluster: Cluster, dilation: float | None, words: str) -> None:
    with pytest.raises(RequestError, match=words), devices.emulated(cluster, FAST, dilation):
        pass


def test_an_emulated_cluster_reads_back_from_its_file(tmp_path: Path) -> None:
    read = load_cluster(cluster_file(tmp_path), None)
    assert read.devices[0].flops_per_s == pytest.approx(3.62e9) and read.devices[0].memory_bytes == 2 * 10**9
    bare = tuple(replace(device, bare_bytes=123_000_000) for device in read.devices)
    read = replace(read, devices=bare, port=23456)
    (tmp_path / "again.toml").write_text(emulating.cluster_text(read))
    assert load_cluster(tmp_path / "again.toml", None) == read
    (tmp_path / "wrong.toml").write_text('[[device]]\nname = "x"\nboard = "raspberry-pi-33"\n')
    with pytest.raises(RequestError, match="Did you mean 'raspberry-pi-3'"):
        load_cluster(tmp_path / "wrong.toml", None)


def test_what_is_left_over_is_told_by_its_name() -> None:
    pid, started = own_prefix().split("-")[2:4]
    assert not is_leftover(f"{own_prefix()}a")
    assert is_leftover(f"{FAMILY}{pid}-{int(started) - 1}-a")
    assert is_leftover(f"{FAMILY}4194304-17-a")
    assert not is_leftover("manyhands-1-2-a")


@needs_root
def test_latency_comes_from_the_kernel_or_by_holding_messages_back() -> None:
    far = replace(PAIR, latency_s=0.02)
    with devices.emulated(far, FAST, 1.0) as emulation:
        told = emulating.describe(emulation)
        (value,) = {
            subprocess.run([*before, "printenv", DELAY], capture_output=True, text=True).stdout.strip()
            for before in emulation.within.values()
        }
    assert emulation.cluster.latency_s == 0.02
    if emulation.wires.delayed:
        assert not value and "held back" not in told
    else:
        assert float(value) == pytest.approx(0.02 - devices.LATENCY_S) and "held back 20 ms" in told


@needs_root
def test_a_latency_that_is_shorter_than_it_can_be_is_told_and_not_planned_with() -> None:
    with devices.emulated(replace(PAIR, latency_s=1e-4), FAST, 2.0) as emulation:
        assert "a message takes 0.1 ms, where" in emulating.describe(emulation)
        assert 'latency = "100.0us"' in emulating.cluster_text(emulation.cluster)


@needs_root
def test_an_emulated_device_has_no_gpu() -> None:
    """Or a framework that finds one on this machine would use it for some of what it does."""
    with devices.emulated(PAIR, FAST) as emulation:
        command = [*emulation.within["a"], "printenv", GPUS]
        found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {GPUS: "0"})
    assert found.returncode == 0 and found.stdout == "\n"


@needs_root
def test_temporary_files_of_a_device_go_with_it(tmp_path: Path) -> None:
    """Also those of one that is killed."""
    said: list[str] = []
    leave = "import os, tempfile; print(tempfile.mkdtemp(), flush=True); os.kill(os.getpid(), 9)"
    result = emulating.run(
        cluster_file(tmp_path), [sys.executable, "-c", leave], None, lambda device, line: said.append(line)
    )
    left = [Path(line.strip()) for line in said if line.startswith("/")]
    assert len(left) == len(result.devices) and all(outcome.exit_code for outcome in result.devices)
    assert not any(folder.exists() for folder in left)
