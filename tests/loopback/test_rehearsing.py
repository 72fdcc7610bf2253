"""A rehearsal times everything, changes nothing, and needs nobody."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor

from manyhands import api
from manyhands.ir.graph import Convolve, Input
from manyhands.loading import load_model
from manyhands.planning.lowering import Lowered
from manyhands.runtime.computing import Batch
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.rehearsing import Rehearsal, Silence
from manyhands.runtime.transport import Transport
from manyhands.runtime.weights import split_weights
from manyhands.tracing.graphs import Traced

MODEL = load_model("demo", seed=1)
STRATEGIES = ("batch", "rows", "channels")


def prepared(strategy: str) -> tuple[Traced, Lowered]:
    traced = api.trace(MODEL, torch.empty(4, 1, 28, 28, device="meta"))
    return traced, api.lower(traced.graph, api.plan(traced.graph, 2, strategy))


def rehearsal(traced: Traced, lowered: Lowered, device: str, transport: Transport) -> Rehearsal:
    territory = lowered.territory(device)
    weights = split_weights(copy.deepcopy(MODEL), traced.graph, territory)
    functions = traced.functions, traced.inplace
    worker = Rehearsal(traced.graph, lowered.program(device), territory, weights, *functions, transport)
    worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 0.1))
    return worker


def batch() -> Batch:
    images = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    return Batch((images,), lambda outputs: outputs[0].square().mean())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_among_others_it_trains_as_a_worker_does(strategy: str) -> None:
    traced, lowered = prepared(strategy)

    def train(device: str, transport: Transport) -> dict[str, Tensor]:
        worker = api.make_worker(traced, lowered, copy.deepcopy(MODEL), device, transport)
        worker.use_optimiser(lambda parameters: torch.optim.SGD(parameters, 0.1))
        worker.step(batch())
        return worker.weights.tensors

    def rehearse(device: str, transport: Transport) -> dict[str, Tensor]:
        worker = rehearsal(traced, lowered, device, transport)
        worker.rehearse(batch())
        return worker.weights.tensors

    trained, rehearsed = (run_in_process(lowered.plan.devices, work) for work in (train, rehearse))
    for device, tensors in trained.items():
        assert all(torch.equal(tensor, rehearsed[device][name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alone_it_times_all_steps_and_layers(strategy: str) -> None:
    traced, lowered = prepared(strategy)
    for device in lowered.plan.devices:
        worker = rehearsal(traced, lowered, device, Silence())
        start = time.perf_counter()
        rounds = [worker.rehearse(batch()) for _ in range(3)]
        passed = time.perf_counter() - start
        assert 0.5 * passed < sum(r.seconds for r in rounds) <= passed
        layers, steps = worker.samples(rounds)
        computed = [name for name, tile in worker.territory.computed.items() if tile.numel]
        computed = [n for n in computed if not isinstance(worker.layers[n].operation, Input)]
        assert list(rounds[0].forward) == computed and len(layers) == len(computed)
        for name in computed:
            if isinstance(worker.layers[name].operation, Convolve):
                assert rounds[0].backward[name] > 0
        assert len(steps) == 1 + len(worker.program.steps)
        assert sum(s.forward_s + s.backward_s for s in layers) + sum(
            s.seconds for s in steps
        ) == pytest.approx(sorted(r.seconds for r in rounds)[1])
