"""In which order a device sums is decided once in a run, also if that is resumed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from manyhands import api
from manyhands.runtime import worker
from manyhands.runtime.inprocess import run_in_process
from manyhands.runtime.transport import Transport
from manyhands.training.checkpoints import orders
from manyhands.training.trainer import Settings, Trainer
from tests.training.test_trainer import BATCH, network


def test_what_was_decided_before_is_not_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run sums in the order of the first, however fast things are now: in evaluation too."""
    monkeypatch.setattr(worker, "convolutions_are_faster", lambda *_: pytest.fail("measured again"))
    plan = api.plan(api.trace(network(), torch.empty(BATCH, 3, 12, 12).double()).graph, 1, "single")

    def work(device: str, transport: Transport) -> list[tuple[bool, ...]]:
        found = []
        for order in ((True, True), (True, False), (False, False)):
            settings = Settings(F.cross_entropy, channels_last=order[0], convolving=order[1])
            example = torch.empty(BATCH, 3, 12, 12).double()
            trainer = Trainer(network(), (example,), plan, transport, device, settings)
            found.append((trainer.worker.convolving, trainer._evaluating().convolving))
        return found

    (found,) = run_in_process(plan.devices, work).values()
    assert found == [(True, True), (False, False), (False, False)]


def test_a_checkpoint_says_how_each_device_computed() -> None:
    """Before 1x1 convolutions could be computed otherwise, they were products."""
    assert orders({"channels_last": [True, False], "convolving": [True, False]}) == [
        (True, True),
        (False, False),
    ]
    assert orders({"channels_last": [True, False]}) == [(True, False), (False, False)]
