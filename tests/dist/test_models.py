"""Every model of the zoo, on real processes over real sockets, trains as on one device."""

from pathlib import Path

import pytest

from manyhands.proving import prove_all
from manyhands.requests import Request

VGG = Path(__file__).with_name("small_vgg.py")
CASES = (
    ("yolov2-16", "3x48x48"),
    ("yolov2-16-nobn", "3x48x48"),
    ("resnet18", "3x32x32"),
    ("resnet34", "3x32x32"),
    ("resnet50", "3x32x32"),
    ("resnet101", "3x48x48"),
    ("resnet152", "3x48x48"),
    ("resnet18-cifar", "3x16x16"),
    ("resnet50-cifar", "3x16x16"),
    (f"{VGG}:vgg11", "3x32x32"),
    (f"{VGG}:vgg11_bn", "3x32x32"),
    (f"{VGG}:vgg16", "3x32x32"),
    (f"{VGG}:vgg16_bn", "3x32x32"),
    ("unet-small", "3x32x32"),
    ("unet", "3x16x16"),
    ("mobilenetv2", "3x32x32"),
    ("demo", "1x28x28"),
)
STRATEGIES = {
    2: ("rows", "channels", "batch", "columns"),
    3: ("batch", "rows", "channels"),
    4: ("channels", "batch:2,rows:2", "grid", "rows", "rows:2,channels:2"),
}


HEAVY = ("resnet101", "resnet152", "unet")  # hundreds of megabytes in float64: on four devices, the rest is slow


def prove_cases(chosen: list[tuple[str, str, int]]) -> None:
    """Train each (model, input, number of devices) both ways, with a strategy that differs from case to case."""
    pairs = []
    for model, size, num_devices in chosen:
        strategies = STRATEGIES[num_devices]
        strategy = strategies[[name for name, _ in CASES].index(model) % len(strategies)]
        request = Request.read(model, size, 4, None, num_devices, strategy, None, None, precision="float64")
        pairs.append((request, request.plan()))
    differences = prove_all(pairs, steps=2)
    wrong = {
        f"{request.model} {request.strategy}": difference
        for (request, _), difference in zip(pairs, differences, strict=True)
        if not difference.exact
    }
    assert not wrong
    assert len(differences) == len(chosen)


@pytest.mark.timeout(900)
def test_every_model_trains_as_on_one_device_on_two_three_and_four() -> None:
    prove_cases([(m, size, n) for m, size in CASES for n in STRATEGIES if m not in HEAVY or n == 4])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_heavy_models_on_two_and_three() -> None:
    prove_cases([(m, size, n) for m, size in CASES for n in STRATEGIES if m in HEAVY and n != 4])
