"""The best checkpoint: known, restored as it was evaluated, and said when the run has ended."""

import copy
import logging
import time

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, Loss
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, load_weights
from ignite_engine.checkpointing import CheckpointStore, StateMismatch
from ignite_engine.handlers import EMA, Checkpoint, Evaluation
from tests.kit.tiny import linear, mse, numbers_loader, one, trainer_of, weights


def run_of(folder, model=None, ema=None, **options):
    """A run that is evaluated in each of its iterations, and gets worse from some iteration on."""
    model = linear() if model is None else model
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.95), mse))
    if ema is not None:
        ema.attach(trainer)
    Evaluation(evaluator_of(model), numbers_loader(6)).attach(trainer, Events.ITERATION_COMPLETED)
    checkpoint = Checkpoint(folder, **{"best": "val/loss", "keep_last": 1, **options})
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=5))
    return trainer, checkpoint


def evaluator_of(model):
    def predict(model, batch):
        return model(batch[0]), batch[1]

    return create_evaluator(model, predict, {"loss": Loss(nn.functional.mse_loss)})


def loss_of(model):
    return float(evaluator_of(model).run(numbers_loader(6)).metrics["loss"])


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("average", [None, "all", "val", "other"])
def test_the_weights_that_were_evaluated_come_back(tmp_path, average, background):
    """Evaluated again, they have the best value, bit for bit; so they have in a model of their own."""
    sets = {"all": None, "val": ["val"], "other": ["other"]}
    ema = EMA(0.9, warmup=False, evaluate=sets[average]) if average else None
    trainer, checkpoint = run_of(tmp_path, ema=ema, background=background)
    assert checkpoint.best is None
    scores = {}
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: scores.update({trainer.state.iteration: trainer.state.metrics["val/loss"]})
    )
    trainer.run(numbers_loader(), max_iters=20)
    at = min(scores, key=lambda iteration: scores[iteration])
    best = checkpoint.best

    assert best is not None and (best.value, best.iteration, best.metric) == (scores[at], at, "val/loss")
    assert best.path == tmp_path / f"iteration_{at:08d}" and 0 < at < 20
    steps, before = trainer.state.optimizer_steps, weights(trainer)
    assert checkpoint.restore_best() == best
    model = trainer.update.model
    assert loss_of(model) == best.value and not torch.equal(weights(trainer), before)
    assert trainer.state.optimizer_steps == steps and trainer.state.iteration == 20

    own = linear()
    assert load_weights(own, tmp_path, "best") == best.path and torch.equal(one(own), weights(trainer))
    load_weights(own, tmp_path / "best", ema=False)
    assert torch.equal(one(own), weights(trainer)) == (average in (None, "other"))


def test_optimizers_keep_what_they_know_where_the_weights_of_the_best_come_back(tmp_path):
    trainer, checkpoint = run_of(tmp_path)
    trainer.run(numbers_loader(), max_iters=20)
    before = weights(trainer)
    kept = copy.deepcopy(trainer.update.optimizers["optimizer"].state_dict())
    checkpoint.restore_best()

    assert not torch.equal(weights(trainer), before)
    assert str(trainer.update.optimizers["optimizer"].state_dict()) == str(kept)
    assert "momentum_buffer" in str(kept)


def test_a_run_goes_on_with_what_was_restored(tmp_path):
    """Within a run too: what is saved next are the restored weights, at the same iteration."""
    trainer, checkpoint = run_of(tmp_path, background=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=20), lambda: checkpoint.restore_best())
    trainer.run(numbers_loader(), max_iters=20)
    model = linear()
    assert load_weights(model, tmp_path, "last").name == "iteration_00000020"
    assert torch.equal(one(model), weights(trainer)) and loss_of(model) == checkpoint.best.value


def save_slowly(monkeypatch):
    save = CheckpointStore.save

    def slowly(self, *args, **options):
        time.sleep(0.3)
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", slowly)


def test_a_save_in_the_background_is_waited_for(tmp_path, monkeypatch):
    """The best one is still being written when it is asked for."""
    save_slowly(monkeypatch)
    trainer, checkpoint = trainer_of(), Checkpoint(tmp_path, best="score", mode="max", background=True)
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(score=-abs(trainer.state.iteration - 4))
    )
    seen = []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: seen.append(checkpoint.restore_best()))
    trainer.run(numbers_loader(), max_iters=6)
    assert [each.iteration for each in seen] == [4]


