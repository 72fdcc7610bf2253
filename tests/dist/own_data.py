"""A small network with dropout and norms, and small images, as somebody's own file would have them."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 12


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


class Stripes(Dataset[tuple[Tensor, int]]):
    """Noise on stripes of four directions."""

    def __init__(self, count: int = 90) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 4
        noise = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(index))
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        wave = (rows, columns, rows + columns, rows - columns)[label]
        return noise + torch.sin(wave.float()), label


def train() -> Dataset[tuple[Tensor, int]]:
    return Stripes()


def wrong_labels() -> Dataset[tuple[Tensor, int]]:
    class Wrong(Stripes):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return super().__getitem__(index)[0], 7

    return Wrong()
