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


@pytest.mark.timeout(900)
def test_every_model_trains_as_on_one_device_on_two_three_and_four() -> None:
    pairs = []
    for index, (model, size) in enumerate(CASES):
        for num_devices, strategies in STRATEGIES.items():
            strategy = strategies[index % len(strategies)]
            request = Request.read(
                model, size, 4, None, num_devices, strategy, None, None, precision="float64"
            )
            pairs.append((request, request.plan()))
    differences = prove_all(pairs, steps=2)
    wrong = {
        f"{request.model} {request.strategy}": difference
        for (request, _), difference in zip(pairs, differences, strict=True)
        if not difference.exact
    }
    assert not wrong
    assert len(differences) == 3 * len(CASES)