def test_another_run_in_this_process_has_its_own_best(tmp_path):
    """Also where each of its values is worse than the best of the one before."""
    trainer, checkpoint = trainer_of(), Checkpoint(tmp_path, best="score", mode="max", save_at_end=False)
    checkpoint.attach(trainer, Events.COMPLETED)
    offset = 100.0
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: trainer.state.metrics.update(score=offset - abs(trainer.state.iteration - 2)),
    )
    for offset in (100.0, 50.0):
        trainer.run(numbers_loader(), max_iters=4)
        assert checkpoint.best is not None and (checkpoint.best.value, checkpoint.best.iteration) == (offset, 2)


def test_best_is_that_of_this_run(tmp_path):
    """Known before a run, over a resume, and never one that an earlier run has left in the folder."""
    trainer, checkpoint = run_of(tmp_path)
    trainer.run(numbers_loader(), max_iters=12)
    first = checkpoint.best
    assert first is not None and Checkpoint(tmp_path, best="val/loss").best == first

    resumed, its = run_of(tmp_path)
    its.resume()
    resumed.run(numbers_loader(), max_iters=20)
    assert its.best == first

    worse = linear()
    with torch.no_grad():
        for parameter in worse.parameters():
            parameter.add_(50.0)
    again, other = run_of(tmp_path, worse)
    seen = []
    again.add_event_handler(Events.STARTED, lambda: seen.append(other.best))
    again.run(numbers_loader(), max_iters=1)
    assert seen == [None] and other.best is not None and other.best.value > 10 * first.value
    assert sorted(each.name for each in tmp_path.glob("iter*")) == ["iteration_00000001"]
    seen.clear()
    again.run(numbers_loader(), max_iters=1)  # fresh again, in this process
    assert seen == [None] and other.best is not None


def test_a_value_measured_before_the_first_update_has_its_checkpoint(tmp_path):
    """A model that training makes worse: its best weights are those it came with."""
    trainer, model = trainer_of(), linear()
    trainer.update.model.load_state_dict(model.state_dict())
    values = iter([1.0, 2.0, 3.0])
    trainer.add_event_handler(
        Events.STARTED | Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.update(score=next(values))
    )
    checkpoint = Checkpoint(tmp_path, best="score")
    checkpoint.attach(trainer)
    trainer.run(numbers_loader(), max_epochs=2)

    assert checkpoint.best is not None and (checkpoint.best.value, checkpoint.best.iteration) == (1.0, 0)
    checkpoint.restore_best()
    assert torch.equal(weights(trainer), one(model))


def test_a_value_that_a_stop_has_postponed_has_its_checkpoint(tmp_path):
    """A stop within an evaluation saves without its value; the evaluation is done again by the run that resumes."""

    def run(folder, stop_at):
        trainer = trainer_of()
        evaluation = Evaluation(evaluator_of(trainer.update.model), numbers_loader(6))
        evaluation.attach(trainer, Events.ITERATION_COMPLETED(every=4))

        def worse():
            if "val/loss" in trainer.state.metrics:
                trainer.state.metrics["val/loss"] = float(trainer.state.iteration)

        trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, worse)
        if stop_at is not None:
            within = evaluation.evaluator.add_event_handler

            def stop():
                if trainer.state.iteration == stop_at:
                    trainer.request_stop("test")

            within(Events.ITERATION_COMPLETED, stop)
        checkpoint = Checkpoint(folder, best="val/loss", keep_last=1)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=15)
        return trainer, checkpoint

    whole, of_whole = run(tmp_path / "whole", None)
    stopped, _ = run(tmp_path / "stopped", 4)
    assert (stopped.state.status, stopped.state.iteration) == ("interrupted", 4)
    resumed, of_resumed = run(tmp_path / "stopped", None)
    assert resumed.state.status == "completed" and torch.equal(weights(resumed), weights(whole))
    for checkpoint in (of_whole, of_resumed):
        assert checkpoint.best is not None and (checkpoint.best.value, checkpoint.best.iteration) == (4.0, 4)


