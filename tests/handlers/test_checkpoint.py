"""Saved where it was asked for, resumed to the same bits, and never in the way of training."""

import copy
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import nn

from ignite_engine import Trainer, TrainingEvents, create_evaluator
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, NotExact, StateMismatch
from ignite_engine.checkpointing.lock import lock
from ignite_engine.handlers import Checkpoint, Evaluation, LRSchedule, MetricLogger, warmup_cosine
from tests.kit.tiny import Passes, linear, numbers_loader, trainer_of, weights


def iterations(directory):
    return [each.iteration for each in CheckpointStore(directory).checkpoints()]


def scored(trainer, scores, name="val/loss"):
    def score():
        if trainer.state.iteration in scores:
            trainer.state.metrics[name] = scores[trainer.state.iteration]

    trainer.add_event_handler(Events.ITERATION_COMPLETED, score)


# -- which are kept ---------------------------------------------------------------------------------------------------


@pytest.mark.row("D14")
def test_the_last_ones_are_kept(tmp_path):
    trainer, saved = trainer_of(), list[int]()
    Checkpoint(tmp_path, keep_last=3).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, lambda: saved.append(trainer.state.iteration))
    state = trainer.run(numbers_loader(), max_iters=9)

    assert saved == [2, 4, 6, 8, 9]  # and at the end
    assert iterations(tmp_path) == [6, 8, 9] and state.checkpoints == 5


def test_nothing_is_saved_twice_at_the_end(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer)

    assert trainer.run(numbers_loader(), max_epochs=2).checkpoints == 2
    assert iterations(tmp_path) == [6, 12]


@pytest.mark.parametrize(("mode", "kept"), [("min", [4, 9]), ("max", [2, 9])])
def test_the_best_one_is_saved_and_kept(mode, kept, tmp_path):
    trainer = trainer_of()
    scored(trainer, {1: 3.0, 2: 5.0, 3: float("nan"), 4: 1.0, 5: 2.0, 6: 2.0})
    Checkpoint(tmp_path, keep_last=1, best="val/loss", mode=mode).attach(trainer, Events.ITERATION_COMPLETED(every=8))
    trainer.run(numbers_loader(), max_iters=9)

    assert iterations(tmp_path) == kept


def test_some_of_the_best_are_kept(tmp_path):
    trainer = trainer_of()
    scored(trainer, {iteration: -float(iteration) for iteration in range(1, 7)})
    Checkpoint(tmp_path, keep_last=1, best="val/loss", keep_best=3).attach(trainer)
    trainer.run(numbers_loader(), max_iters=10)

    assert iterations(tmp_path) == [4, 5, 6, 10]


@pytest.mark.parametrize("background", [False, True])
def test_several_writers_resume_to_the_same_bits(tmp_path, background):
    def run(folder, max_iters):
        torch.manual_seed(0)
        width = 1 << 17
        trainer = trainer_of(torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1)), lr=1e-6)
        checkpoint = Checkpoint(tmp_path / folder, writers=3, background=background)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=max_iters)
        return weights(trainer), checkpoint.store

    whole, _ = run("whole", 6)
    _, store = run("stopped", 4)
    assert {"shared.pt", "shared_1.pt"} < set(store.checkpoints()[-1].manifest.files)
    assert torch.equal(run("stopped", 6)[0], whole)


def test_best_is_remembered_over_a_resume(tmp_path):
    def run(scores, max_iters):
        trainer = trainer_of()
        scored(trainer, scores)
        checkpoint = Checkpoint(tmp_path, keep_last=1, best="val/loss")
        checkpoint.attach(trainer)
        checkpoint.resume()
        return trainer.run(numbers_loader(), max_iters=max_iters).checkpoints

    assert run({2: 1.0}, 4) == 2
    assert run({7: 1.5}, 8) == 4  # at 6 an epoch ends, 7 is no new best
    assert iterations(tmp_path) == [2, 8]


def test_best_by_another_metric_is_judged_anew(tmp_path, caplog):
    def run(metric, mode, scores, max_iters):
        trainer = trainer_of()
        scored(trainer, scores, metric)
        checkpoint = Checkpoint(tmp_path, keep_last=1, best=metric, mode=mode)
        checkpoint.attach(trainer)
        checkpoint.resume()
        return trainer.run(numbers_loader(), max_iters=max_iters).checkpoints

    assert run("val/loss", "min", {2: 9.0}, 4) == 2
    assert run("val/accuracy", "max", {5: 0.5}, 5) == 3
    told = [line for line in caplog.messages if line.startswith("checkpoint kept the best by ")]
    assert told == [
        "checkpoint kept the best by val/loss (min) before, now by val/accuracy (max): the next value is the first."
    ]


