"""What the planner chooses trains as on one device, whatever mixture of layouts and shares it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.plan import Kept
from manyhands.loading import load_model

CLUSTERS = {
    "unequal": Cluster(
        tuple(Device(f"d{i}", None, None, rate * 1e9) for i, rate in enumerate((3, 1, 2))), 1e8, 1e-4
    ),
    "equal": Cluster(tuple(Device(f"d{i}", None, None, 1e9) for i in range(4)), 1e9, 1e-5),
    "slow network": Cluster(tuple(Device(f"d{i}", None, None, 1e8) for i in range(2)), 1e6, 1e-3),
}
MODELS = (("demo", (1, 28, 28)), ("unet-small", (3, 32, 32)), ("resnet18-cifar", (3, 16, 16)))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("name", "shape"), MODELS, ids=[name for name, _ in MODELS])
def test_a_chosen_plan_is_exact(name: str, shape: tuple[int, ...], cluster: str) -> None:
    model, example = load_model(name), torch.randn(4, *shape)
    graph = api.trace(model, example).graph
    devices = CLUSTERS[cluster]
    chosen = api.plan(graph, devices, required=devices.names)
    assert set(chosen.devices) == set(devices.names)
    assert api.verify(model, (example,), chosen).exact


@pytest.mark.parametrize("cluster", ("unequal", "slow network"))
def test_a_small_network_whose_plan_was_changed_is_exact(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 24, 5, padding=2), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 8, 3))
    example, devices = torch.randn(5, 3, 31, 31), CLUSTERS[cluster]
    graph = api.trace(model, example).graph
    changed = api.choose(graph, devices).best
    monkeypatch.setattr("manyhands.planning.deciding.CHANGES", 1)
    found = api.choose(graph, devices).best
    assert changed is not None and found is not None
    assert changed.cost.seconds < found.cost.seconds and changed.plan.segments != found.plan.segments
    assert api.verify(model, (example,), changed.plan).exact


def test_a_mean_over_the_image_itself_can_be_planned() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
    example = torch.randn(4, 3, 8, 8)
    devices = CLUSTERS["slow network"]
    chosen = api.plan(api.trace(model, example).graph, devices, required=devices.names)
    assert api.verify(model, (example,), chosen).exact


def test_too_many_devices_for_the_work_are_refused_as_such() -> None:
    graph = api.trace(nn.Linear(8, 2), torch.randn(1, 8)).graph
    with pytest.raises(RequestError, match="no plan gives every device something to do"):
        api.plan(graph, CLUSTERS["unequal"], required=CLUSTERS["unequal"].names)


def test_an_optimiser_that_keeps_more_needs_more_memory() -> None:
    graph = api.trace(load_model("resnet18-cifar"), torch.randn(2, 3, 16, 16)).graph
    lowered = api.lower(graph, api.plan(graph, 1, "single"))
    devices = Cluster((Device("device-0", None, 10**12),))
    sgd, adam = (api.simulate(lowered, devices, kept=kept).cost for kept in (Kept(0, 0), Kept(2, 2)))
    weights = sum(p.numel() * 4 for p in load_model("resnet18-cifar").parameters())
    assert adam.peak_bytes[0][1] - sgd.peak_bytes[0][1] >= 2 * weights
