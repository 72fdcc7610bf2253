"""What races come to: each limit can fail its verdict, what was not measured is told, results are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from manyhands.benches import peers, scaling, tiled, unequal
from manyhands.benches.emulated import Choose, Conditions, Lap, Setting
from manyhands.emulation import devices
from manyhands.errors import RequestError, RunError
from manyhands.ir.plan import Plan
from manyhands.measuring import graph_of
from manyhands.peers import ALONE, CHANNELS_LAST, DISTCONV, PEERS
from tests.cli.commands import in_process

CORE = 50e9
CONDITIONS = Conditions(2.0, CORE)


def cell(model: str, **seconds: float) -> peers.Cell:
    names = {"auto": "auto", "one": peers.ONE, "ddp": peers.DDP, "last": CHANNELS_LAST}
    found = tuple(Lap(names[key], value) for key, value in seconds.items())
    return peers.Cell(model, 100.0, found, ALONE, (), CONDITIONS)


def printed(table: object) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(table)
    return " ".join(captured.get().split())


@pytest.mark.parametrize(
    ("judged", "within"),
    [
        (cell("mobilenetv2", auto=1.0, one=0.98, ddp=0.1), True),  # the one that is faster is not exact
        (cell("mobilenetv2", auto=1.0, one=0.9, ddp=9.0), False),
        (cell("resnet18", auto=1.0, one=1.6, ddp=3.1), True),
        (cell("resnet18", auto=1.0, one=1.6, ddp=2.9), False),
        (cell("resnet18", auto=1.0, one=1.4, ddp=3.1), False),
        (cell("vgg16-bn", auto=1.0, one=2.1, ddp=3.9), False),
    ],
)
def test_each_limit_of_the_race_against_peers_can_fail_it(judged: peers.Cell, within: bool | None) -> None:
    assert judged.within is within


def test_a_peer_that_was_not_raced_is_not_beaten() -> None:
    verdicts = cell("vgg16-bn", auto=1.0, one=2.1).verdicts
    assert [verdict.reached for verdict in verdicts] == [True, None, True]
    assert "as DistributedDataParallel: 4 required, NOT MEASURED" in str(verdicts[1])
    slow = cell("vgg16-bn", auto=1.0, one=1.9)
    assert cell("vgg16-bn", auto=1.0, one=2.1).within is None and slow.within is False
    assert "NOT ALL MEASURED" in printed(peers.table((cell("vgg16-bn", auto=1.0, one=2.1),)))


def test_a_peer_that_something_is_required_over_and_that_broke_is_not_beaten_either() -> None:
    def broke(name: str) -> peers.Cell:
        conditions = replace(CONDITIONS, refused=((name, "it broke."),))
        return replace(cell("vgg16-bn", auto=1.0, one=2.1), conditions=conditions)

    assert broke(peers.DDP).within is False and broke("FSDP2").within is None
    text = printed(peers.table((broke(peers.DDP),)))
    assert "4 required, FAILED" in text and "DistributedDataParallel is left out: it broke." in text


def test_a_peer_with_a_race_of_its_own_is_compared_with_what_auto_took_in_that() -> None:
    slow = cell("resnet18", auto=1.0, one=1.6)
    beside = replace(
        slow, laps=(*slow.laps, Lap(peers.DDP, 6.0, each_s=(6.0,), beside_each_s=(1.0, 2.0, 9.0)))
    )
    assert beside.faster(peers.DDP) == 3.0 and beside.faster(peers.ONE) == 1.6 and beside.within
    assert "DistributedDataParallel 6.00-6.00 s (auto beside it 1.00-9.00 s)" in printed(
        peers.table((beside,))
    )


def test_a_cell_that_broke_fails_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def race(setting: Setting, *_: object) -> peers.Cell:
        if setting.model == "unet":
            raise RunError("pi-2 was killed.")
        return cell(setting.model, auto=1.0, one=3.0, ddp=9.0)

    monkeypatch.setattr(peers, "_cell", race)
    monkeypatch.setattr(peers, "core_speed", lambda *_: CORE)
    monkeypatch.setattr(peers, "part_speed", lambda core, *_: core)
    cells = peers.run(("unet", "vgg16-bn"), (100.0,), (), None, 1, None, lambda _: None)
    assert [cell.within for cell in cells] == [False, True]
    text = printed(peers.table(cells))
    assert "there was no race: pi-2 was killed." in text and "0.97 required, FAILED" in text
    assert [each["within"] for each in json.loads(json.dumps(peers.to_json(cells)))] == [False, True]


def test_one_device_always_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[tuple[str, ...]] = []

    def race(*words: object) -> peers.Cell:
        raced.append(words[4])  # type: ignore[arg-type]
        return cell("unet", auto=1.0, one=1.0)

    def speed(tell: object, make: object) -> float:
        assert make is peers.yardstick  # and no single convolution
        return CORE

    monkeypatch.setattr(peers, "_cell", race)
    monkeypatch.setattr(peers, "core_speed", speed)
    monkeypatch.setattr(peers, "part_speed", lambda core, *_: core)
    for rivals in ((peers.DDP,), (peers.ONE,), ()):
        peers.run(("unet",), (100.0,), rivals, None, 1, None, lambda _: None)
    every = tuple(name for name in PEERS if name != DISTCONV)
    assert raced == [(*ALONE, peers.DDP), ALONE, every]


def test_cells_that_are_kept_are_not_raced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[str] = []

    def race(setting: Setting, *_: object) -> peers.Cell:
        raced.append(setting.model)
        return cell(setting.model, auto=1.0, one=3.0, ddp=9.0)

    monkeypatch.setattr(peers, "_cell", race)
    monkeypatch.setattr(peers, "core_speed", lambda *_: CORE)
    monkeypatch.setattr(peers, "part_speed", lambda core, *_: core)

    def run(*only: str) -> tuple[peers.Cell, ...]:
        return peers.run(only, (100.0,), (), None, 1, tmp_path, lambda _: None)

    first = run("resnet18")
    assert run("resnet18", "unet")[0] == first[0] and raced == ["resnet18", "unet"]
    facts = json.loads(json.dumps(peers.to_json(first)))
    assert facts[0]["within"] and facts[0]["faster"][peers.DDP] == 9.0
    console = Console(width=200)
    with console.capture() as captured:
        console.print(peers.table(first))
    assert "9.00 (9.00x, not exact)" in captured.get()
    (times,) = peers.bars(first).values()
    assert times == {peers.ONE: 3.0, f"{peers.DDP} (not exact)": 9.0}
    with pytest.raises(RequestError, match="resnet81 is not one of"):
        run("resnet81")
    monkeypatch.setattr(peers, "core_speed", lambda *_: 2 * CORE)
    with pytest.raises(RequestError, match="measured on cores of 50 GFLOP/s, these have 100"):
        run("mobilenetv2", "unet")  # told before the first is raced
    assert raced == ["resnet18", "unet"]
    for kept in tmp_path.iterdir():
        kept.write_text("{")
    with pytest.raises(RequestError, match="is not a cell that was kept .*: delete it"):
        run("unet")


def test_cells_that_are_kept_are_of_the_same_program_and_question(monkeypatch: pytest.MonkeyPatch) -> None:
    first = peers.conditions_of("asked")
    assert first == peers.conditions_of("asked") != peers.conditions_of("asked otherwise")
    monkeypatch.setattr(peers, "cores_here", lambda: 1000)
    assert peers.conditions_of("asked") != first
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"another program")
    assert peers.conditions_of("asked") != first


def unequal_result(
    auto_s: float, alone_s: float, equal_s: float, layouts: str, all_s: float = 2.0, two_s: float = 2.0
) -> unequal.Result:
    named = (Lap("auto", auto_s, None, layouts), Lap(unequal.ALONE, alone_s, None, "whole"))
    chosen = (unequal.FAST,) if layouts == "whole" else tuple(unequal.DEVICES)
    others = [Lap("equal batch", equal_s, None, "batch:4")]
    others += [Lap(name, all_s if name == "all four" else two_s, None, "batch:4") for name in unequal.SHARED]
    return unequal.Result(100.0, (*named, *others), chosen, CONDITIONS)


def test_unequal_shares_have_to_pay_or_the_fast_device_alone_is_really_best() -> None:
    assert unequal_result(1.0, 1.2, 2.6, "batch:4").within
    assert not unequal_result(1.0, 1.2, 2.4, "batch:4").within
    assert not unequal_result(1.3, 1.2, 4.0, "batch:4").within
    assert unequal_result(1.2, 1.2, 1.5, "whole").within
    assert not unequal_result(1.2, 1.2, 1.1, "whole").within
    assert not unequal_result(1.2, 1.2, 1.5, "whole", all_s=1.1).within
    assert not unequal_result(1.2, 1.2, 1.5, "whole", two_s=1.1).within
    alone = unequal_result(1.2, 1.2, 1.5, "whole")
    for layouts, within in (("whole", True), ("batch:4", False)):  # the same plan may be faster by chance
        prompt = Lap(unequal.PROMPT, 1.19, None, layouts)
        assert replace(alone, laps=(*alone.laps, prompt)).within is within


def tiled_row(num_devices: int, auto_s: float, mbit: float = 100.0) -> tiled.Row:
    alone = Lap("one-core", 24.0), Lap("pi-0", 6.0)
    return tiled.Row(num_devices, 8, mbit, *alone, (Lap("auto", auto_s, each_s=(auto_s,)),), CONDITIONS)


@pytest.mark.parametrize(
    ("rows", "less", "within"),
    [
        ((tiled_row(6, 1.3), tiled_row(2, 3.9)), 5.1, True),  # 18.5 and 6.2 times one core
        ((tiled_row(6, 1.35), tiled_row(2, 3.9)), 5.1, False),  # 17.8: less than 75 % of ideal
        ((tiled_row(6, 1.3), tiled_row(2, 4.1)), 5.1, False),
        ((tiled_row(6, 1.3), tiled_row(6, 9.0), tiled_row(2, 3.9)), 5.1, True),  # the best batch counts
        ((tiled_row(6, 1.3), tiled_row(6, 9.0, 25.0), tiled_row(2, 3.9)), 5.1, True),
        ((tiled_row(6, 1.3),), 4.9, False),
    ],
)
def test_each_limit_of_the_tiled_setting_can_fail_it(
    rows: tuple[tiled.Row, ...], less: float, within: bool
) -> None:
    memory = (tiled.Memory(6, 8, 100.0, "rows", int(1000 * less), 1000),)
    result = tiled.Result(rows, memory)
    assert result.within == within == (not any("NOT REACHED" in str(each) for each in result.verdicts))


def test_one_core_is_never_taken_to_be_slower_than_a_fourth_of_four() -> None:
    row = tiled_row(6, 1.0)
    assert row.over_one_core == 24.0
    assert replace(row, one_core=Lap("one-core", 30.0)).over_one_core == 24.0
    assert replace(row, one_core=Lap("one-core", 18.0)).over_one_core == 18.0


def test_a_plan_says_how_it_was_chosen() -> None:
    assert Lap("auto", 1.0, layouts="rows:4").plan == "rows:4"
    own = Lap("auto", 1.0, layouts="rows:4", tried=6)
    assert own.plan == "rows:4 (the planner's own, of 6 in a trial)"
    won = replace(own, gain=1.125)
    assert won.plan == "rows:4 (1.12 times as fast as the planner's own, of 6 in a trial)"


def test_what_was_not_measured_is_said_so() -> None:
    result = tiled.Result((tiled_row(6, 1.3, 25.0), tiled_row(2, 1.0)), ())
    assert [verdict.reached for verdict in result.verdicts] == [None, True, None, None]
    assert result.within is None and tiled.Result((tiled_row(2, 9.0),), ()).within is False
    assert sum("NOT MEASURED" in str(verdict) for verdict in result.verdicts) == 3
    assert tiled.Result((tiled_row(6, 1.3, 25.0),), ()).within is None  # neither good nor bad


# ---- the benches from end to end, with seconds that are given -------------------------------------------

GIVEN = {
    **{"auto": 1.2, "per layer": 2.0, "all fused": 3.0, "pi-0": 6.0, tiled.ONE_CORE: 24.0},
    **{unequal.ALONE: 1.5, "equal batch": 4.0, "equal rows": 5.0},
    **{"pi-5 and one pi-3": 1.4, "pi-5 and two pi-3": 1.6, "all four": 1.3},
    **{peers.ONE: 2.4, CHANNELS_LAST: 1.8, peers.DDP: 9.0, unequal.PROMPT: 1.5},
}


def given_laps(
    setting: Setting,
    core: float,
    dilation: float | None,
    plans: Mapping[str, Choose],
    rivals: tuple[str, ...],
    *_: Any,
) -> tuple[tuple[Lap, ...], dict[str, Plan], Conditions]:
    """Plans are really made; how long they take is said."""
    graph = graph_of(setting.model, (setting.shape,), setting.batch)
    chosen = {name: choose(graph, setting.cluster)[0] for name, choose in plans.items() if name != "auto"}
    chosen["auto"] = next(iter(chosen.values())) if chosen else plans["auto"](graph, setting.cluster)[0]
    names = (*plans, *rivals)
    return tuple(Lap(name, GIVEN[name], each_s=(GIVEN[name],)) for name in names), chosen, CONDITIONS


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for module in (peers, scaling, tiled, unequal):
        monkeypatch.setattr(module, "laps", given_laps)
        monkeypatch.setattr(module, "core_speed", lambda *_: CORE)
    monkeypatch.setattr(peers, "part_speed", lambda core, *_: core)
    return monkeypatch


def test_the_tiled_setting_from_end_to_end(given: pytest.MonkeyPatch) -> None:
    given.setattr(tiled, "SHAPE", (3, 64, 64))
    given.setattr(
        tiled,
        "memory_of",
        lambda job: {"a": {"peak_bytes": 8_000 // len(job.plan.devices), "ready_bytes": 0}},
    )
    result = tiled.run((2, 6), (8,), (100.0, 25.0), None, 1, True, lambda _: None)
    seen = [verdict.seen for verdict in result.verdicts]
    assert seen[:3] == [pytest.approx(20.0), pytest.approx(20.0), pytest.approx(6 / 1.2 / 6)]
    assert [(m.devices, m.mbit) for m in result.memory] == [(2, 100), (2, 25), (6, 100), (6, 25)]
    text = printed(tiled.table(result))
    assert "20.0x" in text and "2 times as fast as asked for, on cores of 50 GFLOP/s" in text
    assert json.loads(json.dumps(tiled.to_json(result)))["within"] == result.within
    assert text.count("Mbit/s: 6.00 times less") == 2
    assert tiled.bars(result)["2 x batch 8\n100 Mbit/s"]["per layer"] == 12.0


def test_unequal_devices_from_end_to_end(given: pytest.MonkeyPatch) -> None:
    result = unequal.run(100.0, None, 1, lambda _: None)
    assert result.alone_is_chosen and not result.within  # all four took 1.3 s
    assert "0.8667, 1 required: NOT REACHED" in printed(unequal.table(result))
    assert not json.loads(json.dumps(unequal.to_json(result)))["within"]
    given.setattr(
        unequal,
        "laps",
        lambda *_: (result.laps, {"auto": None}, Conditions(1.0, CORE, (("all four", "why not"),))),
    )
    with pytest.raises(
        RunError, match="without all four, .* there is nothing to compare with: all four: why not"
    ):
        unequal.run(100.0, None, 1, lambda _: None)


def test_scaling_from_end_to_end(given: pytest.MonkeyPatch) -> None:
    given.setattr(scaling, "SIMULATED", (2, 4))
    given.setitem(GIVEN, scaling.ONE, 3.6)
    rows = scaling.run((1, 2), 4, 1000.0, None, 1, lambda _: None)
    assert [(row.devices, row.batch) for row in rows] == [(1, 4), (2, 8), (2, 8), (4, 16)]
    assert rows[1].efficiency == pytest.approx(1.5) and rows[2].conditions is None
    assert 0 < rows[3].efficiency < 1
    assert scaling.bars(rows)["2"].keys() == {"measured, auto", "simulated, batch"}
    text = printed(scaling.table(rows))
    assert "measured, auto" in text and "1.20-1.20 s" in text and "3.60-3.60 s" in text


def test_a_race_that_is_lost_ends_with_1_and_one_without_a_verdict_with_0(
    given: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given.setattr(tiled, "SHAPE", (3, 64, 64))
    plot = tmp_path / "race.png"
    won = in_process("bench", "peers", "--models", "resnet18", "--rates", "100", "--against", peers.DDP)
    assert won.returncode == 0 and "reached" in won.stdout and "NOT" not in won.stdout
    partly = in_process("bench", "tiled", "--devices", "2", "--json", "--plot", str(plot))
    assert partly.returncode == 0 and json.loads(partly.stdout)["within"] is None and plot.is_file()
    given.setitem(GIVEN, "auto", 5.0)
    assert in_process("bench", "tiled", "--devices", "2").returncode == 1
    assert in_process("bench", "tiled", "--devices", "3").returncode == 0  # of three nothing is required
    assert in_process("bench", "unequal").returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiled", "--devices", "2.5"), "whole numbers above 0"),
        (("tiled", "--devices", "0"), "whole numbers above 0"),
        (("tiled", "--batches", "inf"), "whole numbers above 0"),
        (("tiled", "--rates", ""), "at least one"),
        (("tiled", "--rates", "100,inf"), "numbers above 0"),
        (("scaling", "--devices", "two"), "whole numbers above 0"),
        (("scaling", "--dilate", "inf"), "a number"),
        (("unequal", "--rate", "inf"), "a number"),
        (("unequal", "--plot", "race.pdf"), ".png or .svg"),
        (("unequal", "--plot", "nowhere/race.png"), "no folder nowhere"),
        (("peers", "--rates", "-1"), "numbers above 0"),
        (("peers", "--wire", "float8"), "there is only bfloat16"),
        (("peers", "--keep", "/dev/null/kept"), "--keep /dev/null/kept"),
        (("peers", "--keep", "/proc/self"), "--keep /proc/self"),
        (("peers", "--against", "nobody"), "nobody is not one of"),
    ],
)
def test_a_mistake_is_told_before_anything_is_timed(
    given: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    for module in (peers, scaling, tiled, unequal):
        given.setattr(module, "core_speed", lambda *_: pytest.fail("it began"))
    ended = in_process("bench", *words)
    assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1


def test_what_cannot_be_emulated_is_told_before_the_first_race(given: pytest.MonkeyPatch) -> None:
    """Of 40 devices one core would get less than the kernel keeps."""
    given.setattr(devices, "cores_here", lambda: 2)
    for module in (peers, scaling, tiled):
        given.setattr(module, "laps", lambda *_: pytest.fail("it began"))
    for words in (("tiled", "--devices", "2,40"), ("scaling", "--devices", "2,100")):
        ended = in_process("bench", *words)
        assert ended.returncode == 2 and "which the kernel cannot keep" in ended.stderr
    ended = in_process("bench", "peers", "--rates", "25,30000", "--models", "unet", "--dilate", "1.5")
    assert ended.returncode == 2 and "fast enough for" in ended.stderr
    ended = in_process("bench", "tiled", "--devices", "2,6", "--dilate", "7")
    assert ended.returncode == 2 and "fast enough for" in ended.stderr