def test_each_nth_stays_for_good(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_last=1, keep_every=4).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(numbers_loader(), max_iters=10)

    assert iterations(tmp_path) == [4, 8, 10]


@pytest.mark.parametrize("background", [False, True])
def test_last_healthy_one_stays_beside_the_newest(tmp_path, background):
    def loss_fn(model, batch):
        loss = model(batch[0]).pow(2).mean()
        return loss * float("nan") if trainer.state.iteration > 3 else loss

    trainer = trainer_of()
    trainer.update.loss_fn = loss_fn
    Checkpoint(tmp_path, keep_last=1, background=background).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(numbers_loader(), max_iters=6)

    assert not weights(trainer).isfinite().any()
    healthy = {each.iteration: each.manifest.healthy for each in CheckpointStore(tmp_path).checkpoints()}
    assert healthy == {3: True, 6: False}


def test_a_model_of_any_name_must_be_finite(tmp_path):
    model = nn.Linear(2, 2)

    def update(engine, batch):
        with torch.no_grad():
            model.weight.fill_(math.nan if engine.state.iteration > 1 else 1.0)
        return 0.0

    trainer = Trainer(update)
    trainer.register("net", model, shared=True)
    Checkpoint(tmp_path).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([1, 2], max_epochs=1)
    assert [each.manifest.healthy for each in CheckpointStore(tmp_path).checkpoints()] == [True, False]


def test_metrics_of_the_iteration_are_in_the_manifest(tmp_path):
    trainer = trainer_of()
    scored(trainer, {2: 0.5})
    Checkpoint(tmp_path, config={"seed": 3}).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(numbers_loader(), max_iters=4)
    first, second = (each.manifest for each in CheckpointStore(tmp_path).checkpoints())

    assert (first.metrics, second.metrics) == ({"val/loss": 0.5}, {})
    assert (first.epoch, first.reproducibility, first.config, first.healthy) == (1, [], {"seed": 3}, True)


def test_best_at_the_end_of_a_pass_without_a_length(tmp_path):
    """That it was the pass's last iteration shows only when no batch follows: its edge comes twice."""
    trainer = Trainer(lambda engine, batch: 1.0)
    means = iter([2.0, 1.0, 3.0])
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.__setitem__("val/loss", next(means))
    )
    Checkpoint(tmp_path, keep_last=1, best="val/loss").attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(Passes(3, 5, 2), max_epochs=3)

    assert iterations(tmp_path) == [8, 10]
    manifests = {each.iteration: each.manifest for each in CheckpointStore(tmp_path).checkpoints()}
    assert manifests[8].metrics == {"val/loss": 1.0}


def test_finished_run_over_data_without_a_length_is_saved_as_finished(tmp_path):
    def run():
        trainer, heard = Trainer(lambda engine, batch: 1.0), list[str]()
        for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
            trainer.add_event_handler(event, lambda *, name=event.name: heard.append(name))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        checkpoint.resume()
        trainer.run(Passes(3), max_epochs=1)
        return heard

    assert run() == ["ITERATION_COMPLETED"] * 3 + ["EPOCH_COMPLETED"]
    assert run() == []


# -- when it goes wrong -----------------------------------------------------------------------------------------------


class Unsavable:
    """Its state cannot be in a checkpoint at one iteration."""

    def __init__(self, trainer, iteration):
        self.trainer, self.iteration = trainer, iteration

    def state_dict(self):
        return {"value": object() if self.trainer.state.iteration == self.iteration else 1}

    def load_state_dict(self, state): ...


def test_failed_save_is_told_and_training_goes_on(tmp_path, caplog):
    trainer, heard = trainer_of(), list[Any]()
    trainer.register("unsavable", Unsavable(trainer, 2))
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    for event in (TrainingEvents.CHECKPOINT_FAILED, TrainingEvents.CHECKPOINT_SAVED):
        trainer.add_event_handler(
            event, lambda *, name=event.name: heard.append((name, trainer.state.iteration, checkpoint.error))
        )
    with caplog.at_level(logging.WARNING):
        state = trainer.run(numbers_loader(), max_iters=5)

    assert [each[:2] for each in heard] == [("CHECKPOINT_FAILED", 2), ("CHECKPOINT_SAVED", 4), ("CHECKPOINT_SAVED", 5)]
    assert "builtins.object" in str(heard[0][2]) and heard[1][2] is None
    assert (state.iteration, state.checkpoints, state.status) == (5, 2, "completed")
    assert iterations(tmp_path) == [4, 5]
    assert CheckpointStore(tmp_path).load(tmp_path / "iteration_00000004").local["trainer"]["checkpoints"] == 1
    assert "builtins.object" in caplog.text


