"""The demonstration network: about 50,000 parameters that learn Fashion-MNIST in a few hundred steps."""

import torch
from torch import Tensor, nn

from manyhands.models.initialization import initialize_convolutions


def _activated(in_channels: int, out_channels: int) -> nn.Sequential:
    """A 3x3 convolution that keeps the image size, its batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions and the shortcut around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _activated(channels, channels)
        self.conv = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.relu(self.bn(self.conv(self.first(images))) + images)
        return output


class Demo(nn.Module):
    """Convolutions at 28x28 and 14x14, a residual block at 7x7, a wide convolution at 3x3, a linear head.

    Three pools, not two: the last convolution then sees the whole image before the average forgets places.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = _activated(1, 16)
        self.pool1 = nn.MaxPool2d(kernel_size=2)
        self.middle = _activated(16, 32)
        self.pool2 = nn.MaxPool2d(kernel_size=2)
        self.residual = Residual(32)
        self.pool3 = nn.MaxPool2d(kernel_size=2)
        self.top = _activated(32, 80)
        self.average = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Linear(80, num_classes)
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pool1(self.stem(images))
        hidden = self.pool2(self.middle(hidden))
        hidden = self.pool3(self.residual(hidden))
        hidden = self.average(self.top(hidden))
        scores: Tensor = self.head(torch.flatten(hidden, 1))
        return scores


def demo(num_classes: int = 10) -> Demo:
    return Demo(num_classes)
