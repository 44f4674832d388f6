"""What was verified is remembered until it changes."""

import os
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update, load_weights
from ignite_engine.checkpointing import (
    CheckpointError,
    CheckpointStore,
    part_file,
    read_manifest,
    read_source,
    verification,
)
from ignite_engine.checkpointing.filesystem import hash_file
from ignite_engine.checkpointing.hashed_read import read_hashed
from ignite_engine.checkpointing.verification import Verification
from ignite_engine.handlers import Checkpoint
from tests.checkpointing.states import save
from tests.kit.tiny import mse, numbers_loader


def test_a_file_is_sound_once_it_was_read_and_until_it_changes(tmp_path):
    path = save(CheckpointStore(tmp_path), 100)
    manifest, check = read_manifest(path), Verification()
    file, record = path / "shared.pt", manifest.files["shared.pt"]
    assert not check.is_sound(file, record) and check.looks_sound(path, manifest)
    assert check.is_valid(path, manifest) and check.is_sound(file, record)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert not check.is_sound(file, record) and check.known_problem(file, record) is None
    assert check.looks_sound(path, manifest) and not check.is_valid(path, manifest)
    assert "shared.pt has changed" in (check.known_problem(file, record) or "")
    assert not check.looks_sound(path, manifest) and len(check.problems(path)) == 1


def test_a_file_that_is_missing_or_of_another_size_does_not_look_sound(tmp_path):
    path = save(CheckpointStore(tmp_path), 100)
    manifest, check = read_manifest(path), Verification()
    with (path / "rank_0.pt").open("ab") as file:
        file.write(b"x")
    assert not check.looks_sound(path, manifest)
    (path / "rank_0.pt").unlink()
    assert not check.looks_sound(path, manifest) and check.problems(path) == ["rank_0.pt is missing"]


def test_what_was_written_is_known_without_being_read(tmp_path):
    path = save(CheckpointStore(tmp_path), 100)
    manifest, check = read_manifest(path), Verification()
    check.remember_written(path, manifest)
    assert all(check.is_sound(path / name, record) for name, record in manifest.files.items())
    check.forget(path)
    assert not any(check.is_sound(path / name, record) for name, record in manifest.files.items())


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were hashed to verify them, wherever."""
    names = []

    def counting(hashing):
        def counted(file, algorithm):
            names.append(Path(file.name).name)
            return hashing(file, algorithm)

        return counted

    for module in (verification, part_file):
        monkeypatch.setattr(module, "hash_file", counting(hash_file))
    monkeypatch.setattr(part_file, "read_hashed", counting(read_hashed))
    monkeypatch.setattr(verification, "_SETTLED_NS", 0)
    return names


@pytest.mark.parametrize("large", [False, True])
def test_who_chooses_a_checkpoint_and_who_loads_it_hash_each_file_once(tmp_path, hashed, large):
    def trainer_with(name):
        width = 1 << 17 if large else 1
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9), mse))
        checkpoint = Checkpoint(tmp_path / name, best="loss", writers=4 if large else 1)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(loss=1.0))
        return trainer, checkpoint

    trainer, checkpoint = trainer_with("run")
    trainer.run(numbers_loader(), max_iters=1)
    files = sorted(read_manifest(checkpoint.store.checkpoints()[-1].path).files)
    assert len(files) == (3 if large else 2)
    model = trainer.update.model
    for use in (
        lambda: trainer_with("run")[1].resume(),
        lambda: trainer_with("other")[1].load(tmp_path / "run"),
        lambda: load_weights(model, tmp_path / "run", "best"),
        checkpoint.restore_best,
    ):
        verification._READ.clear()
        hashed.clear()
        use()
        assert sorted(hashed) == files


def test_what_another_store_has_read_is_known_until_it_changes(tmp_path, hashed):
    path = save(CheckpointStore(tmp_path), 1)
    assert CheckpointStore(tmp_path).latest().checkpoint is not None
    hashed.clear()
    CheckpointStore(tmp_path).load(path)
    assert hashed == []
    content = bytearray((path / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "shared.pt").write_bytes(content)
    os.utime(path / "shared.pt", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"shared\.pt has changed"):
        CheckpointStore(tmp_path).load(path)


def test_what_was_written_just_now_may_change_unseen_and_is_read_again(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(verification, "_SETTLED_NS", 1 << 62)
    path = save(CheckpointStore(tmp_path), 1)
    CheckpointStore(tmp_path).latest()
    hashed.clear()
    CheckpointStore(tmp_path).load(path)
    assert sorted(hashed) == ["rank_0.pt", "shared.pt"]


def test_a_rank_that_is_new_reads_the_shared_parts_once(tmp_path, hashed):
    path = save(CheckpointStore(tmp_path), 1)
    assert set(read_source(path, rank=3).parts) == {"model", "counters"}
    assert sorted(hashed) == ["rank_0.pt", "shared.pt"]
