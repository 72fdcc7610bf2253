"""A model of one's own for a job file: `model = "examples/calm_resnet.py:resnet18"`."""

from torch import nn

from manyhands.models.resnet import BasicBlock, ResNet, resnet18_cifar


def resnet18() -> ResNet:
    """ResNet-18 in its CIFAR form, every block of which begins as its shortcut alone.

    Goyal et al. 2017 (section 5.1) start the last batch norm of each block at zero. Training is steadier so:
    a difference in rounding, which He's start makes a thousand times larger in five steps, stays small.
    """
    model = resnet18_cifar(num_classes=10)
    for block in model.modules():
        if isinstance(block, BasicBlock):
            nn.init.zeros_(block.bn2.weight)
    return model
