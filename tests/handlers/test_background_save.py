"""Saved beside the training: the same bytes as if training had waited, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.checkpointing import BackgroundSave, CheckpointError, CheckpointStore, Snapshot
from ignite_engine.handlers import Checkpoint, GracefulStop
from tests.builders import numbers_loader, trainer_of, weights

EVERY = Events.ITERATION_COMPLETED(every=1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0][:, :1]).pow(2).mean()
    return loss


def training(directory: Path, *, iterations: int, background: bool, **options: Any) -> tuple[Trainer, Checkpoint]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = Trainer(Update(model, optimizer, loss_fn))
    checkpoint = Checkpoint(directory, keep_last=100, background=background, **options)
    checkpoint.attach(trainer, EVERY)
    torch.manual_seed(1)
    checkpoint.resume()
    trainer.run(numbers_loader(), max_iters=iterations)
    return trainer, checkpoint


def contents(directory: Path) -> dict[int, Any]:
    store = CheckpointStore(directory)
    loaded = {each.iteration: store.load(each.path) for each in store.checkpoints()}
    return {iteration: (each.shared, each.local) for iteration, each in loaded.items()}


def assert_same(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}/{index}")
    else:
        assert one == other or one != one, path


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_late = Snapshot.copy_late

    def slowly(self: Snapshot) -> None:
        time.sleep(0.02)
        copy_late(self)

    monkeypatch.setattr(Snapshot, "copy_late", slowly)


@pytest.mark.usefixtures("slow_copy")
def test_every_checkpoint_is_that_of_a_run_that_waited(tmp_path: Path) -> None:
    training(tmp_path / "waited", iterations=8, background=False)
    training(tmp_path / "beside", iterations=8, background=True)

    waited, beside = contents(tmp_path / "waited"), contents(tmp_path / "beside")
    assert list(beside) == list(waited) == list(range(1, 9))
    assert_same(beside, waited)


def test_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = training(tmp_path / "whole", iterations=9, background=True)
    training(tmp_path / "parts", iterations=4, background=True)
    resumed, _ = training(tmp_path / "parts", iterations=9, background=True)

    assert_same(resumed.update.model.state_dict(), whole.update.model.state_dict())
    assert resumed.state.checkpoints == whole.state.checkpoints == 9


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    save = CheckpointStore.save

    def held(self: CheckpointStore, *args: Any, **options: Any) -> Path:
        if options["iteration"] == 2:
            assert go_on.wait(30)
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", held)
    trainer, saved = trainer_of(), list[tuple[int, int | None]]()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), go_on.set)
    trainer.add_event_handler(
        TrainingEvents.CHECKPOINT_SAVED, lambda: saved.append((trainer.state.iteration, trainer.state.saved_iteration))
    )
    trainer.run(numbers_loader(), max_iters=60)

    assert [iteration for _, iteration in saved] == [2, 60]
    assert saved[0][0] >= 5 and trainer.state.save_seconds > 0


def test_what_a_save_took_is_told_once_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, not only what training waited for."""
    save = CheckpointStore.save

    def slowly(self: CheckpointStore, *args: Any, **options: Any) -> Path:
        if options["iteration"] == 2:
            time.sleep(0.2)
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", slowly)
    trainer, took = trainer_of(), dict[int | None, float]()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.add_event_handler(
        TrainingEvents.CHECKPOINT_SAVED,
        lambda: took.__setitem__(trainer.state.saved_iteration, trainer.state.save_seconds),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: time.sleep(0.01))
    trainer.run(numbers_loader(), max_iters=60)

    assert list(took) == [2, 60] and took[2] >= 0.2 and took[60] > 0


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_next_save_waits_or_is_skipped(when_busy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = CheckpointStore.save

    def slowly(self: CheckpointStore, *args: Any, **options: Any) -> Path:
        time.sleep(0.2)
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", slowly)
    trainer, _ = training(tmp_path, iterations=4, background=True, when_busy=when_busy)

    assert list(contents(tmp_path)) == ([1, 2, 3, 4] if when_busy == "wait" else [1, 4])
    assert trainer.state.checkpoints == (4 if when_busy == "wait" else 2)


def test_error_comes_over_the_bus_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = CheckpointStore.save

    def full(self: CheckpointStore, *args: Any, **options: Any) -> Path:
        if options["iteration"] == 2:
            raise CheckpointError("No space left on device.")
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", full)
    trainer, failed = trainer_of(), list[str]()
    checkpoint = Checkpoint(tmp_path, background=True)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(str(checkpoint.error)))
    trainer.run(numbers_loader(), max_iters=6)

    assert failed == ["No space left on device."]
    assert trainer.state.checkpoints == 1 and list(contents(tmp_path)) == [6]


@pytest.mark.usefixtures("slow_copy")
def test_weights_changed_under_the_copy_are_never_committed(tmp_path: Path) -> None:
    trainer, failed = trainer_of(), list[str]()
    checkpoint = Checkpoint(tmp_path, background=True)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(once=2))

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def halve() -> None:
        with torch.no_grad():
            for parameter in trainer.update.model.parameters():
                parameter.mul_(0.5)

    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(str(checkpoint.error)))
    trainer.run(numbers_loader(), max_iters=6)

    assert len(failed) == 1 and "changed while they were copied" in failed[0]
    assert list(contents(tmp_path)) == [6]


