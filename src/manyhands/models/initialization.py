"""Starting weights that several networks share; batch norm keeps PyTorch's own start, ones and zeros."""

from torch import nn


def initialize_convolutions(model: nn.Module) -> None:
    """Fill every convolution with He's normal weights over its outputs, and its bias with zeros."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def initialize_linears(model: nn.Module) -> None:
    """Fill every linear layer with normal weights of deviation 0.01, and its bias with zeros."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.01)
            nn.init.zeros_(module.bias)
