"""What is kept: last-k, best-k, every n-th, the newest healthy one; always computed from disk."""

import math

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention
from tests.checkpointing.states import holds, save


def run(directory, saves, retention):
    """Save and prune after each save, every time with a new store as after a restart; the iterations that remain."""
    for options in saves:
        store = CheckpointStore(directory)
        save(store, **options)
        store.prune(retention)
    return [each.iteration for each in CheckpointStore(directory).checkpoints()]


def scored(*losses):
    return [{"iteration": 100 * n, "metrics": {"val/loss": loss}} for n, loss in enumerate(losses, start=1)]


def test_the_last_ones_are_kept_over_restarts(tmp_path):
    assert run(tmp_path, scored(1, 2, 3, 4, 5), Retention(keep_last=2)) == [400, 500]


@pytest.mark.row("D3")
def test_the_best_ones_are_kept_beside_the_last_over_restarts(tmp_path):
    saves = scored(3.0, 1.0, 2.0, 5.0, 4.0)
    assert run(tmp_path, saves, Retention(keep_last=1, keep_best=2, best="val/loss")) == [200, 300, 500]


def test_mode_max_keeps_the_largest(tmp_path):
    saves = scored(3.0, 9.0, 2.0, 5.0, 4.0)
    assert run(tmp_path, saves, Retention(keep_last=1, best="val/loss", mode="max")) == [200, 500]


def test_of_equal_scores_the_earlier_is_kept(tmp_path):
    assert run(tmp_path, scored(1.0, 1.0, 1.0, 1.0), Retention(keep_last=1, best="val/loss")) == [100, 400]


def test_scores_that_are_missing_or_not_finite_are_never_the_best(tmp_path):
    saves = [*scored(math.nan, -math.inf, 7.0), {"iteration": 400}, {"iteration": 500}]
    retention = Retention(keep_last=1, keep_best=3, best="val/loss")
    assert run(tmp_path, saves, retention) == [300, 500]
    assert CheckpointStore(tmp_path).checkpoints()[0].manifest.metrics == {"val/loss": 7.0}


def test_a_metric_that_is_not_finite_comes_back_as_it_was(tmp_path):
    save(CheckpointStore(tmp_path), 1, metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
    metrics = CheckpointStore(tmp_path).checkpoints()[0].manifest.metrics
    assert math.isnan(metrics.pop("a")) and metrics == {"b": math.inf, "c": -math.inf, "d": 0.1}


@pytest.mark.row("D3")
def test_every_nth_is_kept_for_good(tmp_path):
    assert run(tmp_path, scored(*range(1, 8)), Retention(keep_last=1, keep_every=300)) == [300, 600, 700]


def test_checkpoints_with_broken_weights_never_evict_the_last_healthy_one(tmp_path):
    saves = [{"iteration": 100 * n, "healthy": n <= 2, "metrics": {"val/loss": 1.0 / n}} for n in range(1, 7)]
    assert run(tmp_path, saves, Retention(keep_last=2, best="val/loss")) == [200, 500, 600]
    store = CheckpointStore(tmp_path)
    assert store.latest().checkpoint.iteration == 600
    newest, skipped = store.latest(healthy_only=True)
    assert newest is not None and newest.iteration == 200
    assert [why for _, why in skipped] == ["its weights are not finite"] * 2


def test_the_newest_healthy_one_is_part_of_what_retention_names(tmp_path):
    for iteration in (100, 200, 300):
        save(CheckpointStore(tmp_path), iteration, healthy=iteration < 300)
    kept = Retention(keep_last=1).kept(CheckpointStore(tmp_path).checkpoints())
    assert [each.iteration for each in kept] == [200, 300]


def test_a_broken_state_does_not_take_the_place_of_a_healthy_one_of_the_same_iteration(tmp_path):
    store = CheckpointStore(tmp_path)
    healthy = save(store, 100)
    broken = save(store, 100, healthy=False)
    assert broken != healthy and store.prune(Retention(keep_last=1)) == []
    assert store.latest().checkpoint.path == broken
    assert store.latest(healthy_only=True).checkpoint.path == healthy
    mended = save(store, 100)
    assert mended == healthy and [each.path for each in store.checkpoints()] == [mended]


def test_the_newest_is_the_last_one_saved_and_not_the_largest_number(tmp_path):
    store = CheckpointStore(tmp_path)
    for iteration in (100, 200, 300):
        save(store, iteration)
    # resumed from 100 by choice: what follows must not be pruned or passed over for what another branch left
    save(store, 150, parent="iteration_00000100")
    assert store.latest().checkpoint.iteration == 150
    store.prune(Retention(keep_last=1))
    assert [each.iteration for each in store.checkpoints()] == [150]
    assert holds(store, tmp_path / "iteration_00000150", 150)


def test_saved_again_at_the_same_iteration_labels_stay(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 100, labels=["first"])
    save(store, 100, labels=["second"])
    (only,) = store.checkpoints()
    assert only.manifest.labels == ["first", "second"]


def test_names_beyond_eight_digits_are_ordered_and_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    for iteration in (99_999_999, 100_000_000, 100_000_001):
        save(store, iteration)
    assert [each.name for each in store.prune(Retention(keep_last=2))] == ["iteration_99999999"]
    assert [each.iteration for each in store.checkpoints()] == [100_000_000, 100_000_001]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"keep_best": -1}, "keep_best must be at least 0, got -1"),
        ({"mode": "lowest"}, "mode must be 'min' or 'max', got 'lowest'"),
        ({"keep_every": 0}, "keep_every must be at least 1 iteration or None, got 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Retention(**settings)
