"""What is kept: last-k, best-k, every n-th, the newest healthy one; always computed from disk."""

import math
from pathlib import Path

import pytest
from ignite.engine import Events

from ignite_engine.handlers import Checkpoint
from tests.checkpoint.made_states import (
    CheckpointStore,
    Retention,
    holds,
    iterations,
    manifest_of,
    newest,
    save,
)
from tests.kit.refusals import refusals
from tests.kit.tiny import numbers_loader, trainer_of

NAN, INF = math.nan, math.inf


def scored(*losses, **facts):
    return [{"metrics": {"val/loss": loss}, **facts} for loss in losses]


def healthy_until(count, total):
    return [{"healthy": n < count, "metrics": {"val/loss": 1.0 / (n + 1)}} for n in range(total)]


BEST = {"best": "val/loss"}
# what is said of the saves at iterations 1, 2, ...; what is to be kept; and which remain
KEPT = {
    "the last two": (scored(1, 2, 3, 4, 5), {"keep_last": 2}, [4, 5]),
    "the best two and the last": (scored(3, 1, 2, 5, 4), {"keep_best": 2, **BEST}, [2, 3, 5]),
    "the largest": (scored(3, 9, 2, 5, 4), {"mode": "max", **BEST}, [2, 5]),
    "of equal ones the first": (scored(1, 1, 1, 1), BEST, [1, 4]),
    "the best only among the last": (scored(3, 2, 1), BEST, [3]),
    "no best of what is not finite or missing": (
        [*scored(NAN, -INF, 7.0), {}, {}],
        {"keep_best": 3, **BEST},
        [3, 5],
    ),
    "every third, for good": (scored(*range(7)), {"keep_every": 3}, [3, 6, 7]),
    "every second and the best": (scored(1, 2, 3, 4, 5), {"keep_every": 2, **BEST}, [1, 2, 4, 5]),
    "the last healthy one": (healthy_until(2, 6), {"keep_last": 2, **BEST}, [2, 5, 6]),
    "no labels alone": ([{"labels": ["paper"]}, {}, {}], {"keep_last": 2}, [2, 3]),
    "the best of this run, not of the one before": (
        [*scored(0.1, run_id="a"), *scored(0.6, 0.7, 0.8, run_id="b")],
        BEST,
        [2, 4],
    ),
}


@pytest.mark.row("D3")
@pytest.mark.parametrize(("saves", "retention", "kept"), KEPT.values(), ids=list(KEPT))
def test_what_remains(tmp_path, saves, retention, kept):
    """Each save is of a new store, as after a restart."""
    for iteration, facts in enumerate(saves, start=1):
        store = CheckpointStore(tmp_path)
        save(store, iteration, **facts)
        store.prune(Retention(**{"keep_last": 1, **retention}))
        assert holds(CheckpointStore(tmp_path), tmp_path / f"iteration_{iteration:08d}", iteration)
    assert iterations(tmp_path) == kept


@pytest.mark.row("D3")
def test_a_run_keeps_the_last_ones_each_fifth_and_the_best(tmp_path):
    scores = [5, 3, 4, 1, 6, 2, 8, 9, 7, 9, 9, 9]
    trainer = trainer_of()

    @trainer.on(Events.ITERATION_COMPLETED)
    def score():
        trainer.state.metrics["score"] = float(scores[trainer.state.iteration - 1])

    checkpoint = Checkpoint(
        tmp_path, keep_last=2, keep_every=5, best="score", mode="min", keep_best=2, labels=["sweep 3"]
    )
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(numbers_loader(), max_iters=12)
    assert iterations(tmp_path) == [4, 5, 6, 10, 11, 12]
    assert checkpoint.best.path.name == "iteration_00000004"
    assert all(manifest_of(path)["labels"] == ["sweep 3"] for path in tmp_path.glob("iteration_*"))


def test_metrics_that_are_not_finite_come_back_as_they_were(tmp_path):
    save(CheckpointStore(tmp_path), 1, metrics={"a": NAN, "b": INF, "c": -INF, "d": 0.1})
    metrics = CheckpointStore(tmp_path).checkpoints()[0].manifest.metrics
    assert math.isnan(metrics.pop("a")) and metrics == {"b": INF, "c": -INF, "d": 0.1}


def test_a_broken_state_does_not_take_the_place_of_a_healthy_one_of_the_same_iteration(tmp_path):
    store = CheckpointStore(tmp_path)
    healthy = save(store, 100)
    broken = save(store, 100, healthy=False)
    assert broken != healthy and store.prune(Retention(keep_last=1)) == []
    assert store.latest().checkpoint.path == broken
    assert [found.path for found in store.checkpoints() if found.manifest.healthy] == [healthy]
    mended = save(store, 100)
    assert mended == healthy and list(tmp_path.iterdir()) == [mended]


def test_the_newest_is_the_last_one_saved_and_not_the_largest_number(tmp_path):
    """Resumed from an older one by choice: what follows is not passed over for what another branch has left."""
    store = CheckpointStore(tmp_path)
    for iteration in (100, 200, 300, 150):
        save(store, iteration)
    assert newest(tmp_path) == 150
    store.prune(Retention(keep_last=1))
    assert iterations(tmp_path) == [150] and holds(store, tmp_path / "iteration_00000150", 150)


def test_names_beyond_eight_digits_are_ordered_and_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    for iteration in (99_999_999, 100_000_000, 100_000_001):
        save(store, iteration)
    assert [each.name for each in store.prune(Retention(keep_last=2))] == ["iteration_99999999"]
    assert newest(tmp_path) == 100_000_001


def read_bytes():
    """How much this process has read until now."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_save_reads_no_more_where_there_are_more_checkpoints(tmp_path):
    store, retention, read = CheckpointStore(tmp_path), Retention(keep_last=1000), []
    for iteration in range(1, 21):
        before = read_bytes()
        save(store, iteration, size=1)
        store.prune(retention)
        read.append(read_bytes() - before)
    assert len(store.checkpoints()) == 20
    assert read[-1] < read[2] + (tmp_path / "iteration_00000001" / "manifest.json").stat().st_size


def handler(**options):
    return lambda: Checkpoint("nowhere", **options)


test_refusals = refusals(
    [
        ("keep_last", handler(keep_last=0), ValueError, "keep_last at least 1 0"),
        ("keep_best", handler(keep_best=-1), ValueError, "keep_best at least 0"),
        ("keep_every", handler(keep_every=0), ValueError, "keep_every at least 1 None"),
        ("mode", handler(mode="lowest"), ValueError, "mode min max lowest"),
        ("labels", handler(labels="mine"), ValueError, "labels list ['mine']"),
        ("exclude", handler(exclude="optimizer"), ValueError, "exclude list"),
        ("exclude a pattern", handler(exclude=["model:"]), ValueError, "exclude pattern 'model:'"),
        ("writers", handler(writers=0), ValueError, "writers at least 1"),
        ("strict and on_exception", handler(strict=True, on_exception=True), ValueError, "choose one"),
        ("no option", handler(keep_lats=3), TypeError, "keep_lats"),
    ]
)
