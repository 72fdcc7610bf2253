"""ResNet (He et al. 2016) with torchvision's parameter names, in its ImageNet and its CIFAR form.

The CIFAR form differs in the stem only: `conv1` is 3x3 with stride 1, and there is no max pool.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from manyhands.models.initialization import initialize_convolutions


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the image size at stride 1."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them; the first one carries the stride."""

    expansion: ClassVar[int] = 1

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        hidden = self.relu(self.bn1(self.conv1(images)))
        output: Tensor = self.relu(self.bn2(self.conv2(hidden)) + shortcut)
        return output


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut around them; the 3x3 carries the stride."""

    expansion: ClassVar[int] = 4

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        output: Tensor = self.relu(self.bn3(self.conv3(hidden)) + shortcut)
        return output


Block = type[BasicBlock] | type[Bottleneck]
Depths = tuple[int, int, int, int]


def _group(block: Block, in_channels: int, width: int, depth: int, stride: int) -> nn.Sequential:
    """`depth` blocks, the first of which changes the image size and the number of channels."""
    out_channels = width * block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(
            _convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
        )
    blocks = [block(in_channels, width, stride, downsample)]
    blocks += [block(out_channels, width, 1, None) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


class ResNet(nn.Module):
    """A stem, four groups of blocks, a global average pool and a linear head."""

    def __init__(self, block: Block, depths: Depths, num_classes: int, *, cifar: bool = False) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, 3) if cifar else _convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = None if cifar else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        expansion = block.expansion
        self.layer1 = _group(block, 64, 64, depths[0], stride=1)
        self.layer2 = _group(block, 64 * expansion, 128, depths[1], stride=2)
        self.layer3 = _group(block, 128 * expansion, 256, depths[2], stride=2)
        self.layer4 = _group(block, 256 * expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * expansion, num_classes)
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.bn1(self.conv1(images)))
        if self.maxpool is not None:
            hidden = self.maxpool(hidden)
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        scores: Tensor = self.fc(torch.flatten(self.avgpool(hidden), 1))
        return scores


def resnet18(num_classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes)


def resnet34(num_classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes)


def resnet50(num_classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes)


def resnet101(num_classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes)


def resnet152(num_classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes)


def resnet18_cifar(num_classes: int = 10) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, cifar=True)


def resnet34_cifar(num_classes: int = 10) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, cifar=True)


def resnet50_cifar(num_classes: int = 10) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, cifar=True)


def resnet101_cifar(num_classes: int = 10) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, cifar=True)


def resnet152_cifar(num_classes: int = 10) -> ResNet:
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes, cifar=True)
