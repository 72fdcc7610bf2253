"""Peak memory foreseen on paper, against that of real processes."""

from pathlib import Path

from manyhands.benches.footprint import WORST, WORST_UNDER, Case, run

CASES = (
    Case("resnet18", 96, 4, "rows; layer3.0.conv1 = channels", 2),
    Case("resnet18", 96, 8, "channels", 2, packed=True),
    Case(f"{Path(__file__).with_name('few_zeros.py')}:build", 512, 1, "channels", 2, packed=True),
    Case("resnet18", 96, 8, "channels", 2, wire="bfloat16"),
)


def test_peak_memory_is_as_foreseen() -> None:
    wrong = [row for row in run(CASES) if not -WORST_UNDER <= row.error <= WORST]
    assert not wrong
