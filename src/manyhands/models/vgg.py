"""VGG (Simonyan and Zisserman 2015) with torchvision's parameter names, with and without batch norm."""

import torch
from torch import Tensor, nn

from manyhands.models.initialization import initialize_convolutions, initialize_linears

# The channels of the convolutions between one max pool and the next.
Stages = tuple[tuple[int, ...], ...]

VGG11_STAGES: Stages = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG16_STAGES: Stages = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _features(stages: Stages, batch_norm: bool) -> nn.Sequential:
    """3x3 convolutions, each with its activation, and a max pool at the end of each stage."""
    layers: list[nn.Module] = []
    in_channels = 3
    for stage in stages:
        for out_channels in stage:
            layers.append(nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(out_channels))
            layers.append(nn.ReLU(inplace=True))
            in_channels = out_channels
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)


class VGG(nn.Module):
    """Stages of convolutions, a pool to 7x7 and three linear layers."""

    def __init__(self, stages: Stages, num_classes: int, *, batch_norm: bool) -> None:
        super().__init__()
        self.features = _features(stages, batch_norm)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(stages[-1][-1] * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        initialize_convolutions(self)
        initialize_linears(self)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.avgpool(self.features(images))
        scores: Tensor = self.classifier(torch.flatten(hidden, 1))
        return scores


def vgg11(num_classes: int = 1000) -> VGG:
    return VGG(VGG11_STAGES, num_classes, batch_norm=False)


def vgg11_bn(num_classes: int = 1000) -> VGG:
    return VGG(VGG11_STAGES, num_classes, batch_norm=True)


def vgg16(num_classes: int = 1000) -> VGG:
    return VGG(VGG16_STAGES, num_classes, batch_norm=False)


def vgg16_bn(num_classes: int = 1000) -> VGG:
    return VGG(VGG16_STAGES, num_classes, batch_norm=True)
