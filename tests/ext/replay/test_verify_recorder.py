"""A run writes down its state at each step boundary; that changes no bit of it."""

import torch
from ignite.engine import Events

from ignite_engine.ext.replay.verify_recorder import (
    OUTPUT,
    StateRecorder,
    proof_of,
    read_records,
    watch,
)
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import linear, numbers_loader, trainer_of, weights


def recorded(path, until, folder=None):
    torch.manual_seed(1)
    trainer = trainer_of(linear(dropout=True))
    checkpoint = None if folder is None else Checkpoint(folder)
    if checkpoint is not None:
        checkpoint.attach(trainer)
    watch(trainer, path, until=until, kill_at=None, ready=lambda: True)
    if checkpoint is not None:
        checkpoint.resume()
    trainer.run(numbers_loader(), max_epochs=2)
    return trainer, read_records(path)


def test_every_boundary_until_the_last_is_one_record(tmp_path):
    trainer, records = recorded(tmp_path / "a.jsonl", 8)
    assert [each.boundary for each in records] == [*((n, 0) for n in range(1, 6)), (6, 1), (7, 1), (8, 1)]
    assert (trainer.state.iteration, trainer.state.status) == (8, "interrupted")
    assert {"model", "optimizer", "trainer", "data", "rng", OUTPUT} <= set(records[0].components)
    assert records[0].components["model"] != records[1].components["model"]


def test_the_same_run_has_the_same_records_and_another_has_others(tmp_path):
    _, first = recorded(tmp_path / "a.jsonl", 20)
    _, again = recorded(tmp_path / "b.jsonl", 20)
    assert [each.components["model"] for each in first] == [each.components["model"] for each in again]
    assert first == again


def test_a_recorder_changes_no_bit(tmp_path):
    trainer, _ = recorded(tmp_path / "a.jsonl", 20)
    torch.manual_seed(1)
    without = trainer_of(linear(dropout=True))
    without.run(numbers_loader(), max_epochs=2)
    assert torch.equal(weights(trainer), weights(without))


def test_a_resumed_run_begins_with_a_record_of_what_was_loaded(tmp_path):
    _, before = recorded(tmp_path / "a.jsonl", 4, tmp_path / "checkpoints")
    _, after = recorded(tmp_path / "b.jsonl", 20, tmp_path / "checkpoints")
    first = after[0]
    assert first.resumed and first.iteration == 4 and not any(each.resumed for each in [*before, *after[1:]])
    assert "rng" not in first.components and "data" not in first.components and OUTPUT not in first.components
    _, whole = recorded(tmp_path / "c.jsonl", 20)
    loaded = next(each for each in whole if each.iteration == 4)
    assert first.components["model"] == loaded.components["model"]
    assert after[1:] and after[-1].components["model"] == whole[-1].components["model"]


def test_the_kill_waits_until_there_is_something_to_resume(tmp_path, monkeypatch):
    killed, asked = list[int](), iter([False, False, True])
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(trainer.state.iteration))
    trainer = trainer_of()
    watch(trainer, tmp_path / "a.jsonl", until=20, kill_at=3, ready=lambda: next(asked))
    trainer.run(numbers_loader(), max_epochs=1)
    assert killed == [3] and next(asked, None) is None
    assert (tmp_path / proof_of("a")).read_text() == "3"


def test_an_incomplete_last_line_is_left_out(tmp_path):
    _, records = recorded(tmp_path / "a.jsonl", 2)
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text[:-20])
    assert read_records(tmp_path / "a.jsonl") == records[:-1]
    assert read_records(tmp_path / "nothing.jsonl") == []


def test_the_last_iteration_stops_the_run(tmp_path):
    trainer = trainer_of()
    StateRecorder(tmp_path / "a.jsonl", 2).attach(trainer)
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.iteration))
    trainer.run(numbers_loader(), max_epochs=1)
    assert seen == [1, 2] and trainer.state.reason == "the last iteration to compare"
