"""Every model of the zoo, on real processes over real sockets, trains three steps as on one device.

The suite runs all families, and a VGG with a narrow classifier. `make test-slow` runs all the others:
the deep ResNets, the large U-Net, and the VGGs as they are (138 million weights in float64: 16 GB of memory).
"""

from dataclasses import replace
from pathlib import Path

import pytest

from manyhands import models
from manyhands.proving import prove_all
from manyhands.requests import Request

VGG = Path(__file__).with_name("small_vgg.py")
CASES = (
    ("yolov2-16", "3x48x48"),
    ("resnet18", "3x32x32"),
    ("resnet50", "3x32x32"),
    ("resnet18-cifar", "3x16x16"),
    (f"{VGG}:vgg11_bn", "3x32x32"),
    ("unet-small", "3x32x32"),
    ("mobilenetv2", "3x32x32"),
    ("demo", "1x28x28"),
    ("paper4-8", "3x32x32"),
)
SLOW_CASES = (
    ("yolov2-16-nobn", "3x48x48"),
    ("resnet34", "3x32x32"),
    ("resnet50-cifar", "3x16x16"),
    ("yolov2", "3x32x32"),
    ("resnet101", "3x48x48"),
    ("resnet152", "3x48x48"),
    ("unet", "3x16x16"),
    ("resnet34-cifar", "3x16x16"),
    ("resnet101-cifar", "3x16x16"),
    ("resnet152-cifar", "3x16x16"),
    ("vgg11", "3x32x32"),
    ("vgg11-bn", "3x32x32"),
    ("vgg16", "3x32x32"),
    ("vgg16-bn", "3x32x32"),
)
STRATEGIES = {
    2: ("rows", "channels", "batch", "columns"),
    3: ("batch", "rows", "channels"),
    4: ("channels", "batch:2,rows:2", "grid", "rows", "rows:2,channels:2"),
}
# Bytes; with more than the first, a step leaves weights to the next.
IN_FLIGHT = {2: 4 << 20, 3: 16 << 20, 4: 64 << 20}


def prove_on_two_three_and_four(cases: tuple[tuple[str, str], ...]) -> None:
    pairs = []
    for index, (model, size) in enumerate(cases):
        for num_devices, strategies in STRATEGIES.items():
            strategy = strategies[index % len(strategies)]
            request = Request.read(
                model, size, 4, None, num_devices, strategy, None, None, precision="float64"
            )
            plan = replace(request.plan(), in_flight_bytes=IN_FLIGHT[num_devices], packed=bool(index % 2))
            pairs.append((request, plan))
    differences = prove_all(pairs, steps=3)
    wrong = {
        f"{request.model} {request.strategy}": difference
        for (request, _), difference in zip(pairs, differences, strict=True)
        if not difference.exact
    }
    assert not wrong
    assert len(differences) == 3 * len(cases)


@pytest.mark.timeout(900)
def test_every_model_trains_as_on_one_device() -> None:
    prove_on_two_three_and_four(CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", SLOW_CASES, ids=lambda case: case[0])
def test_heavy_models_train_as_on_one_device(case: tuple[str, str]) -> None:
    prove_on_two_three_and_four((case,))


def test_no_model_is_forgotten() -> None:
    assert {name for name, _ in (*CASES, *SLOW_CASES)} >= set(models.names())
