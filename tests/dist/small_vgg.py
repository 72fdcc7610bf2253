"""A VGG of the zoo with a narrow classifier: its features are the real ones, its 100M weights are not."""

from torch import nn

from manyhands import models


def _narrow(name: str) -> nn.Module:
    with_features = models.build(name)
    width, dropout = 64, 0.5
    with_features.classifier = nn.Sequential(
        nn.Linear(512 * 7 * 7, width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, 10),
    )
    return with_features


def vgg11_bn() -> nn.Module:
    return _narrow("vgg11-bn")
