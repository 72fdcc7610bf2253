"""A network whose large rectified results are hardly ever zero."""

import torch
from torch import nn


def build() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 64, 1),
        nn.ReLU(),
        nn.Conv2d(64, 8, 3, stride=4, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    with torch.no_grad():
        net[0].bias += 8  # type: ignore[operator]
    return net
