"""YOLOv2 (Redmon and Farhadi 2017), whole and its first 16 layers, numbered as in Darknet's yolov2.cfg.

Darknet counts convolutions, max pools and routes alike, so child "4" is layer 4 of the file: a convolution
to 128 channels. The routes, 25 and 28, are no modules: they say which layers are read, and `forward` does.
With an image of 608x608 layer 15 gives 256 channels of 38x38, and the whole network a grid of 19x19.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NEGATIVE_SLOPE = 0.1
NUM_ANCHORS = 5
COCO_CLASSES = 80


@dataclass(frozen=True, slots=True)
class Convolution:
    """A square convolution that keeps the image size, with its norm and its leaky activation."""

    channels: int
    kernel: int


@dataclass(frozen=True, slots=True)
class MaxPool:
    """A 2x2 max pool with stride 2."""


Layer = Convolution | MaxPool

FIRST_LAYERS: tuple[Layer, ...] = (
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
TRUNK: tuple[Layer, ...] = (
    *FIRST_LAYERS,
    Convolution(512, kernel=3),
    MaxPool(),
    Convolution(1024, kernel=3),
    Convolution(512, kernel=1),
    Convolution(1024, kernel=3),
    Convolution(512, kernel=1),
    Convolution(1024, kernel=3),
    Convolution(1024, kernel=3),
    Convolution(1024, kernel=3),
)
PASSTHROUGH_FROM = 16  # the last layer before the fifth pool, where the map is still twice as fine
PASSTHROUGH = Convolution(64, kernel=1)
JOINED = Convolution(1024, kernel=3)


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


def _modules(layers: tuple[Layer, ...], batch_norm: bool) -> list[nn.Module]:
    """One module a layer, for images of three channels."""
    modules: list[nn.Module] = []
    channels = 3
    for layer in layers:
        match layer:
            case Convolution():
                modules.append(_convolution_layer(channels, layer, batch_norm))
                channels = layer.channels
            case MaxPool():
                modules.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return modules


def _head(in_channels: int, num_classes: int) -> nn.Sequential:
    """The last, linear layer: a box, a confidence and the classes for every anchor in every cell.

    It starts small, so that before training every box is its anchor and all classes are alike.
    """
    convolution = nn.Conv2d(in_channels, NUM_ANCHORS * (5 + num_classes), kernel_size=1)
    nn.init.normal_(convolution.weight, std=0.01)
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    return nn.Sequential(OrderedDict[str, nn.Module](conv=convolution))


class YOLOv2(nn.Module):
    """The detector: a trunk that halves the image five times, joined by a finer map that skips the last pool.

    The passthrough lays each 2x2 square of the finer map into channels, in the order of `PixelUnshuffle`
    and not in Darknet's own, which matters to nothing but Darknet's weight files. The output has
    5 * (5 + num_classes) channels; height and width of the image must be multiples of 32.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        for index, module in enumerate(_modules(TRUNK, batch_norm=True)):
            self.add_module(str(index), module)
        last, finer = TRUNK[-1], TRUNK[PASSTHROUGH_FROM]
        assert isinstance(last, Convolution) and isinstance(finer, Convolution)
        self.add_module("26", _convolution_layer(finer.channels, PASSTHROUGH, batch_norm=True))
        self.add_module("27", nn.PixelUnshuffle(2))
        joined_channels = 4 * PASSTHROUGH.channels + last.channels
        self.add_module("29", _convolution_layer(joined_channels, JOINED, batch_norm=True))
        self.add_module("30", _head(JOINED.channels, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        finer = self._through(images, 0, PASSTHROUGH_FROM + 1)
        coarse = self._through(finer, PASSTHROUGH_FROM + 1, len(TRUNK))
        joined = torch.cat([self._through(finer, 26, 28), coarse], dim=1)
        return self._through(joined, 29, 31)

    def _through(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """What the layers `start` up to `stop` make of it, one after another."""
        for index in range(start, stop):
            hidden = self.get_submodule(str(index))(hidden)
        return hidden


def yolov2(num_classes: int = COCO_CLASSES) -> YOLOv2:
    return YOLOv2(num_classes)


def yolov2_16() -> nn.Sequential:
    return nn.Sequential(*_modules(FIRST_LAYERS, batch_norm=True))


def yolov2_16_nobn() -> nn.Sequential:
    return nn.Sequential(*_modules(FIRST_LAYERS, batch_norm=False))
