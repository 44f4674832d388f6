"""A checkpoint of format version 1, written by the code of that version, is read and resumed by this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ignite_engine import Trainer, Update, loader
from ignite_engine.checkpointing import CheckpointStore, LoadPlan, find_source, read_source
from ignite_engine.checkpointing.export import weights_of
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, warmup_cosine

OLD = Path(__file__).with_name("format_1")


def attached(directory: Path) -> tuple[Trainer, Checkpoint, EMA]:
    """As the run that wrote the old checkpoint after 3 of 8 updates, which saved all but its random numbers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(Update(model, optimizer, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()))
    LRSchedule(warmup_cosine(optimizer, warmup=2, total=8)).attach(trainer)
    ema = EMA(0.9)
    ema.attach(trainer)
    checkpoint = Checkpoint(directory, exclude=["rng"])
    checkpoint.attach(trainer)
    return trainer, checkpoint, ema


def ended(trainer: Trainer, ema: EMA) -> list[torch.Tensor]:
    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3) / 24, torch.ones(8, 1))
    trainer.run(loader(data, batch_size=2, shuffle=True, seed=1), max_iters=8)
    average: dict[str, torch.Tensor] = ema.state_dict()["weights"]
    return [*trainer.update.model.state_dict().values(), *average.values()]  # type: ignore[attr-defined]  # an Update


def test_the_manifest_says_the_same_under_the_new_names() -> None:
    (info,) = CheckpointStore(OLD).checkpoints()
    manifest = info.manifest
    assert "reproducibility" not in json.loads((info.path / "manifest.json").read_bytes())
    assert manifest.format_version == 1 and manifest.labels == ["old"]
    assert manifest.reproducibility == ["rng is not saved"] and not manifest.exact
    assert CheckpointStore(OLD).verify(info.path) == []


def test_a_run_resumes_from_it_and_ends_with_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    trainer, _, ema = attached(tmp_path / "whole")
    whole = ended(trainer, ema)
    shutil.copytree(OLD, tmp_path / "resumed")
    trainer, checkpoint, ema = attached(tmp_path / "resumed")
    assert checkpoint.resume() is not None and trainer.state.iteration == 3
    resumed: Any = ended(trainer, ema)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
    assert checkpoint.store.checkpoints()[-1].manifest.format_version == 2


def test_what_its_parts_are_is_guessed_where_it_does_not_say(tmp_path: Path) -> None:
    source = read_source(find_source(OLD))
    assert not source.kinds
    assert not torch.equal(weights_of(source, "ema")["weight"], weights_of(source)["weight"])
    trainer, checkpoint, _ = attached(tmp_path)
    table = checkpoint.load(OLD, LoadPlan(parts=["model", "optimizer", "schedule"], weights="ema"))
    assert {row.part for row in table.rows if row.outcome == "loaded"} == {"model", "optimizer", "lr_schedule"}
    assert torch.equal(trainer.registry.objects["model"].state_dict()["weight"], weights_of(source, "ema")["weight"])
