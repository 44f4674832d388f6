"""``strict``: what could not be resumed bit for bit is refused before the first update, and said to be."""

from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from ignite_engine import Windows
from ignite_engine.checkpointing import CheckpointStore, NotExact
from ignite_engine.config import ConfigError, config_from_dict
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import Numbers, linear, numbers_loader, trainer_of


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter([Numbers(4)[index] for index in range(4)])


class Workers(list[Any]):
    """As a loader with a state and workers."""

    num_workers = 2

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class Nameless:
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...

    def __call__(self): ...


def weighted():
    return DataLoader(Numbers(6), 2, sampler=WeightedRandomSampler([1.0] * 6, 6))


def two_of_a_kind(trainer):
    for _ in range(2):
        trainer.add_event_handler(Events.ITERATION_COMPLETED, Nameless())


CASES = {
    "custom sampler": (weighted, {}, None, "DataLoader with WeightedRandomSampler keeps no state"),
    "iterable data": (lambda: DataLoader(Stream(), 2), {}, None, "DataLoader with Stream keeps no state"),
    "randomness in workers": (lambda: Workers([Numbers(4)[0]]), {}, None, "the random numbers of its 2 workers"),
    "unsaved handler": (numbers_loader, {}, two_of_a_kind, "tests/Nameless is attached but not saved"),
    "part left out": (numbers_loader, {"exclude": ["optimizer"]}, None, "optimizer is not saved"),
    "names left out": (
        numbers_loader,
        {"exclude": ["model:0.*"]},
        None,
        "model is saved without 2 names (0.weight, 0.bias)",
    ),
}


@pytest.mark.row("D19")
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_exact_is_refused_before_the_first_update(case, tmp_path):
    data, options, attach, reason = CASES[case]

    def build(strict):
        trainer = trainer_of(linear())
        Checkpoint(tmp_path / str(strict), strict=strict, **options).attach(trainer)
        if attach is not None:
            attach(trainer)
        return trainer

    trainer = build(strict=True)
    with pytest.raises(NotExact) as refused:
        trainer.run(data(), max_epochs=1)
    message = str(refused.value)
    assert message.startswith("This run cannot be resumed bit for bit, which checkpoint.strict asks for: ")
    assert reason in message and message.endswith("Fix that, or leave strict out.") and "\n" not in message
    assert trainer.state.iteration == 0 and not (tmp_path / "True").exists()

    allowed = build(strict=False)
    allowed.run(data(), max_epochs=1)
    assert allowed.state.iteration > 0
    newest = CheckpointStore(tmp_path / "False").latest().checkpoint
    assert newest is not None and any(reason in each for each in newest.manifest.reproducibility)


def test_windows_without_a_state_are_known_when_the_first_one_opens(tmp_path, caplog):
    """Before, nobody knows what a window's data is; nothing is trained on it where strict refuses."""
    reason = "DataLoader with WeightedRandomSampler keeps no state"

    def run(strict):
        trainer = trainer_of(linear())
        Checkpoint(tmp_path / str(strict), strict=strict).attach(trainer)
        trainer.run(Windows([1, 2, 3], lambda name: weighted()), max_epochs=1)
        return trainer

    with pytest.raises(NotExact, match=f"{reason}.*leave strict out") as refused:
        run(strict=True)
    assert "Raised by handler" in refused.value.__notes__[0]
    assert CheckpointStore(tmp_path / "True").latest().checkpoint is None

    caplog.clear()
    trainer = run(strict=False)
    assert [reason in each.getMessage() for each in caplog.records].count(True) == 1
    assert [each for each in trainer.reproducibility() if reason in each]
    newest = CheckpointStore(tmp_path / "False").latest().checkpoint
    assert newest is not None and any(reason in each for each in newest.manifest.reproducibility)


@pytest.mark.row("D19")
def test_exact_run_is_let_go(tmp_path):
    trainer = trainer_of(linear(dropout=True))
    checkpoint = Checkpoint(tmp_path, strict=True)
    checkpoint.attach(trainer)
    assert trainer.run(numbers_loader(), max_epochs=1).status == "completed"
    again = trainer_of(linear(dropout=True))
    checkpoint = Checkpoint(tmp_path, strict=True)
    checkpoint.attach(again)
    assert checkpoint.resume() is not None
    assert again.run(numbers_loader(), max_epochs=2).iteration == 12


def test_checkpoint_that_says_it_is_not_exact_is_not_resumed(tmp_path):
    trainer = trainer_of(linear())
    Checkpoint(tmp_path, exclude=["optimizer"]).attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)
    again, checkpoint = trainer_of(linear()), Checkpoint(tmp_path, strict=True)
    checkpoint.attach(again)
    before = [each.clone() for each in again.update.model.parameters()]
    with pytest.raises(NotExact, match=r"iteration_00000006 cannot be resumed .*: optimizer is not saved\. Fix"):
        checkpoint.resume()
    assert all(map(torch.equal, before, again.update.model.parameters()))


def test_another_number_of_ranks_is_refused(tmp_path, monkeypatch):
    from ignite_engine.checkpointing.ranks import Ranks

    trainer = trainer_of(linear())
    Checkpoint(tmp_path).attach(trainer)
    monkeypatch.setattr(Ranks, "world_size", 2)
    trainer.run(numbers_loader(), max_epochs=1)
    monkeypatch.undo()
    for strict in (True, False):
        checkpoint = Checkpoint(tmp_path, strict=strict)
        checkpoint.attach(trainer_of(linear()))
        if strict:
            with pytest.raises(NotExact, match="ranks: 2 when it was saved, 1 now"):
                checkpoint.resume()
        else:
            assert checkpoint.resume() is not None


def test_other_environment_is_told_and_refused_where_it_is_strict(tmp_path, monkeypatch, caplog):
    trainer = trainer_of(linear())
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_epochs=1)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 3)
    lenient, strict = Checkpoint(tmp_path), Checkpoint(tmp_path, strict=True)
    for checkpoint in (lenient, strict):
        checkpoint.attach(trainer_of(linear()))
    told = f"threads: {threads} when it was saved, {threads + 3} now"
    with pytest.raises(NotExact, match=rf"iteration_00000006 cannot be resumed bit for bit.*: {told}\."):
        strict.resume()
    assert lenient.resume() is not None
    assert f"iteration_00000006 may go on with other bits: {told}." in caplog.messages


def test_what_a_resume_changed_stays_in_the_report(tmp_path, monkeypatch):
    """Also of a run that is resumed a second time, as it was then: its bits are not those of an uninterrupted one."""
    threads = torch.get_num_threads()
    for epochs, now in ((1, threads), (2, threads + 3), (3, threads + 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda now=now: now)
        trainer, checkpoint = trainer_of(linear()), Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_epochs=epochs)
        reason = (
            f"resumed from iteration_00000006 otherwise than saved (threads: {threads} when it was saved, {now} now)"
        )
        expected = [] if now == threads else [reason]
        assert checkpoint.store.checkpoints()[-1].manifest.reproducibility == trainer.reproducibility() == expected


def test_saves_that_it_would_not_resume_are_refused(tmp_path):
    with pytest.raises(ValueError, match="strict refuses to resume what on_exception saves"):
        Checkpoint(tmp_path, strict=True, on_exception=True)
    with pytest.raises(ConfigError, match=r"checkpoint.on_exception: got true with checkpoint.strict"):
        config_from_dict(
            {"task": "a.py:b", "run": {"max_epochs": 1}, "checkpoint": {"strict": True, "on_exception": True}}
        )
