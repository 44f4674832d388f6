"""The benchmark of captured models: a round has its updates, also after the run in which ``auto`` has decided."""

from __future__ import annotations

import shutil

import pytest
import torch

from benchmarks.captured_models import TRIAL, Way


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls")
@pytest.mark.long  # compiles in vain
def test_a_round_has_as_many_updates_after_the_decision() -> None:
    batches = [(torch.randn(4, 64), torch.randint(10, (4,))) for _ in range(20)]
    way = Way("a loss that reads a value", batches, "auto")
    way.decide()
    assert way.decisions == [False] and way.trainer is not None
    before = way.trainer.state.iteration
    assert way.round() > 0.0
    assert before >= TRIAL and way.trainer.state.iteration == before + len(batches)
