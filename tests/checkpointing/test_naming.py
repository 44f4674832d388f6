"""One resolver: a path, ``best`` or ``last``, wherever a checkpoint is named."""

import pytest

from ignite_engine.checkpointing import CheckpointStore, LoadSource, Retention, find_source
from ignite_engine.checkpointing.naming import is_there, split_name
from ignite_engine.checkpointing.weights_source import read_named
from tests.checkpointing.states import save

LOSS = {"metric": "val/loss", "mode": "min"}


@pytest.fixture
def run(tmp_path):
    """Of three checkpoints the second is the best."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for iteration, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        save(store, iteration, metrics={"val/loss": loss, "accuracy": loss}, best=LOSS, run_id="a")
    return tmp_path / "run"


def test_best_and_last_by_name_and_by_argument(run):
    best, last = (run / "checkpoints" / f"iteration_0000000{iteration}" for iteration in (2, 3))
    for folder in (run, run / "checkpoints"):
        assert find_source(folder) == find_source(folder, "last") == find_source(folder, "newest") == last
        assert find_source(folder / "last") == find_source(folder / "newest") == last
        assert (
            find_source(folder, "best") == find_source(folder / "best") == find_source(folder / "best", "best") == best
        )
    assert find_source(run, "best", metric="accuracy", mode="max") == last
    assert find_source(run / "best", metric="accuracy", mode="max") == last

    for source in (LoadSource(run / "best"), LoadSource(run, which="best")):
        found = source.find()
        assert found is not None and found.path == best and found.score == 0.1
    assert LoadSource(run / "best", metric="accuracy", mode="max").find().path == last
    (best / "shared.pt").write_bytes(b"damaged")  # the next best one that is valid
    assert find_source(run / "best").name == "iteration_00000001"


def test_what_is_there_under_that_name_is_meant(run, tmp_path):
    """A run may be called best."""
    (tmp_path / "run").rename(tmp_path / "best")
    assert split_name(tmp_path / "best") == (tmp_path / "best", "last")
    assert find_source(tmp_path / "best").name == "iteration_00000003"
    assert find_source(tmp_path / "best" / "best").name == "iteration_00000002"
    assert is_there(tmp_path / "best" / "best") and not is_there(tmp_path / "other" / "best")


def test_checkpoints_are_there_in_a_folder_of_their_own_and_in_that_of_a_run(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert is_there(run) and is_there(run / "checkpoints") and not is_there(tmp_path / "empty")


def test_another_run_in_the_same_folder_has_its_own_best(run):
    """A fresh start deletes what an earlier run has left: its best one is no better than those of this run."""
    store = CheckpointStore(run / "checkpoints")
    for iteration, loss in ((4, 0.6), (5, 0.7), (6, 0.8)):
        save(store, iteration, metrics={"val/loss": loss}, best=LOSS, run_id="b")
    assert find_source(run / "best").name == "iteration_00000004"
    store.prune(Retention(keep_last=1, best="val/loss"))
    assert [each.iteration for each in store.checkpoints()] == [4, 6]


def test_of_the_best_the_weights_that_were_evaluated(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, metrics={"val/loss": 0.5, "train/loss": 1.0}, best=LOSS, evaluated_with={"val": "ema"})

    def weights_of(*arguments, **options):
        return read_named(*arguments, **options, use=lambda source, weights: weights)

    assert weights_of(tmp_path / "best") == weights_of(tmp_path, "best") == "ema"
    assert weights_of(tmp_path) == weights_of(tmp_path / "last") == "raw"
    assert weights_of(tmp_path, "best", metric="train/loss", mode="min") == "raw"
    assert weights_of(tmp_path, "best", weights="raw") == "raw" and weights_of(tmp_path, weights="ema") == "ema"
