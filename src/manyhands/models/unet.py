"""U-Net (Ronneberger et al. 2015) in its usual form: padded convolutions, batch norm, concatenated skips."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


def _double_convolution(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two 3x3 convolutions that keep the image size, each with batch norm and ReLU."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(out_channels),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            bn2=nn.BatchNorm2d(out_channels),
            relu2=nn.ReLU(inplace=True),
        )
    )


class Up(nn.Module):
    """Doubles the image size, halves the channels, and joins the skip of that size in front."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        out_channels = in_channels // 2
        self.up = nn.ConvTranspose2d(in_channels, out_channels, kernel_size=2, stride=2)
        self.conv = _double_convolution(in_channels, out_channels)

    def forward(self, hidden: Tensor, skip: Tensor) -> Tensor:
        output: Tensor = self.conv(torch.cat([skip, self.up(hidden)], dim=1))
        return output


class UNet(nn.Module):
    """Four halvings from `width` to 16 `width` channels and four doublings back.

    The output has the size of the input, whose height and width must be multiples of 16.
    """

    def __init__(self, in_channels: int, out_channels: int, width: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.down1 = _double_convolution(in_channels, width)
        self.down2 = _double_convolution(width, 2 * width)
        self.down3 = _double_convolution(2 * width, 4 * width)
        self.down4 = _double_convolution(4 * width, 8 * width)
        self.bottom = _double_convolution(8 * width, 16 * width)
        self.up4 = Up(16 * width)
        self.up3 = Up(8 * width)
        self.up2 = Up(4 * width)
        self.up1 = Up(2 * width)
        self.head = nn.Conv2d(width, out_channels, kernel_size=1)
        self._initialize()

    def _initialize(self) -> None:
        """The paper's start: normal weights of deviation sqrt(2 / inputs of a unit)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and name != "head":
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        skip1 = self.down1(images)
        skip2 = self.down2(self.pool(skip1))
        skip3 = self.down3(self.pool(skip2))
        skip4 = self.down4(self.pool(skip3))
        hidden = self.bottom(self.pool(skip4))
        hidden = self.up4(hidden, skip4)
        hidden = self.up3(hidden, skip3)
        hidden = self.up2(hidden, skip2)
        hidden = self.up1(hidden, skip1)
        logits: Tensor = self.head(hidden)
        return logits


def unet(in_channels: int = 3, out_channels: int = 1, width: int = 64) -> UNet:
    return UNet(in_channels, out_channels, width)


def unet_small(in_channels: int = 3, out_channels: int = 1) -> UNet:
    return UNet(in_channels, out_channels, width=16)
