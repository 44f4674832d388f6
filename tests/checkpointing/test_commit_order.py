"""The order of file operations of a save. A kill cannot show a missing fsync: the page cache survives it."""

import itertools
import json
import os
from pathlib import Path

import pytest
from ignite.engine import Events

from ignite_engine.checkpointing import CheckpointStore, Retention
from ignite_engine.handlers import Checkpoint, MetricLogger
from tests.checkpointing.states import save
from tests.kit.faults import FileOperations
from tests.kit.tiny import numbers_loader, trainer_of

TEMPORARY = ".tmp-iteration_00000200"


def operations(root, seen):
    """What was seen, several writes in a row to one file as one."""
    return [each for each, _ in itertools.groupby(seen.seen)]


@pytest.mark.row("D6")
def test_a_save_is_durable_before_it_is_visible(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 100)
    with FileOperations(tmp_path) as seen:
        save(store, 200)
    assert operations(tmp_path, seen) == [
        ("mkdir", TEMPORARY),
        ("open", TEMPORARY),  # its lock
        *file_operations("shared.pt"),
        *file_operations("rank_0.pt"),
        *directory_operations(TEMPORARY),
        *file_operations("manifest.json"),
        *directory_operations(TEMPORARY),
        ("rename", f"{TEMPORARY} -> iteration_00000200"),
        *directory_operations("."),
    ]


def file_operations(name):
    return [(operation, f"{TEMPORARY}/{name}") for operation in ("open", "write", "fsync")]


def directory_operations(name):
    return [("open", name), ("fsync", name)]


def test_an_old_checkpoint_goes_only_after_the_new_one_is_durable(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 100)
    with FileOperations(tmp_path) as seen:
        save(store, 200)
        assert store.prune(Retention(keep_last=1)) == [tmp_path / "iteration_00000100"]
    order = operations(tmp_path, seen)
    committed = order.index(("rename", f"{TEMPORARY} -> iteration_00000200"))
    trash = ".trash-iteration_00000100"
    assert order[committed + 1 :] == [
        *directory_operations("."),
        ("open", "iteration_00000100"),  # the lock that no reader has
        ("rename", f"iteration_00000100 -> {trash}"),
        *directory_operations("."),
        *[("unlink", f"{trash}/{name}") for name in ("manifest.json", "rank_0.pt", "shared.pt")],
        ("rmdir", trash),
    ]


@pytest.mark.parametrize("background", [False, True])
def test_a_training_run_saves_and_prunes_in_that_order(tmp_path, background):
    trainer = trainer_of()
    checkpoint = Checkpoint(tmp_path, keep_last=1, background=background)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100))
    with FileOperations(tmp_path) as seen:
        trainer.run(numbers_loader(), max_iters=300)
    order = operations(tmp_path, seen)
    begun = order.index(("mkdir", TEMPORARY))
    committed = order.index(("rename", f"{TEMPORARY} -> iteration_00000200"))
    assert order[begun : committed + 1] == [
        ("mkdir", TEMPORARY),
        ("open", TEMPORARY),
        *file_operations("shared.pt"),
        *file_operations("rank_0.pt"),
        *directory_operations(TEMPORARY),
        *file_operations("manifest.json"),
        *directory_operations(TEMPORARY),
        ("rename", f"{TEMPORARY} -> iteration_00000200"),
    ]
    assert order[committed + 1 : committed + 7] == [
        *directory_operations("."),
        ("open", "iteration_00000100"),
        ("rename", "iteration_00000100 -> .trash-iteration_00000100"),
        *directory_operations("."),
    ]


@pytest.mark.parametrize("background", [False, True])
def test_the_log_is_durable_before_the_checkpoint_that_goes_on_with_it(tmp_path, background, monkeypatch):
    """Else a run that resumes after a power cut would go on behind a hole in its log."""
    log, durable, last_line = tmp_path / "metrics.jsonl", [b""], dict[str, int]()
    fsync, rename = os.fsync, os.rename

    def note_synchronised(descriptor):
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), log.stat()):
            durable.append(log.read_bytes())

    def note_committed(source, target):
        if Path(target).name.startswith("iteration_"):
            last_line[Path(target).name] = json.loads(durable[-1].splitlines()[-1])["iteration"]
        rename(source, target)

    trainer = trainer_of()
    MetricLogger(tmp_path, console=False).attach(trainer, Events.ITERATION_COMPLETED)
    checkpoint = Checkpoint(tmp_path / "checkpoints", background=background)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    monkeypatch.setattr(os, "fsync", note_synchronised)
    monkeypatch.setattr(os, "rename", note_committed)
    trainer.run(numbers_loader(), max_iters=6)

    # in the background the log may have gone on meanwhile, but it is synchronised by saves alone
    assert last_line == {f"iteration_0000000{iteration}": iteration for iteration in (2, 4, 6)}


def test_saved_again_at_the_same_iteration_the_old_one_goes_last(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 200)
    with FileOperations(tmp_path) as seen:
        assert save(store, 200) == tmp_path / "iteration_00000200"
    renames = [path for operation, path in seen.seen if operation == "rename"]
    assert renames == [
        f"{TEMPORARY} -> iteration_00000200.1",
        "iteration_00000200 -> .trash-iteration_00000200",
        "iteration_00000200.1 -> iteration_00000200",
    ]
    after = operations(tmp_path, seen)[operations(tmp_path, seen).index(("rename", renames[0])) + 1 :]
    assert after[:4] == [*directory_operations("."), ("open", "iteration_00000200"), ("rename", renames[1])]


def test_a_new_store_directory_is_durable_in_its_parents(tmp_path):
    with FileOperations(tmp_path) as seen:
        save(CheckpointStore(tmp_path / "run" / "checkpoints"), 200)
    assert operations(tmp_path, seen)[:6] == [
        ("mkdir", "run"),
        *directory_operations("."),
        ("mkdir", "run/checkpoints"),
        *directory_operations("run"),
    ]


def test_annotating_replaces_the_manifest_by_a_durable_one(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 200)
    with FileOperations(tmp_path) as seen:
        store.annotate(path, labels=["a"])
    temporary = "iteration_00000200/.manifest.json.tmp"
    assert operations(tmp_path, seen) == [
        ("open", "."),  # the lock of whoever changes a manifest
        ("open", temporary),
        ("write", temporary),
        ("fsync", temporary),
        ("rename", f"{temporary} -> iteration_00000200/manifest.json"),
        *directory_operations("iteration_00000200"),
    ]