@pytest.mark.usefixtures("slow_copy")
def test_parameter_that_the_forward_pass_changes_is_saved_as_it_was_at_the_edge(tmp_path: Path) -> None:
    """It is not trained, so it does not rest until the next step."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.passes = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, inputs: Tensor) -> Tensor:
            self.passes.add_(1)
            return super().forward(inputs)

    model, failed = Counting(), list[int]()
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters()), loss_fn))
    Checkpoint(tmp_path, keep_last=9, background=True).attach(trainer, EVERY)
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(trainer.state.iteration))
    trainer.run(numbers_loader(), max_iters=5)

    saved = {iteration: shared["model"]["passes"].item() for iteration, (shared, _) in contents(tmp_path).items()}
    assert (saved, failed) == ({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}, [])


@pytest.mark.usefixtures("slow_copy")
def test_an_update_of_ones_own_waits_for_the_copy(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)

    def update(engine: Engine, batch: Any) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(engine.state.iteration)
        return 0.0

    trainer = Trainer(update)
    trainer.register("model", model, shared=True)
    Checkpoint(tmp_path, keep_last=9, background=True).attach(trainer, EVERY)
    trainer.run(numbers_loader(), max_iters=5)

    saved = {iteration: shared["model"]["bias"].item() for iteration, (shared, _) in contents(tmp_path).items()}
    assert saved == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}


def test_an_exception_leaves_what_was_being_written_whole(tmp_path: Path) -> None:
    trainer = trainer_of()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=3))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(), max_iters=6)

    assert list(contents(tmp_path)) == [3]
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_exception_saves_what_was_done_before_it(tmp_path: Path) -> None:
    whole = trainer_of()
    whole.run(numbers_loader(), max_iters=6)

    def failing(model: nn.Module, batch: Any) -> Tensor:
        if trainer.state.iteration == 4 and not mended:
            raise RuntimeError("broken sample")
        loss: Tensor = trainer_of_loss(model, batch)
        return loss

    mended: list[bool] = []
    for _ in range(2):
        trainer = trainer_of()
        trainer_of_loss, trainer.update.loss_fn = trainer.update.loss_fn, failing
        checkpoint = Checkpoint(tmp_path, on_exception=True)
        checkpoint.attach(trainer)
        checkpoint.resume()
        if mended:
            trainer.run(numbers_loader(), max_iters=6)
        else:
            with pytest.raises(RuntimeError, match="broken sample"):
                trainer.run(numbers_loader(), max_iters=6)
            (found,) = CheckpointStore(tmp_path).checkpoints()
            assert found.iteration == 3 and any("exception" in reason for reason in found.manifest.reproducibility)
            mended.append(True)

    assert torch.equal(weights(trainer), weights(whole))


def test_exception_between_two_optimizers_saves_nothing(tmp_path: Path) -> None:
    trainer = trainer_of()
    optimizer = trainer.update.optimizers["optimizer"]
    optimizer.register_step_post_hook(lambda *_: 1 / 0 if trainer.state.iteration == 3 else None)
    Checkpoint(tmp_path, on_exception=True).attach(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(), max_iters=6)

    assert list(contents(tmp_path)) == []


def test_stop_waits_for_both_saves(tmp_path: Path) -> None:
    trainer = trainer_of()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=3))
    GracefulStop(exit=False).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.request_stop("enough"))
    trainer.run(numbers_loader(), max_iters=60)

    assert list(contents(tmp_path)) == [3, 4] and trainer.state.status == "interrupted"


def test_buffers_are_used_again() -> None:
    snapshot, weight = Snapshot(), torch.ones(3)
    state = {"a": weight, "same": weight, "rest": [1, "x", (None, torch.zeros(2))]}
    first = snapshot.take(state, lambda tensor: True)
    snapshot.copy_late()
    assert torch.equal(first["a"], weight) and first["same"] is first["a"] and first["a"] is not weight
    weight.add_(1)
    assert not snapshot.check_untouched()
    second = snapshot.take(state, lambda tensor: True)
    snapshot.copy_late()
    assert second["a"].data_ptr() == first["a"].data_ptr() and second["a"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("background", [False, True])
def test_state_that_no_checkpoint_can_hold_does_not_stop_training(tmp_path: Path, background: bool) -> None:
    class Foreign:
        def state_dict(self) -> Any:
            return {"points": defaultdict(list)}

        def load_state_dict(self, state: Any) -> None: ...

    trainer, failed = trainer_of(), list[int]()
    trainer.register("foreign", Foreign())
    checkpoint = Checkpoint(tmp_path, background=background)
    checkpoint.attach(trainer, EVERY)
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda: failed.append(trainer.state.iteration))
    with pytest.raises(CheckpointError, match=r"foreign\['points'\] is a collections.defaultdict"):
        trainer.run(numbers_loader(8), max_epochs=1)

    assert trainer.state.iteration == 4 and len(failed) >= 2


def test_background_save_alone_tells_result_and_error() -> None:
    done: list[str] = []
    snapshot = Snapshot()
    snapshot.take({}, lambda tensor: True)
    assert BackgroundSave(snapshot, lambda: 5, lambda: done.append("yes")).result() == 5 and done == ["yes"]
    with pytest.raises(ZeroDivisionError):
        BackgroundSave(snapshot, lambda: 1 // 0).result()


def test_wrong_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="when_busy must be 'wait' or 'skip', got 'never'"):
        Checkpoint(tmp_path, when_busy="never")  # type: ignore[arg-type]  # that is the test
