"""MobileNetV2 (Sandler et al. 2018) with torchvision's parameter names."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.models.initialization import initialize_convolutions, initialize_linears


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the paper's table 2: `depth` blocks, the first of which carries the stride."""

    expansion: int
    channels: int
    depth: int
    stride: int


STAGES = (
    Stage(expansion=1, channels=16, depth=1, stride=1),
    Stage(expansion=6, channels=24, depth=2, stride=2),
    Stage(expansion=6, channels=32, depth=3, stride=2),
    Stage(expansion=6, channels=64, depth=4, stride=2),
    Stage(expansion=6, channels=96, depth=3, stride=1),
    Stage(expansion=6, channels=160, depth=3, stride=2),
    Stage(expansion=6, channels=320, depth=1, stride=1),
)
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280


def _activated(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution, its batch norm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Widen, convolve each channel by itself, narrow; a shortcut where the shape stays the same."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = in_channels * expansion
        layers: list[nn.Module] = [_activated(in_channels, width, kernel=1)] if expansion != 1 else []
        layers += [
            _activated(width, width, kernel=3, stride=stride, groups=width),
            nn.Conv2d(width, out_channels, kernel_size=1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.conv(images)
        return images + output if self.has_shortcut else output


class MobileNetV2(nn.Module):
    """A stem, the stages of inverted residuals, a wide 1x1 convolution, a global pool and a linear head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_activated(3, STEM_CHANNELS, kernel=3, stride=2)]
        channels = STEM_CHANNELS
        for stage in STAGES:
            for index in range(stage.depth):
                stride = stage.stride if index == 0 else 1
                layers.append(InvertedResidual(channels, stage.channels, stride, stage.expansion))
                channels = stage.channels
        layers.append(_activated(channels, HEAD_CHANNELS, kernel=1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(HEAD_CHANNELS, num_classes))
        initialize_convolutions(self)
        initialize_linears(self)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.avgpool(self.features(images))
        scores: Tensor = self.classifier(torch.flatten(hidden, 1))
        return scores


def mobilenetv2(num_classes: int = 1000) -> MobileNetV2:
    return MobileNetV2(num_classes)
