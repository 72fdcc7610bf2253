"""What the planner chooses trains as on one device, whatever mixture of layouts and shares it is."""

from __future__ import annotations

import pytest
import torch

from manyhands import api
from manyhands.ir.cluster import Cluster, Device
from manyhands.loading import load_model

CLUSTERS = {
    "unequal": Cluster(
        tuple(Device(f"d{i}", None, None, rate * 1e9) for i, rate in enumerate((3, 1, 2))), 1e8, 1e-4
    ),
    "equal": Cluster(tuple(Device(f"d{i}", None, None, 1e9) for i in range(4)), 1e9, 1e-5),
    "slow network": Cluster(tuple(Device(f"d{i}", None, None, 1e8) for i in range(2)), 1e6, 1e-3),
}
CASES = (
    ("demo", (1, 28, 28), "equal"),
    ("demo", (1, 28, 28), "slow network"),
    ("unet-small", (3, 32, 32), "unequal"),
)


@pytest.mark.parametrize(("name", "shape", "cluster"), CASES)
def test_a_chosen_plan_is_exact(name: str, shape: tuple[int, ...], cluster: str) -> None:
    model, example = load_model(name), torch.randn(4, *shape)
    graph = api.trace(model, example).graph
    devices = CLUSTERS[cluster]
    chosen = api.plan(graph, devices, required=devices.names)
    assert set(chosen.devices) == set(devices.names)
    assert api.verify(model, (example,), chosen).exact
