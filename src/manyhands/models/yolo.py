"""The first 16 layers of YOLOv2 (Redmon and Farhadi 2017), numbered as in Darknet's yolov2.cfg.

Darknet counts convolutions and max pools alike, so child "4" is layer 4 of the file: a convolution to 128
channels. With an image of 608x608 the last layer gives 256 channels of 38x38.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

NEGATIVE_SLOPE = 0.1


@dataclass(frozen=True, slots=True)
class Convolution:
    """A square convolution that keeps the image size, with its norm and its leaky activation."""

    channels: int
    kernel: int


@dataclass(frozen=True, slots=True)
class MaxPool:
    """A 2x2 max pool with stride 2."""


LAYERS: tuple[Convolution | MaxPool, ...] = (
    Convolution(32, kernel=3),
    MaxPool(),
    Convolution(64, kernel=3),
    MaxPool(),
    Convolution(128, kernel=3),
    Convolution(64, kernel=1),
    Convolution(128, kernel=3),
    MaxPool(),
    Convolution(256, kernel=3),
    Convolution(128, kernel=1),
    Convolution(256, kernel=3),
    MaxPool(),
    Convolution(512, kernel=3),
    Convolution(256, kernel=1),
    Convolution(512, kernel=3),
    Convolution(256, kernel=1),
)


def _convolution_layer(in_channels: int, layer: Convolution, batch_norm: bool) -> nn.Sequential:
    """One Darknet convolution; its bias lives in the batch norm where there is one."""
    convolution = nn.Conv2d(
        in_channels, layer.channels, layer.kernel, padding=layer.kernel // 2, bias=not batch_norm
    )
    nn.init.kaiming_normal_(convolution.weight, a=NEGATIVE_SLOPE, nonlinearity="leaky_relu")
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    parts = OrderedDict[str, nn.Module](conv=convolution)
    if batch_norm:
        parts["bn"] = nn.BatchNorm2d(layer.channels)
    parts["activation"] = nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True)
    return nn.Sequential(parts)


def _network(batch_norm: bool) -> nn.Sequential:
    """The layers in a row, children "0" to "15"."""
    modules: list[nn.Module] = []
    channels = 3
    for layer in LAYERS:
        match layer:
            case Convolution():
                modules.append(_convolution_layer(channels, layer, batch_norm))
                channels = layer.channels
            case MaxPool():
                modules.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*modules)


def yolov2_16() -> nn.Sequential:
    return _network(batch_norm=True)


def yolov2_16_nobn() -> nn.Sequential:
    return _network(batch_norm=False)