def test_folder_that_cannot_be_made_ends_the_run_before_it_trains():
    trainer = trainer_of()
    Checkpoint("/proc/nowhere/checkpoints").attach(trainer)

    with pytest.raises(CheckpointError, match=r"^The folder of checkpoints /proc/.* cannot be made: .*another one\."):
        trainer.run(numbers_loader(), max_epochs=1)
    assert trainer.state.iteration == 0


def test_failed_save_at_the_end_raises(tmp_path):
    trainer = trainer_of()
    trainer.register("unsavable", Unsavable(trainer, 6))
    Checkpoint(tmp_path).attach(trainer)

    with pytest.raises(CheckpointError, match=r"builtins\.object"):
        trainer.run(numbers_loader(), max_epochs=1)
    assert trainer.state.status == "failed" and iterations(tmp_path) == []


def test_old_checkpoint_that_cannot_be_deleted_does_not_stop_training(tmp_path, monkeypatch, caplog):
    from ignite_engine.checkpointing import layout as directory

    tried = []

    def refuse(paths):
        tried.append(paths)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(directory, "discard", refuse)
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_last=1).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    with caplog.at_level(logging.WARNING):
        state = trainer.run(numbers_loader(), max_iters=6)

    assert (state.status, state.checkpoints, len(tried)) == ("completed", 3, 2)
    assert iterations(tmp_path) == [2, 4, 6] and "Read-only file system" in caplog.text


def test_resumed_run_prunes_what_the_killed_one_left_to_prune(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_last=3).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(numbers_loader(), max_iters=6)
    assert iterations(tmp_path) == [2, 4, 6]  # as if killed after the commit of the last one
    for resumed in (False, True):
        again, checkpoint = trainer_of(), Checkpoint(tmp_path, keep_last=1)
        checkpoint.attach(again)
        at_start = []
        again.add_event_handler(Events.STARTED, lambda _, seen=at_start: seen.append(iterations(tmp_path)))
        if resumed:
            checkpoint.resume()
        else:
            again.add_event_handler(Events.EPOCH_STARTED, lambda: 1 / 0)  # nothing is saved
        with nullcontext() if resumed else pytest.raises(ZeroDivisionError):
            again.run(numbers_loader(), max_iters=6)
        assert at_start == [[6] if resumed else [2, 4, 6]]


@pytest.mark.parametrize("resumed", [False, True])
def test_start_of_a_run_sweeps_what_a_killed_one_was_writing(tmp_path, resumed):
    if resumed:
        trainer = trainer_of()
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(numbers_loader(), max_iters=4)
    left = [tmp_path / f".{kind}-iteration_00000005-0123abcd" for kind in ("tmp", "trash")]
    for path in left:
        path.mkdir()
        (path / "shared.pt").write_bytes(b"half of it")
    alive = tmp_path / ".tmp-iteration_00000006-0123abcd"
    alive.mkdir()
    trainer, seen = trainer_of(), list[Path]()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5 if resumed else 1), lambda: seen.extend(hidden(tmp_path)))
    with lock(alive):
        assert (checkpoint.resume() is not None) == resumed and hidden(tmp_path) == sorted([*left, alive])
        trainer.run(numbers_loader(), max_iters=5)

    assert seen == [alive]


def hidden(directory):
    return sorted(each for each in directory.iterdir() if each.name.startswith((".tmp", ".trash")))


def test_damaged_newest_one_is_passed_over(tmp_path, caplog):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(numbers_loader(), max_iters=4)
    file = next((tmp_path / "iteration_00000004").glob("shared*"))
    file.write_bytes(file.read_bytes()[:-1])
    again, checkpoint = trainer_of(), Checkpoint(tmp_path)
    checkpoint.attach(again)
    path = checkpoint.resume()

    assert path is not None and path.name == "iteration_00000002" and again.state.iteration == 2
    assert "is skipped" in caplog.text


def test_resume_does_not_start_over_beside_checkpoints_that_are_all_damaged(tmp_path):
    trainer, checkpoint = trainer_of(), Checkpoint(tmp_path)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.run(numbers_loader())
    for file in tmp_path.glob("*/shared.pt"):
        file.write_bytes(file.read_bytes()[:-1])
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer_of())
    with pytest.raises(CheckpointError, match=r"^None of the \d checkpoints in .* is valid \(iteration_\d+: shared"):
        checkpoint.resume()


