"""The names in a folder of checkpoints, and what is removed of them: nothing that is not the store's own."""

import os

import pytest

from ignite_engine import load_weights
from ignite_engine.errors import CheckpointError
from tests.checkpoint.made_states import (
    CheckpointStore,
    Retention,
    file_of,
    holds,
    iterations,
    left_over,
    manifest_of,
    newest,
    run_to,
    save,
)
from tests.kit.refusals import refuses
from tests.kit.tiny import linear


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def other(tmp_path):
    """Another run's folder, which must not change."""
    for iteration in (100, 300):
        save(CheckpointStore(tmp_path / "other"), iteration)
    before = content(tmp_path / "other")
    yield tmp_path / "other"
    assert content(tmp_path / "other") == before


def test_a_checkpoint_that_is_a_symbolic_link_is_never_read_or_deleted(tmp_path, other):
    store = CheckpointStore(tmp_path / "run")
    save(store, 200)
    for number in (100, 300):
        (store.directory / f"iteration_{number:08d}").symlink_to(other / f"iteration_{number:08d}")
    found, skipped = store.latest()
    assert found.iteration == 200
    assert [(path.name, "symbolic link" in reason) for path, reason in skipped] == [("iteration_00000300", True)]
    for iteration in (400, 300):
        save(store, iteration)
    store.prune(Retention(keep_last=1))
    links = sorted(each.name for each in store.directory.iterdir() if each.is_symlink())
    assert links == ["iteration_00000100", "iteration_00000300"]


def test_a_dangling_link_in_the_place_of_a_checkpoint_is_left(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "iteration_00000100").symlink_to(tmp_path / "gone")
    for _ in range(2):
        path = save(store, 100)
    assert path.name.startswith("iteration_00000100.") and len(store.checkpoints()) == 1
    assert (tmp_path / "iteration_00000100").is_symlink() and store.verify(path) == []


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    (tmp_path / "scratch" / ".tmp-iteration_00000300-0123abcd").mkdir()
    for iteration in (2, 4):
        run_to(tmp_path / "run", iteration, keep_last=1)
    assert os.listdir(tmp_path / "scratch") == ["iteration_00000004"]


@pytest.mark.parametrize("kind", [".tmp", ".trash"])
@pytest.mark.parametrize("link", ["itself", "inside"])
def test_of_a_leftover_with_links_the_links_go(tmp_path, other, kind, link):
    store = CheckpointStore(tmp_path / "run")
    save(store, 200)
    leftover = store.directory / f"{kind}-iteration_00000300-0123abcd"
    if link == "itself":
        leftover.symlink_to(other)
    else:
        leftover.mkdir()
        (leftover / "folder").symlink_to(other)
        (leftover / "loop").symlink_to("loop")
        (leftover / "file").symlink_to(other / "iteration_00000100" / "manifest.json")
    assert store.sweep() == [leftover] and not os.path.lexists(leftover)


def test_what_is_not_its_own_is_left(tmp_path):
    names = [".tmp-x", ".trash-mine", ".tmp-iteration_00000300", ".tmp-iteration_00000300-0123abcd~", "iteration_final"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("work")
    files = ["notes.txt", "iteration_00000009", "iteration_1"]
    for name in files:
        (tmp_path / name).write_text("a file, no checkpoint")
    before = content(tmp_path)
    store = CheckpointStore(tmp_path)
    for iteration in (1, 2):
        save(store, iteration)
    store.sweep()
    store.prune(Retention(keep_last=1))
    assert set(os.listdir(tmp_path)) == {*names, *files, "iteration_00000002"}
    assert before.items() <= content(tmp_path).items() and newest(tmp_path) == 2


@pytest.mark.parametrize("file", ["manifest", "shared", "rank_0"])
def test_a_file_of_a_checkpoint_that_is_a_link_is_not_read(tmp_path, other, file):
    """Where it leads to may be another run's, and whole."""
    path = save(CheckpointStore(tmp_path / "run"), 100)
    name = file_of(path, file).name
    (path / name).unlink()
    (path / name).symlink_to(other / "iteration_00000100" / name)
    refuses(lambda: CheckpointStore(tmp_path / "run").load(path), CheckpointError, name)
    refuses(lambda: load_weights(linear(), path), CheckpointError, name)
    assert newest(tmp_path / "run") is None


def test_new_metrics_change_no_data(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 1, metrics={"loss": 1.0})
    files = {each: each.stat() for each in path.iterdir() if each.name != "manifest.json"}
    knows_it = CheckpointStore(tmp_path)
    assert knows_it.checkpoints()[0].manifest.metrics == {"loss": 1.0}
    changed = store.add_metrics(path, {"val/loss": 0.5})
    assert manifest_of(path)["metrics"] == {"loss": 1.0, "val/loss": 0.5}
    assert knows_it.checkpoints()[0].manifest == CheckpointStore(tmp_path).checkpoints()[0].manifest == changed
    assert all(each.stat() == before for each, before in files.items()) and len(files) == 2
    assert store.verify(path) == [] and holds(store, path, 1)


@pytest.mark.row("D7", "D14")
def test_labels_of_a_run_are_on_every_checkpoint(tmp_path):
    run_to(tmp_path, 4, labels=(each for each in ("sweep 3", "mine")), config={"betas": (0.9, 0.95)})
    for iteration in iterations(tmp_path):
        manifest = manifest_of(tmp_path / f"iteration_{iteration:08d}")
        assert manifest["labels"] == ["sweep 3", "mine"] and manifest["config"] == {"betas": [0.9, 0.95]}
    assert len(iterations(tmp_path)) == 2 and left_over(tmp_path) == []
