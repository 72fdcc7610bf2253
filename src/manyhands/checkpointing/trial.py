"""`python -m manyhands.checkpointing.trial CASE`: a few steps of a fitted model in a process of its own.

What it found comes out as one line of JSON; a case is JSON, too: model, shape, batch, memory and steps.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from manyhands.checkpointing.fitting import fit
from manyhands.errors import RequestError
from manyhands.loading import load_model
from manyhands.runtime.process import forget_peak, peak_memory


def run(model: str, shape: list[int], batch: int, memory: int, steps: int) -> dict[str, Any]:
    """Train by SGD with momentum on random images; bytes are of the whole process."""
    torch.manual_seed(0)
    network = load_model(model).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    images = torch.randn(batch, *shape)
    try:
        fitted = fit(network, images, memory, optimizer)
    except RequestError as error:
        return {"refused": str(error)}
    facts: Any = fitted.fit
    forget_peak()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        fitted(images).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return {
        "foreseen_bytes": facts.foreseen_bytes,
        "peak_bytes": peak_memory(),
        "plain_bytes": facts.plain_bytes,
        "least_bytes": facts.least_bytes,
        "planning_s": facts.planning_s,
        "seconds": seconds,
        "plain_s": facts.plain_s,
    }


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