@pytest.mark.parametrize(
    "event", [Events.EPOCH_COMPLETED(once=1), Events.ITERATION_COMPLETED(once=6), Events.ITERATION_COMPLETED(once=4)]
)
def test_an_evaluation_that_a_stop_interrupted_counts_for_what_was_saved_then(tmp_path, event):
    """It is made again before the resumed run trains, and has the best value of the run."""

    def run(folder, stop=False):
        trainer = trainer_of()

        def score(model, batch):
            if stop:
                trainer.request_stop("enough")
            return float(trainer.state.iteration)

        evaluator = create_evaluator(trainer.update.model, score, {"score": Average()})
        Evaluation(evaluator, [1, 2]).attach(trainer, event | Events.ITERATION_COMPLETED(every=8))
        checkpoint = Checkpoint(folder, best="val/score", keep_last=1)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=16)
        return checkpoint

    whole = run(tmp_path / "whole")
    run(tmp_path / "stopped", stop=True)
    resumed = run(tmp_path / "stopped")
    assert whole.best is not None and resumed.best is not None
    assert whole.best.iteration < 8 and whole.best.value == resumed.best.value
    kept = [sorted(each.name for each in (tmp_path / name).glob("iter*")) for name in ("whole", "stopped")]
    assert kept[0] == kept[1] == [whole.best.path.name, "iteration_00000016"]


def test_a_score_after_the_last_save_is_that_of_what_was_saved(tmp_path):
    trainer = trainer_of()
    trainer.add_event_handler(Events.COMPLETED, lambda: trainer.state.metrics.update(score=0.5))
    checkpoint = Checkpoint(tmp_path, best="score", mode="max")
    checkpoint.attach(trainer)
    trainer.run(numbers_loader(), max_iters=4)
    assert checkpoint.best is not None and (checkpoint.best.value, checkpoint.best.iteration) == (0.5, 4)


def test_saved_once_more_after_a_resume_it_is_still_the_best(tmp_path):
    for _ in range(2):  # trained; started again
        trainer, checkpoint = trainer_of(), Checkpoint(tmp_path, best="score", mode="max")
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda trainer: trainer.state.metrics.update(score=float(trainer.state.iteration)),
        )
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=3)
    assert checkpoint.save() == tmp_path / "iteration_00000003"
    assert checkpoint.best is not None and checkpoint.best.value == 3.0 and checkpoint.restore_best() == checkpoint.best


def test_a_value_that_comes_while_its_checkpoint_is_written_is_that_ones(tmp_path, monkeypatch):
    """Not that of the checkpoint before: ``terminate()`` outside an iteration publishes at a saved boundary."""
    save_slowly(monkeypatch)
    trainer, checkpoint = trainer_of(), Checkpoint(tmp_path, best="score", mode="max", background=True)
    checkpoint.attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: trainer.state.metrics.update(score=1.0))

    def end():
        trainer.state.metrics.update(score=9.0)
        trainer.terminate()

    trainer.add_event_handler(Events.EPOCH_STARTED(once=3), end)
    trainer.run(numbers_loader(), max_epochs=4)
    assert [each.manifest.metrics for each in checkpoint.store.checkpoints()] == [{"score": 1.0}, {"score": 9.0}]


def test_a_damaged_best_one_is_skipped_and_another_model_refused(tmp_path, caplog):
    trainer, checkpoint = run_of(tmp_path, keep_best=2)
    trainer.run(numbers_loader(), max_iters=12)
    best = checkpoint.best
    assert best is not None
    (best.path / "shared.pt").write_bytes(b"damaged")
    second = checkpoint.restore_best()
    assert second.path != best.path and second.value > best.value and "is skipped: shared.pt" in caplog.text
    other, its = trainer_of(linear(features=3, dtype=torch.float32)), Checkpoint(tmp_path, best="val/loss")
    other.update.model.add_module("more", nn.Linear(1, 1))
    its.attach(other)
    with pytest.raises(StateMismatch, match=r"2 missing: model:more\.weight, model:more\.bias"):
        its.restore_best()


def test_the_last_line_names_the_best(tmp_path, caplog):
    trainer, checkpoint = run_of(tmp_path)
    trainer.run(numbers_loader(), max_iters=12)
    best = checkpoint.best
    assert best is not None
    line = f"Best val/loss {best.value:.5g} at iteration {best.iteration}, {best.path}."
    assert caplog.records[-1].getMessage() == line and caplog.records[-1].levelno == logging.WARNING