def test_resume_needs_a_trainer_and_may_find_nothing(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(RuntimeError, match=r"call attach\(trainer, event\) before"):
        checkpoint.resume()
    trainer = trainer_of()
    checkpoint.attach(trainer)

    assert checkpoint.resume() is None
    assert trainer.run(numbers_loader()).iteration == 6


def test_left_out_parts_keep_what_they_are(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_iters=3)
    tuned, checkpoint = trainer_of(), Checkpoint(tmp_path)
    checkpoint.attach(tuned)
    checkpoint.resume(ignore=["trainer", "data", "rng", "optimizer", "checkpoint"])

    assert torch.equal(weights(tuned), weights(trainer)) and tuned.state.iteration == 0
    assert tuned.run(numbers_loader(), max_iters=2).iteration == 2


def test_part_that_went_is_left_out_at_each_start_again(tmp_path, caplog):
    """The second time the newest checkpoint does not hold it any more."""

    def run(max_iters, *, counted, ignore):
        trainer, checkpoint = trainer_of(), Checkpoint(tmp_path)
        if counted:
            trainer.register("counter", torch.optim.SGD([torch.zeros(1)]))
        checkpoint.attach(trainer)
        checkpoint.resume(ignore=ignore)
        return trainer.run(numbers_loader(), max_iters=max_iters).iteration

    assert run(2, counted=True, ignore=[]) == 2
    with pytest.raises(StateMismatch, match=r"resume\(ignore=\['counter'\]\), .*checkpoint.ignore in a config"):
        run(4, counted=False, ignore=[])
    assert [run(end, counted=False, ignore=["counter"]) for end in (4, 6)] == [4, 6]
    told = [line for line in caplog.messages if "to leave out" in line]
    assert len(told) == 1 and "iteration_00000004 holds no counter to leave out; it holds checkpoint, data" in told[0]


# -- bit for bit ------------------------------------------------------------------------------------------------------


def full(directory):
    """Dropout, a schedule, evaluation, interval means, accumulation: all that can go wrong."""
    trainer = trainer_of(linear(dropout=True), 2, clip_norm=1.0)
    optimizer = trainer.update.optimizers["optimizer"]
    LRSchedule(warmup_cosine(optimizer, warmup=3, total=20)).attach(trainer)
    model = trainer.update.model
    evaluator = create_evaluator(model, lambda model, batch: model(batch[0]).mean(), {"mean": Average()})
    Evaluation(evaluator, numbers_loader(4)).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    MetricLogger(directory, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    losses = {}

    def note(engine):
        losses[engine.state.iteration] = engine.state.output["loss"].item()

    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    checkpoint = Checkpoint(directory / "checkpoints", keep_last=20)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
    return trainer, checkpoint, losses


def data():
    return numbers_loader(14, 2, shuffle=True, seed=2)  # 7 batches, 4 updates an epoch


def finish(trainer):
    trainer.run(data(), max_epochs=3)
    optimizer = trainer.update.optimizers["optimizer"]
    return weights(trainer), copy.deepcopy(optimizer.state_dict())


def die_at(trainer, iteration):
    def die():
        raise KeyError("killed")

    # after the save: it was attached later
    trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=iteration), die)


def cut_run(directory, *cuts, seed=lambda: torch.manual_seed(5)):
    """Runs, dies after each of ``cuts``, resumes in a process that has drawn other numbers, and finishes."""
    seen = {}
    for number, cut in enumerate((*cuts, None)):
        trainer, checkpoint, losses = full(directory)
        seed() if number == 0 else torch.manual_seed(1000 + number)
        if cut is not None:
            die_at(trainer, cut)
        found = checkpoint.resume()
        assert (found is None) == (number == 0)
        if cut is not None:
            with pytest.raises(KeyError, match="killed"):
                finish(trainer)
            seen |= losses
            continue
        return *finish(trainer), seen | losses, (directory / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts", [(1,), (2,), (4,), (6,), (8,), (11,), (3, 7), (4, 8), (1, 2)], ids=lambda cuts: "-".join(map(str, cuts))
)
def test_killed_run_ends_with_the_bits_of_the_whole_one(cuts, tmp_path):
    final, optimizer, losses, lines = cut_run(tmp_path / "whole")
    final_again, optimizer_again, losses_again, lines_again = cut_run(tmp_path / "cut", *cuts)

    assert torch.equal(final_again, final)
    torch.testing.assert_close(optimizer_again, optimizer, rtol=0, atol=0)
    assert losses_again == losses and sorted(losses) == list(range(1, 13))
    assert lines_again == lines


