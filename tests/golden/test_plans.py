"""Five plans as files: a change of the planner that changes a plan shows in review as a change of the file.

`pytest tests/golden --update-golden` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manyhands import api
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.codec import encode
from manyhands.loading import load_model

HERE = Path(__file__).parent


def pis(*gflops: float, memory_mb: int | None = None) -> tuple[Device, ...]:
    memory = None if memory_mb is None else memory_mb * 10**6
    return tuple(Device(f"pi-{i}", None, memory, rate * 1e9) for i, rate in enumerate(gflops))


CASES = {
    "yolov2-16-on-four-equal": ("yolov2-16", (3, 224, 224), 4, Cluster(pis(4, 4, 4, 4), 12.5e6, 5e-4)),
    "resnet18-on-unequal": ("resnet18", (3, 128, 128), 8, Cluster(pis(6, 2, 2), 125e6, 3e-4)),
    "vgg11-on-slow-network": ("vgg11", (3, 64, 64), 4, Cluster(pis(4, 4), 1.25e6, 2e-3)),
    "unet-in-little-memory": ("unet-small", (3, 96, 96), 4, Cluster(pis(4, 4, memory_mb=420), 125e6, 3e-4)),
    "mobilenetv2-on-a-radio": (
        "mobilenetv2",
        (3, 96, 96),
        4,
        Cluster(pis(4, 4, 4), 5e6, 3e-3, shared_bytes_per_s=5e6),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_on_file(name: str, request: pytest.FixtureRequest) -> None:
    model, shape, batch, cluster = CASES[name]
    with torch.device("meta"):
        built = load_model(model)
    graph = api.trace(built, torch.empty(batch, *shape, device="meta")).graph
    best = api.choose(graph, cluster).best
    assert best is not None
    found = {
        "model": model,
        "input": shape,
        "batch": batch,
        "cluster": encode(cluster),
        "plan": encode(best.plan),
        "forecast": {
            "seconds": float(f"{best.cost.seconds:.3g}"),
            "traffic_bytes": best.cost.traffic_bytes,
            "peak_megabytes": {device: round(size / 1e6) for device, size in best.cost.peak_bytes},
        },
    }
    path = HERE / f"{name}.json"
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert json.loads(json.dumps(found)) == json.loads(path.read_text())
