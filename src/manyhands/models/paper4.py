"""The eight-layer network of convolutions and linear layers with which paper 4 (Chen et al. 2019) decouples.

The paper says "an eight-layer model with both fully-connected and convolutional layers" and no more that we
could read. So the sizes are a plain choice, the one our own measurements of decoupled stages used: six 3x3
convolutions with batch norm and ReLU, then two linear layers, in pairs that make four natural stages.
"""

import torch
from torch import Tensor, nn

from manyhands.models.initialization import initialize_convolutions


def _activated(in_channels: int, out_channels: int, stride: int = 1) -> list[nn.Module]:
    """A 3x3 convolution, its batch norm and ReLU."""
    return [
        nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    ]


class Paper4(nn.Module):
    """Layers 1 and 2 at 16x16, 3 and 4 at 8x8, 5 and 6 at 4x4, then two linear layers; for 3x32x32 images."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(*_activated(3, 16, stride=2), *_activated(16, 32), nn.MaxPool2d(2))
        self.stage2 = nn.Sequential(*_activated(32, 32), *_activated(32, 48), nn.MaxPool2d(2))
        self.stage3 = nn.Sequential(*_activated(48, 64), *_activated(64, 64))
        self.stage4 = nn.Sequential(
            nn.Linear(64 * 4 * 4, 128), nn.ReLU(inplace=True), nn.Linear(128, num_classes)
        )
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stage3(self.stage2(self.stage1(images)))
        scores: Tensor = self.stage4(torch.flatten(hidden, 1))
        return scores


def paper4_8(num_classes: int = 10) -> Paper4:
    return Paper4(num_classes)
