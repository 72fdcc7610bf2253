"""A model in stages: whose memory its results are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyhands.tracing.stages import staged


class _Results(nn.Module):
    """Features, what is made of them, and the images themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(images)
        return features, self.head(features), images


def test_results_are_given_away_and_inputs_are_not() -> None:
    cut = staged(_Results(), [torch.randn(2, 3, 10, 10)])
    features, scores = 2 * 4 * 8 * 8 * 4, 2 * 2 * 6 * 6 * 4
    assert sorted(cut.memory_bytes[memory] for memory in cut.given_away) == [scores, features]
    assert [cut.memory_bytes[memory] for memory in cut.unread] == [scores]
