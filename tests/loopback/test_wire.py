"""Tiles and gradients rounded for their way: fewer bytes, nearly the same training, and it is said."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyhands import api
from manyhands.errors import RequestError
from manyhands.ir.cluster import Cluster, Device
from manyhands.ir.codec import decode, encode
from manyhands.ir.plan import Plan
from manyhands.ir.program import Content, Message, Send
from manyhands.loading import load_model
from manyhands.planning.lowering import Lowered
from manyhands.planning.summary import summarise
from manyhands.reporting.text import plan_notes
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Transport
from manyhands.verifying import Outcome, make_trial, reference, train

ROUNDED = {Content.VALUE, Content.GRADIENT, Content.SLOPES}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),  # before a norm, a bias has no gradient but rounding
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 4, 3, padding=1),
    )


def messages(lowered: Lowered) -> list[Message]:
    return [step.message for program in lowered.programs for step in program.steps if isinstance(step, Send)]


def sizes(lowered: Lowered) -> list[tuple[Content, int]]:
    return [(message.content, message.num_bytes) for message in messages(lowered)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strategy", ["rows", "batch", "channels", "batch:2,channels:2"])
def test_training_moves_by_no_more_than_rounding(
    strategy: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.planning.packing.LEAST_BYTES", 0)
    model, images = net(), torch.randn(4, 3, 16, 16)
    graph = api.trace(model, images).graph
    chosen = replace(api.plan(graph, 4, strategy, wire="bfloat16"), packed=packed)
    difference = api.verify(model, (images,), chosen)
    assert 1e-6 < difference.worst < 0.05, "bfloat16 has 8 digits of two"
    assert not difference.exact and not chosen.exact
    assert api.verify(model, (images,), replace(chosen, wire=None)).exact
    again = tuple(replace(segment, redo=1) for segment in chosen.segments)
    assert api.verify(model, (images,), replace(chosen, segments=again)).worst < 0.05


@pytest.mark.parametrize("strategy", ["rows", "batch", "channels"])
def test_only_tiles_and_gradients_are_rounded(strategy: str) -> None:
    graph = api.trace(net(), torch.randn(4, 3, 16, 16)).graph
    whole, half = (api.lower(graph, api.plan(graph, 2, strategy, wire=wire)) for wire in (None, "bfloat16"))
    expected = [(c, size // 2 if c in ROUNDED else size) for c, size in sizes(whole)]
    assert sizes(half) == expected
    assert {content for content, _ in expected} & ROUNDED


def test_as_many_bytes_are_sent_as_the_programs_say() -> None:
    model, images = net(), torch.randn(4, 3, 16, 16)
    traced = api.trace(model, images)
    lowered = api.lower(traced.graph, api.plan(traced.graph, 2, "rows", wire="bfloat16"))
    trial = make_trial(traced.graph, (images,), steps=2)

    def work(device: str, transport: Transport) -> Outcome:
        return train(api.make_worker(traced, lowered, copy.deepcopy(model), device, transport), trial)

    sent = run_in_process(lowered.plan.devices, work)
    total = sum(message.num_bytes for message in messages(lowered))
    assert sum(outcome.sent_bytes for outcome in sent.values()) == 2 * total


def test_losses_go_down_as_on_one_device() -> None:
    model, images = net(), torch.randn(4, 3, 16, 16)
    traced = api.trace(model, images)
    lowered = api.lower(traced.graph, api.plan(traced.graph, 2, "rows", wire="bfloat16"))
    trial = replace(make_trial(traced.graph, (images,), steps=30), learning_rate=0.01)

    def work(device: str, transport: Transport) -> Outcome:
        return train(api.make_worker(traced, lowered, copy.deepcopy(model), device, transport), trial)

    found = run_in_process(lowered.plan.devices, work)[lowered.plan.devices[0]].losses
    alone = reference(copy.deepcopy(model), traced.graph, trial).losses
    assert alone[-1] < 0.9 * alone[0]
    assert found[-1] == pytest.approx(alone[-1], rel=0.02)


def test_one_device_sends_nothing_and_is_exact() -> None:
    graph = api.trace(net(), torch.randn(4, 3, 16, 16)).graph
    chosen = api.plan(graph, 1, "single", wire="bfloat16")
    facts = summarise(api.lower(graph, chosen), Cluster((Device(chosen.devices[0]),)))
    assert chosen.exact and plan_notes(facts)[-1].startswith("Exact")


def test_plans_and_people_are_told() -> None:
    graph = api.trace(net(), torch.randn(4, 3, 16, 16)).graph
    chosen = api.plan(graph, 2, "rows", wire="bfloat16")
    assert decode(Plan, encode(chosen)) == chosen
    facts = summarise(api.lower(graph, chosen), Cluster(tuple(Device(name) for name in chosen.devices)))
    assert plan_notes(facts)[-1] == "NOT exact: tiles and gradients are rounded to bfloat16 for their way."


def test_auto_foresees_less_time_where_the_network_is_slow() -> None:
    images = torch.empty(8, 3, 32, 32, device="meta")
    graph = api.trace(load_model("resnet18-cifar"), images).graph
    cluster = Cluster(tuple(Device(name, flops_per_s=1e10) for name in "ab"), 1e6, 0.0)
    whole, half = (api.choose(graph, cluster, required="ab", wire=wire).best for wire in (None, "bfloat16"))
    assert whole is not None and half is not None and half.plan.wire == "bfloat16"
    assert half.cost.seconds < 0.75 * whole.cost.seconds
    assert half.cost.traffic_bytes < 0.75 * whole.cost.traffic_bytes


def test_other_types_are_refused() -> None:
    graph = api.trace(net(), torch.randn(4, 3, 16, 16)).graph
    for strategy in ("auto", "rows"):
        with pytest.raises(RequestError, match="only bfloat16"):
            api.plan(graph, 2, strategy, wire="int4")
    with pytest.raises(RequestError, match="only bfloat16"):
        api.lower(graph, replace(api.plan(graph, 2, "rows"), wire="int4"))
