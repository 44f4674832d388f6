"""What is synchronised before what. A kill cannot show that it is missing: the page cache survives it."""

import json
import os
from pathlib import Path

import pytest
from ignite.engine import Events

from ignite_engine.handlers import Checkpoint, MetricLogger
from tests.checkpoint.made_states import CheckpointStore, Retention, attached, save
from tests.kit.faults import FileOperations
from tests.kit.tiny import numbers_loader, trainer_of


def places(seen, operation, path):
    """When these operations were, on a path with this beginning."""
    return [number for number, (kind, where) in enumerate(seen) if kind == operation and where.startswith(path)]


def assert_durable(seen, name, before=()):
    """What was written under a temporary name is on the disk before it has the name ``name``, the manifest last.

    Args:
        before: what goes only after that.
    """
    temporary = f".tmp-{name.partition('.')[0]}"
    (renamed,) = places(seen, "rename", f"{temporary} -> {name}")
    written = {path for kind, path in seen[:renamed] if kind == "write" and path.startswith(f"{temporary}/")}
    *data, manifest = sorted(written, key=lambda path: places(seen, "open", path)[0])
    assert manifest.endswith("/manifest.json") and data
    for path in written:
        assert places(seen, "write", path)[-1] < places(seen, "fsync", path)[-1] < renamed, path
        folder = [at for at in places(seen, "fsync", temporary) if seen[at][1] == temporary]
        last = renamed if path == manifest else places(seen, "open", manifest)[0]
        assert any(places(seen, "open", path)[0] < at < last for at in folder), path
    for path in data:
        assert places(seen, "fsync", path)[-1] < places(seen, "open", manifest)[0], path
    durable = next(at for at in places(seen, "fsync", ".") if at > renamed and seen[at][1] == ".")
    for other in before:
        gone = [*places(seen, "rename", other), *places(seen, "unlink", f".trash-{other}")]
        assert gone and min(gone) > durable, other


@pytest.mark.row("D6")
def test_a_save_is_durable_before_it_is_visible(tmp_path):
    with FileOperations(tmp_path) as seen:
        save(CheckpointStore(tmp_path / "run" / "checkpoints"), 200)
    for made, parent in (("run", "."), ("run/checkpoints", "run")):  # new folders, too
        assert max(places(seen.seen, "fsync", parent)) > min(places(seen.seen, "mkdir", made))
    with FileOperations(tmp_path / "run" / "checkpoints") as seen:
        save(CheckpointStore(tmp_path / "run" / "checkpoints"), 300)
    assert_durable(seen.seen, "iteration_00000300")


@pytest.mark.parametrize("background", [False, True])
def test_an_old_checkpoint_goes_only_after_the_new_one_is_durable(tmp_path, background):
    trainer, _ = attached(tmp_path, keep_last=1, background=background)
    with FileOperations(tmp_path) as seen:
        trainer.run(numbers_loader(), max_iters=6)
    for old, new in ((2, 4), (4, 6)):
        assert_durable(seen.seen, f"iteration_{new:08d}", [f"iteration_{old:08d}"])


def test_what_is_deleted_has_no_name_of_a_checkpoint_any_more(tmp_path):
    """Else a half of it would be found after a kill."""
    for iteration in (100, 200):
        save(CheckpointStore(tmp_path), iteration)
    with FileOperations(tmp_path) as seen:
        CheckpointStore(tmp_path).prune(Retention(keep_last=1))
    gone = [path for kind, path in seen.seen if kind in ("unlink", "rmdir")]
    assert len(gone) > 2 and all(path.startswith(".trash-iteration_00000100") for path in gone)


def test_saved_again_at_the_same_iteration_the_old_one_goes_last(tmp_path):
    save(CheckpointStore(tmp_path), 200)
    with FileOperations(tmp_path) as seen:
        assert save(CheckpointStore(tmp_path), 200) == tmp_path / "iteration_00000200"
    assert [path for operation, path in seen.seen if operation == "rename"] == [
        ".tmp-iteration_00000200 -> iteration_00000200.1",
        "iteration_00000200 -> .trash-iteration_00000200",
        "iteration_00000200.1 -> iteration_00000200",
    ]
    assert_durable(seen.seen, "iteration_00000200.1", ["iteration_00000200 "])


def test_a_manifest_is_replaced_by_a_durable_one(tmp_path):
    path = save(CheckpointStore(tmp_path), 200)
    with FileOperations(tmp_path) as seen:
        CheckpointStore(tmp_path).add_metrics(path, {"a": 1})
    (written,) = {where for kind, where in seen.seen if kind == "write"}
    operations = [kind for kind, where in seen.seen if where.startswith((path.name, written))]
    assert operations == ["open", "write", "fsync", "rename", "open", "fsync"]


@pytest.mark.parametrize("background", [False, True])
def test_the_log_is_durable_before_the_checkpoint_that_goes_on_with_it(tmp_path, background, monkeypatch):
    """Else a run that resumes after a power cut would go on behind a hole in its log."""
    log, durable, last_line = tmp_path / "metrics.jsonl", [b""], {}
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
    Checkpoint(tmp_path / "checkpoints", background=background).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    monkeypatch.setattr(os, "fsync", note_synchronised)
    monkeypatch.setattr(os, "rename", note_committed)
    trainer.run(numbers_loader(), max_iters=6)

    # in the background the log may have gone on meanwhile, but it is synchronised by saves alone
    assert last_line == {f"iteration_0000000{iteration}": iteration for iteration in (2, 4, 6)}
