from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events

from ignite_engine.handlers import Checkpoint
from tests.builders import numbers_loader, trainer_of, weights


def train(directory: Path, mirror: Any, iterations: int) -> Any:
    trainer = trainer_of()
    checkpoint = Checkpoint(directory, mirror=mirror)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    found = checkpoint.resume()
    trainer.run(numbers_loader(), max_iters=iterations)
    return trainer, found


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_a_run_whose_folder_is_gone_ends_with_the_bits_of_the_undisturbed_one(tmp_path: Path, kind: str) -> None:
    mirror = str(tmp_path / "mirror") if kind == "directory" else f"memory://{tmp_path.name}/mirror"
    whole, _ = train(tmp_path / "whole", None, 12)
    train(tmp_path / "run", mirror, 7)
    shutil.rmtree(tmp_path / "run")
    trainer, found = train(tmp_path / "run", mirror, 12)
    assert found is not None and found.name == "iteration_00000007"
    assert torch.equal(weights(trainer), weights(whole))
    assert not (tmp_path / "run" / ".mirror").exists()
