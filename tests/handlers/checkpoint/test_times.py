"""What saving and loading took: in the log, and for the summary."""

import logging
import time

import pytest
from ignite.engine import Events

from ignite_engine.handlers import Checkpoint
from ignite_engine.handlers.checkpoint.times import Times, Transfer
from tests.kit.tiny import numbers_loader, trainer_of


def size(path):
    return sum(each.stat().st_size for each in path.iterdir() if each.suffix == ".pt")


@pytest.mark.parametrize("background", [False, True])
def test_each_save_and_the_resume_say_bytes_and_seconds(tmp_path, caplog, background):
    caplog.set_level(logging.INFO)

    def run(max_iters):
        caplog.clear()
        trainer = trainer_of()
        checkpoint = Checkpoint(tmp_path, background=background)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=max_iters)
        return checkpoint, [line for line in caplog.messages if line.startswith(("Saved", "Resumed"))]

    checkpoint, lines = run(4)
    times, paths = checkpoint.times, [tmp_path / f"iteration_0000000{iteration}" for iteration in (2, 4)]
    assert times.loaded is None and times.saved is not None
    assert (times.saves, times.saved.bytes) == (2, size(paths[1]))
    assert [line.partition(": ")[0] for line in lines] == [f"Saved {path}" for path in paths]
    # the last one is waited for
    assert [line.endswith(", beside training.") for line in lines] == [background, False]
    assert lines[1].endswith(f": {times.saved}.")
    assert times.waited_s > 0 and times.saved.seconds == checkpoint._trainer.state.save_seconds

    resumed, lines = run(4)
    assert resumed.times.saved is None and resumed.times.loaded is not None
    assert resumed.times.loaded.bytes == size(paths[1])
    assert lines == [f"Resumed from {paths[1]} at iteration 4: {resumed.times.loaded}."]


def test_a_transfer_in_words_and_numbers():
    assert str(Transfer(3 << 20, 0.5)) == "3.0 MiB in 0.5 s, 6.0 MiB/s"
    assert Times(1, Transfer(8, 0.5), None, 2.0).as_dict() == {
        "saves": 1,
        "waited_s": 2.0,
        "save_s": 0.5,
        "save_bytes": 8,
        "save_bytes_per_s": 16,
    }


def test_a_wait_within_a_wait_counts_once(monkeypatch):
    clock = iter((0.0, 1.0, 5.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = Times()
    with times.waiting(), times.waiting():
        pass
    assert times.waited_s == 5.0