@pytest.mark.row("D15")
def test_dropout_makes_the_seed_count(tmp_path):
    """Else the test above would pass without restoring the generators."""
    first = cut_run(tmp_path / "a")
    second = cut_run(tmp_path / "b", seed=lambda: torch.manual_seed(6))

    assert not torch.equal(first[0], second[0])


def test_stopped_run_ends_with_the_bits_of_the_whole_one(tmp_path):
    final, *_ = cut_run(tmp_path / "whole")
    trainer, _, _ = full(tmp_path / "cut")
    torch.manual_seed(5)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: trainer.request_stop("enough"))
    state = trainer.run(data(), max_epochs=3)
    assert (state.status, state.iteration) == ("interrupted", 6)
    resumed, checkpoint, _ = full(tmp_path / "cut")
    torch.manual_seed(77)
    path = checkpoint.resume()

    assert path is not None and path.name == "iteration_00000006"
    assert torch.equal(finish(resumed)[0], final)


@pytest.mark.row("D1")
def test_saved_on_a_stop_wherever_the_event_stands(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer, Events.ITERATION_COMPLETED(every=1000))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.request_stop("enough"))
    trainer.run(numbers_loader(), max_epochs=2)

    assert iterations(tmp_path) == [4]


def test_saved_on_request_and_training_goes_on(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer, Events.ITERATION_COMPLETED(every=1000))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), trainer.request_save)
    trainer.run(numbers_loader(), max_iters=9)

    assert iterations(tmp_path) == [4, 9]


def test_attach_order_of_the_schedule_does_not_matter(tmp_path):
    saved = []
    for first in (True, False):
        trainer = trainer_of()
        optimizer = trainer.update.optimizers["optimizer"]
        schedule = LRSchedule(warmup_cosine(optimizer, warmup=4, total=10))
        checkpoint = Checkpoint(tmp_path / str(first))
        if first:
            schedule.attach(trainer)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        if not first:
            schedule.attach(trainer)
        trainer.run(numbers_loader(), max_iters=2)
        loaded = checkpoint.store.load(tmp_path / str(first) / "iteration_00000002")
        saved.append(loaded.shared["optimizer"]["param_groups"][0]["lr"])

    assert saved[0] == saved[1] == pytest.approx(0.1 * 3 / 4)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("event", [TrainingEvents.RESUME_POINT, TrainingEvents.CHECKPOINT_SAVED])
def test_random_numbers_drawn_beside_a_save_change_no_bit_of_a_resumed_run(tmp_path, event, background):
    def run(folder, seed, limit):
        trainer = trainer_of(linear(dropout=True))
        checkpoint = Checkpoint(folder, background=background)
        if event is TrainingEvents.CHECKPOINT_SAVED:
            checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        trainer.add_event_handler(event, lambda: torch.rand(1))  # as who samples from the model there
        if event is TrainingEvents.RESUME_POINT:  # what is drawn there after the save is not in the checkpoint
            checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        torch.manual_seed(seed)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=limit)
        return trainer

    whole = run(tmp_path / "whole", 1, 9)
    run(tmp_path / "cut", 1, 4)
    resumed = run(tmp_path / "cut", 2, 9)

    assert torch.equal(weights(resumed), weights(whole))


def test_two_handlers_of_one_trainer_never_save_into_one_directory(tmp_path):
    """Each would delete what the other keeps."""
    trainer = trainer_of()
    Checkpoint(tmp_path / "one", keep_last=9).attach(trainer)
    with pytest.raises(ValueError, match=r"'checkpoint' and 'best' both save in .*one, where each would delete"):
        Checkpoint(tmp_path / "one", name="best").attach(trainer)
    Checkpoint(tmp_path / "two", name="best").attach(trainer)


def test_another_accumulation_is_in_the_report_of_the_resumed_run_and_refused_by_strict(tmp_path):
    def resumed(steps, **options):
        trainer = trainer_of(accumulation_steps=steps)
        checkpoint = Checkpoint(tmp_path, **options)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_epochs=2)
        return trainer

    first = trainer_of(accumulation_steps=2)
    Checkpoint(tmp_path).attach(first)
    first.run(numbers_loader(), max_iters=1)
    with pytest.raises(NotExact, match="saved with accumulation_steps=2, resumed with accumulation_steps=3"):
        resumed(3, strict=True)
    assert resumed(2, strict=True).reproducibility() == []
    assert "resumed with accumulation_steps=3" in resumed(3).reproducibility()[0]
