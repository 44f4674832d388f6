"""What ``describe()`` says of a run is what the run then does."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Average
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, every
from ignite_engine.data import Windows, loader
from ignite_engine.describe import conflicts_of
from ignite_engine.describe import text as described
from ignite_engine.describe.attached import attached_to
from ignite_engine.describe.contents import optimizer_bytes_later
from ignite_engine.describe.timetable import times_of
from ignite_engine.engine.length import Length
from ignite_engine.evaluator import create_evaluator
from ignite_engine.handlers import EMA, Checkpoint, EarlyStopping, Evaluation, LRSchedule, MetricLogger
from ignite_engine.schedules import constant, warmup_constant, warmup_cosine, warmup_inverse_sqrt, warmup_wsd
from ignite_engine.text import in_units
from tests.builders import linear, mse, numbers_loader, trainer_of


def evaluation_of(trainer: Trainer, name: str = "val") -> Evaluation:
    model = trainer.update.model  # type: ignore[attr-defined]  # an Update
    evaluator = create_evaluator(model, lambda model, batch: mse(model, batch), {"loss": Average()})
    return Evaluation(evaluator, numbers_loader(4), name=name)


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    return next(iter(trainer.update.optimizers.values()))  # type: ignore[attr-defined]  # an Update


def conflicts(trainer: Trainer, *arguments: Any, **more: Any) -> list[str]:
    text = trainer.describe(*arguments, **more)
    if text.endswith("No conflicts."):
        return []
    return [line.strip() for line in text.partition("\nConflicts:\n")[2].splitlines()]


# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        Events.ITERATION_COMPLETED(every=4),
        Events.ITERATION_COMPLETED(once=7),
        Events.ITERATION_COMPLETED(once=[2, 5, 99]),
        Events.ITERATION_COMPLETED(after=3, before=9),
        Events.ITERATION_COMPLETED(every=3, after=2),
        Events.ITERATION_COMPLETED(every=3, before=7),
        Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED,
        Events.EPOCH_COMPLETED(every=2),
        Events.ITERATION_COMPLETED(every=1000),
    ],
)
def test_times_that_are_told_are_those_at_which_it_acts(event: Any) -> None:
    trainer, seen = trainer_of(), []
    trainer.add_event_handler(event, lambda: seen.append(trainer.state.iteration))
    length = Length.of(3, None, 6)
    (entry,) = attached_to(trainer)
    told = times_of(entry, length).iterations(length)
    trainer.run(numbers_loader(), max_epochs=3)

    assert told is not None and list(told) == seen


def test_timetable_says_rhythm_number_and_first_and_last(tmp_path: Path) -> None:
    trainer = trainer_of()
    evaluation_of(trainer).attach(trainer, Events.EPOCH_COMPLETED)
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=5))
    Checkpoint(tmp_path, best="val/loss").attach(trainer, Events.ITERATION_COMPLETED(once=[6]))

    @trainer.on(Events.ITERATION_COMPLETED(event_filter=lambda engine, count: count == 3))
    def of_my_own() -> None: ...

    lines = re.sub(" +", " ", trainer.describe(numbers_loader(), max_epochs=10)).splitlines()

    assert lines[0] == "What happens when (in 60 iterations, 10 epochs of 6)"
    assert " Evaluation val every epoch, 10 times (at 6, 12, 18, ..., 60)" in lines
    assert " MetricLogger every 5 iterations, 12 times (at 5, 10, 15, ..., 60)" in lines
    assert " Checkpoint at 6; at the end; at a new best val/loss; on a stop" in lines
    assert any("of_my_own when its filter says so (lambda)" in line for line in lines)
    assert trainer.state.iteration == 0 and [*tmp_path.iterdir()] == []


def test_without_a_length_only_the_rhythm_is_told() -> None:
    trainer = trainer_of()
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=5))
    text = re.sub(" +", " ", trainer.describe())

    assert "MetricLogger every 5 iterations\n" in text and "whose length is not known before" in text


def test_a_filter_with_a_text_of_its_own_is_named_by_it() -> None:
    class EverySecond:
        def __call__(self, engine: Engine, count: int) -> bool:
            return False

        def __str__(self) -> str:
            return "every 30 s"

    trainer = trainer_of()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=EverySecond()), print)

    assert "when its filter says so (every 30 s)" in trainer.describe()


def test_handlers_with_any_filter_on_any_event_are_in_the_timetable() -> None:
    trainer = trainer_of()

    @trainer.on(TrainingEvents.OPTIMIZER_STEP_COMPLETED(event_filter=lambda engine, count: count == 3))
    def by_filter() -> None: ...

    @trainer.on(TrainingEvents.EVALUATION_COMPLETED(every=2))
    def by_number() -> None: ...

    @trainer.on(TrainingEvents.CHECKPOINT_SAVED)
    def always() -> None: ...

    timetable, _, _ = re.sub(" +", " ", trainer.describe(numbers_loader(), max_epochs=2)).partition("Parameters")
    assert "by_filter when its filter says so (lambda)\n" in timetable
    assert "by_number every 2 EVALUATION_COMPLETED\n" in timetable
    assert "always" not in timetable, "it has no rhythm of its own"


def test_rates_are_told_of_each_schedule() -> None:
    trainer = trainer_of(lr=0.5)
    LRSchedule(warmup_cosine(optimizer_of(trainer), 4, total=60)).attach(trainer)
    text = trainer.describe(numbers_loader(), max_epochs=10)

    assert "Schedule lr_schedule: warmup_cosine(warmup=4, total=60, min_ratio=0.0)" in text
    assert re.search(r"\n +1  1.2500e-01\n", text)


def test_bus_is_told_in_the_order_of_an_iteration() -> None:
    trainer = trainer_of()
    order = [Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_STARTED, TrainingEvents.OPTIMIZER_STEP_COMPLETED]
    order += [Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, TrainingEvents.RESUME_POINT, Events.COMPLETED]
    for event in reversed(order):
        trainer.add_event_handler(event, print)
    lines = trainer.describe().splitlines()

    assert [line.strip() for line in lines if line.strip() in {each.name for each in order}] == [e.name for e in order]


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), True),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), True),
        (lambda p: torch.optim.AdamW(p, 0.1, fused=True), True),
        (lambda p: torch.optim.Adam(p, 0.1, amsgrad=True), True),
        (lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9), True),
        (lambda p: torch.optim.Adagrad(p, 0.1), True),
        (lambda p: torch.optim.Adafactor(p, 0.1), False),
    ],
)
def test_state_that_the_first_step_makes_is_known_before(make: Callable[[Any], Any], exact: bool) -> None:
    model = linear()
    frozen = next(model.parameters()).requires_grad_(False)
    optimizer = make([{"params": [frozen]}, {"params": [each for each in model.parameters() if each is not frozen]}])

    def bytes_now() -> int:
        return sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))

    before, told = bytes_now(), optimizer_bytes_later(optimizer)
    mse(model, (torch.ones(2, 3), torch.ones(2, 1))).backward()
    optimizer.step()

    assert told == (bytes_now() - before if exact else None)
    assert optimizer_bytes_later(optimizer) == 0 or bytes_now() == 0


def test_size_of_a_checkpoint_is_that_on_disk(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 1))
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters()), mse))
    EMA().attach(trainer)
    Checkpoint(tmp_path, keep_last=3).attach(trainer)
    text = trainer.describe(numbers_loader(), max_epochs=5)
    told = int(re.search(r"a checkpoint has ([\d,]+) bytes", text)[1].replace(",", ""))  # type: ignore[index]
    trainer.run(numbers_loader(), max_epochs=1)
    (saved,) = tmp_path.glob("iteration_*")
    there = sum(file.stat().st_size for file in saved.glob("*.pt"))

    assert told == pytest.approx(there, rel=0.1) and told < there
    assert "trainer: counters, per rank\n" in text
    assert "model: Sequential, one copy, 40,004 bytes\n" in text
    assert "optimizer: AdamW, one copy, 80,024 bytes after the first step\n" in text
    assert f"at most {in_units(4 * told)} for 4 (3 last, 1 in flight); " in text and " are free" in text
    assert "10,001 parameters: 10,001 trained, 0 frozen" in text
    assert "weights 39.1 KiB, gradients 39.1 KiB, optimizer state 78.1 KiB, averages 39.1 KiB: 195.3 KiB" in text


def test_disk_that_is_too_small_is_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_last=3).attach(trainer)
    assert conflicts(trainer) == []
    monkeypatch.setattr(described, "free_bytes", lambda directory: 40_000)
    (said,) = conflicts(trainer)

    assert (
        said.startswith(f"The checkpoints in {tmp_path} need ") and "for 4 (3 last, 1 in flight), and 39.1 KiB" in said
    )


def test_what_is_left_out_of_a_checkpoint_needs_no_disk(tmp_path: Path) -> None:
    trainer = trainer_of()
    Checkpoint(tmp_path, exclude=["optimizer", "model"]).attach(trainer)
    other = trainer_of()
    Checkpoint(tmp_path).attach(other)
    sizes = [int(re.search(r"has ([\d,]+) bytes", each.describe())[1].replace(",", "")) for each in (trainer, other)]  # type: ignore[index]

    assert sizes[1] - sizes[0] == 2 * 21 * 4


# -- conflicts -------------------------------------------------------------------------------------------------------


def test_an_ordinary_run_has_no_conflicts(tmp_path: Path) -> None:
    trainer = trainer_of()
    evaluation_of(trainer).attach(trainer)
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=5))
    EarlyStopping("val/loss", patience=3).attach(trainer)
    Checkpoint(tmp_path, best="val/loss", keep_every=12).attach(trainer)
    LRSchedule(warmup_cosine(optimizer_of(trainer), 4, total=60)).attach(trainer)

    assert conflicts(trainer, numbers_loader(), max_epochs=10) == []
    assert trainer.describe(numbers_loader(), max_epochs=10).endswith("\nNo conflicts.")


def test_interval_longer_than_the_run() -> None:
    trainer = trainer_of()
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=61))

    (said,) = conflicts(trainer, numbers_loader(), max_epochs=10)
    assert said == "MetricLogger (every=61) never acts: the run ends after 60 iterations; give a shorter interval."
    assert conflicts(trainer, numbers_loader(), max_epochs=11) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda o: warmup_cosine(o, 4, total=40, min_ratio=0.5),
            "ends at update 40 (the LR is 0.05 from there on), ",
        ),
        (lambda o: warmup_cosine(o, 4, total=90), "reaches its end only at update 90, the run at update 60: total=60"),
        (lambda o: warmup_wsd(o, 4, total=1000, decay=10), "reaches its end only at update 1,000"),
        (lambda o: warmup_cosine(o, 4, total=60), None),
        (lambda o: warmup_wsd(o, 4, total=60), None),
        (constant, None),
        (lambda o: warmup_constant(o, 10), None),
        (lambda o: warmup_constant(o, 100), None),
        (lambda o: warmup_inverse_sqrt(o, 4), None),
        (
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=50),
            "ends at update 50, the run at update 60: T_max=60",
        ),
        (lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=9), "total_iters=60 makes them"),
        (lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=9), None),
        (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=60), None),
    ],
)
def test_schedule_of_another_length_than_the_run(make: Callable[[Any], Any], said: str | None) -> None:
    trainer = trainer_of()
    LRSchedule(make(optimizer_of(trainer))).attach(trainer)
    found = conflicts(trainer, numbers_loader(), max_epochs=10)

    assert len(found) == (said is not None) and (said is None or said in found[0])


def test_schedule_that_takes_its_length_from_the_run_is_told_and_never_contradicts_it() -> None:
    for event, at_the_end in ((TrainingEvents.OPTIMIZER_STEP_COMPLETED, 60), (Events.EPOCH_COMPLETED, 10)):
        trainer = trainer_of(lr=0.5)
        schedule = warmup_cosine(optimizer_of(trainer), min_ratio=0.5)
        LRSchedule(schedule).attach(trainer, event)
        text = trainer.describe(numbers_loader(), max_epochs=10)

        assert text.endswith("No conflicts.") and not schedule.is_known
        unit = "epoch" if at_the_end == 10 else "update"
        assert f"Learning rate by {unit}:" in text and re.search(rf"\n +{at_the_end}  2\.5\d+e-01\n", text)


def test_two_schedules_of_one_optimizer() -> None:
    trainer = trainer_of()
    optimizer = optimizer_of(trainer)
    LRSchedule(constant(optimizer)).attach(trainer)
    LRSchedule(warmup_constant(optimizer, 2), name="second").attach(trainer)

    (said,) = conflicts(trainer, numbers_loader(), max_epochs=10)
    assert said.startswith("lr_schedule and second set the rates of one optimizer")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("val/los", "follows val/los, which the evaluation val does not write; did you mean 'loss'?"),
        ("vall/loss", "no evaluation is called 'vall'; did you mean 'val'?"),
        ("val/loss", None),
        ("loss", None),
        ("memory/host_peak_mib", None),
    ],
)
def test_metric_that_nobody_writes(key: str, said: str | None, tmp_path: Path) -> None:
    trainer = trainer_of()
    evaluation_of(trainer).attach(trainer)
    EarlyStopping(key, patience=3).attach(trainer)
    Checkpoint(tmp_path, best=key).attach(trainer)
    found = conflicts(trainer, numbers_loader(), max_epochs=10)

    assert len(found) == (2 if said else 0) and all(str(said) in each for each in found)


def test_evaluation_that_never_runs(tmp_path: Path) -> None:
    trainer = trainer_of()
    evaluation_of(trainer).attach(trainer, Events.EPOCH_COMPLETED(every=20))
    Checkpoint(tmp_path, best="val/loss").attach(trainer)
    found = conflicts(trainer, numbers_loader(), max_epochs=10)

    assert len(found) == 2 and found[0].startswith("Evaluation val (every=20) never acts: the run ends after 10 epochs")
    assert found[1] == (
        "Checkpoint(best='val/loss') follows val/loss, and the evaluation val never runs: attach it to an event."
    )


def test_best_that_is_deleted_before_early_stopping_ends_the_run(tmp_path: Path) -> None:
    def found(patience: int, **options: Any) -> list[str]:
        trainer = trainer_of()
        evaluation_of(trainer).attach(trainer)
        EarlyStopping("val/loss", patience=patience).attach(trainer)
        Checkpoint(tmp_path, **options).attach(trainer)
        return conflicts(trainer, numbers_loader(), max_epochs=10)

    (said,) = found(3, keep_last=2)
    assert "ends the run 18 iterations after the best val/loss" in said and "give Checkpoint best='val/loss'" in said
    assert found(3, keep_last=4) == found(3, best="val/loss") == []


@pytest.mark.parametrize("evaluated", [every(epochs=0.5), Events.EPOCH_COMPLETED])
def test_best_that_is_deleted_as_checkpoints_come_more_often_than_values(tmp_path: Path, evaluated: Any) -> None:
    """Also where the interval of the values is not one of iterations, of which nothing is said."""
    trainer = trainer_of()
    evaluation_of(trainer).attach(trainer, evaluated)
    EarlyStopping("val/loss", patience=1).attach(trainer)
    Checkpoint(tmp_path, keep_last=2).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    found = conflicts(trainer, numbers_loader(), max_epochs=10)

    assert len(found) == (1 if evaluated == Events.EPOCH_COMPLETED else 0)
    assert all("ends the run 6 iterations after" in each and "every 2 iterations" in each for each in found)


def test_keep_every_that_keeps_nothing(tmp_path: Path) -> None:
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_every=7).attach(trainer, Events.ITERATION_COMPLETED(every=9))

    (said,) = conflicts(trainer, numbers_loader(), max_epochs=10)
    assert said.startswith("keep_every=7 keeps nothing")
    assert conflicts(trainer, numbers_loader(), max_epochs=11) == []


def test_a_trainer_built_by_hand_says_conflicts_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of()
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=100))
    with caplog.at_level(logging.WARNING):
        trainer.run(numbers_loader(), max_epochs=2)

    assert "never acts" not in caplog.text
    assert len(conflicts(trainer)) == 1


def test_looking_for_conflicts_costs_the_same_at_any_length(tmp_path: Path) -> None:
    trainer = trainer_of()
    evaluation_of(trainer).attach(trainer, every(epochs=0.25))
    EarlyStopping("val/loss", patience=3).attach(trainer)
    LRSchedule(warmup_cosine(optimizer_of(trainer), 4, total=10**6)).attach(trainer)
    Checkpoint(tmp_path, keep_every=7).attach(trainer, Events.EPOCH_COMPLETED)

    def calls(epochs: int) -> int:
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            conflicts_of(trainer, Length.of(epochs, None, 70))
        finally:
            sys.setprofile(None)
        return count

    assert calls(10**8) <= calls(100) * 1.1


def test_windows_are_described_without_being_opened() -> None:
    opened: list[Any] = []
    windows = Windows(["a", "b"], opened.append)
    trainer = trainer_of()
    MetricLogger(console=False).attach(trainer, TrainingEvents.WINDOW_COMPLETED)

    assert "MetricLogger" in trainer.describe(windows) and opened == []


@pytest.mark.parametrize("kind", ["windows", "loader", "dealt out"])
def test_describing_a_run_that_is_under_way_changes_nothing(kind: str) -> None:
    def iterations(described: bool) -> list[str]:
        seen: list[str] = []
        trainer = Trainer(
            lambda engine, batch: seen.append(str(batch)), global_micro_batches=2 if kind == "dealt out" else None
        )
        data: Any = loader(list(range(12)), 2, shuffle=True, seed=3)
        if kind == "windows":
            data = Windows(iter([[1], [2], [3]]), loader)
        if described:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.describe(data, max_epochs=9))
        trainer.run(data, max_epochs=1 if kind == "windows" else 3)
        return seen

    assert iterations(described=True) == iterations(described=False)


def test_update_of_the_users_own_is_described() -> None:
    trainer = Trainer(lambda engine, batch: 0.0)

    assert "No conflicts." in trainer.describe([1, 2], max_epochs=2)
