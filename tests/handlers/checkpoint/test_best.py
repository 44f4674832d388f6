"""The best checkpoint: known, restored as it was evaluated, and said when the run has ended."""

import copy
import os
import time

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, Loss
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, load_weights
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import EMA, Checkpoint, Evaluation
from tests.kit import saved
from tests.kit.refusals import refuses
from tests.kit.tiny import linear, mse, numbers_loader, one, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


def evaluator_of(model):
    return create_evaluator(
        model, lambda model, batch: (model(batch[0]), batch[1]), {"loss": Loss(nn.functional.mse_loss)}
    )


def loss_of(model):
    return float(evaluator_of(model).run(numbers_loader(6)).metrics["loss"])


def run_of(folder, model=None, ema=None, **options):
    """A run that is evaluated in each of its iterations, and gets worse from some iteration on."""
    model = linear() if model is None else model
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.95), mse))
    if ema is not None:
        ema.attach(trainer)
    Evaluation(evaluator_of(model), numbers_loader(6)).attach(trainer, EACH)
    checkpoint = Checkpoint(folder, **{"best": "val/loss", "keep_last": 1, **options})
    checkpoint.attach(trainer, EACH(every=5))
    return trainer, checkpoint


def scored_run(folder, score, event=EACH, **options):
    """A run with a score of its own at each iteration, that saves at the end and where the score is the best."""
    trainer, checkpoint = trainer_of(), Checkpoint(folder, best="score", mode="max", **options)
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.add_event_handler(event, lambda: trainer.state.metrics.update(score=score(trainer.state.iteration)))
    return trainer, checkpoint


def known(checkpoint):
    return None if checkpoint.best is None else (checkpoint.best.value, checkpoint.best.iteration)


@pytest.fixture
def slow_commits(monkeypatch):
    rename = os.rename

    def late(*paths, **options):
        time.sleep(0.05)
        rename(*paths, **options)

    monkeypatch.setattr(os, "rename", late)


@pytest.mark.row("C7")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("average", [None, "all", "val", "other"])
def test_the_weights_that_were_evaluated_come_back(tmp_path, average, background):
    """Evaluated again, they have the best value, bit for bit; so they have in a model of their own."""
    sets = {"all": None, "val": ["val"], "other": ["other"]}
    ema = EMA(0.9, warmup=False, evaluate=sets[average]) if average else None
    trainer, checkpoint = run_of(tmp_path, ema=ema, background=background)
    assert checkpoint.best is None
    scores = {}
    trainer.add_event_handler(EACH, lambda: scores.update({trainer.state.iteration: trainer.state.metrics["val/loss"]}))
    trainer.run(numbers_loader(), max_iters=20)
    at, best = min(scores, key=lambda iteration: scores[iteration]), checkpoint.best

    assert (best.value, best.iteration, best.metric) == (scores[at], at, "val/loss") and 0 < at < 20
    assert best.path == saved.checkpoint(tmp_path, at)
    steps, before = trainer.state.optimizer_steps, weights(trainer)
    optimizer = copy.deepcopy(trainer.update.optimizers["optimizer"].state_dict())
    assert checkpoint.restore_best() == best
    assert loss_of(trainer.update.model) == best.value and not torch.equal(weights(trainer), before)
    assert (trainer.state.optimizer_steps, trainer.state.iteration) == (steps, 20)
    assert str(trainer.update.optimizers["optimizer"].state_dict()) == str(optimizer)

    own = linear()
    assert load_weights(own, tmp_path, "best") == best.path and torch.equal(one(own), weights(trainer))
    load_weights(own, tmp_path / "best", ema=False)
    assert torch.equal(one(own), weights(trainer)) == (average in (None, "other"))


def test_a_run_goes_on_with_what_was_restored(tmp_path):
    """Within a run too: what is saved next are the restored weights, at the same iteration."""
    trainer, checkpoint = run_of(tmp_path, background=True)
    trainer.add_event_handler(EACH(once=20), lambda: checkpoint.restore_best())
    trainer.run(numbers_loader(), max_iters=20)
    model = linear()
    assert load_weights(model, tmp_path, "last") == saved.checkpoint(tmp_path, 20)
    assert torch.equal(one(model), weights(trainer)) and loss_of(model) == checkpoint.best.value


@pytest.mark.usefixtures("slow_commits")
def test_a_save_in_the_background_is_waited_for(tmp_path):
    """The best one is still being written when it is asked for."""
    trainer, checkpoint = scored_run(tmp_path, lambda iteration: -abs(iteration - 4), background=True)
    seen = []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: seen.append(checkpoint.restore_best()))
    trainer.run(numbers_loader(), max_iters=6)
    assert [each.iteration for each in seen] == [4]


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_the_best_is_that_of_this_run(tmp_path):
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
    for _ in range(2):  # fresh again, in this process
        again.run(numbers_loader(), max_iters=1)
        assert seen == [None] and other.best.value > first.value
        assert saved.iterations(tmp_path) == [1]
        seen.clear()


# -- values that come at other places than a save ---------------------------------------------------------------------


def test_a_value_before_the_first_update_and_one_after_the_last_save_have_their_checkpoints(tmp_path):
    for name, event, last, expected in (
        ("before", Events.STARTED | Events.EPOCH_COMPLETED, 12, (0.0, 0)),
        ("after", Events.COMPLETED, 4, (-4.0, 4)),
    ):
        trainer, checkpoint = scored_run(tmp_path / name, lambda iteration: -float(iteration), event)
        trainer.run(numbers_loader(), max_iters=last)
        assert known(checkpoint) == expected
        checkpoint.restore_best()
        assert torch.equal(weights(trainer), one(linear())) == (name == "before")


def test_saved_once_more_after_a_resume_it_is_still_the_best(tmp_path):
    for _ in range(2):  # trained; started again
        trainer, checkpoint = scored_run(tmp_path, float)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=3)
    assert checkpoint.save() == saved.checkpoint(tmp_path, 3)
    assert known(checkpoint) == (3.0, 3) and checkpoint.restore_best() == checkpoint.best


@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED(once=1), EACH(once=6), EACH(once=4)])
def test_an_evaluation_that_a_stop_interrupted_counts_for_what_was_saved_then(tmp_path, event):
    """It is made again before the resumed run trains, and has the best value of the run."""

    def run(folder, stop=False):
        trainer = trainer_of()

        def score(model, batch):
            if stop:
                trainer.request_stop("enough")
            return float(trainer.state.iteration)

        evaluator = create_evaluator(trainer.update.model, score, {"score": Average()})
        Evaluation(evaluator, [1, 2]).attach(trainer, event | EACH(every=8))
        checkpoint = Checkpoint(folder, best="val/score", keep_last=1)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=16)
        return trainer, checkpoint

    whole, of_whole = run(tmp_path / "whole")
    assert run(tmp_path / "stopped", stop=True)[0].state.status == "interrupted"
    resumed, of_resumed = run(tmp_path / "stopped")
    assert known(of_whole) == known(of_resumed) and of_whole.best.iteration < 8
    assert torch.equal(weights(resumed), weights(whole))
    kept = [saved.iterations(tmp_path / name) for name in ("whole", "stopped")]
    assert kept[0] == kept[1] == [of_whole.best.iteration, 16]


# -- when it is damaged, another, or told -----------------------------------------------------------------------------


def test_a_damaged_best_one_is_skipped_and_another_model_refused(tmp_path, caplog):
    trainer, checkpoint = run_of(tmp_path, keep_best=2)
    trainer.run(numbers_loader(), max_iters=12)
    best = checkpoint.best
    saved.damage(tmp_path, best.iteration)
    second = checkpoint.restore_best()
    assert second.path != best.path and second.value > best.value and "is skipped" in caplog.text
    other, its = trainer_of(), Checkpoint(tmp_path, best="val/loss")
    other.update.model.add_module("more", nn.Linear(1, 1))
    its.attach(other)
    refuses(its.restore_best, StateMismatch, "2 missing model:more.weight model:more.bias")


def test_the_last_line_names_the_best(tmp_path, caplog):
    trainer, checkpoint = run_of(tmp_path)
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, caplog.clear)
    trainer.run(numbers_loader(), max_iters=12)
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    best = checkpoint.best
    for word in ("val/loss", f"{best.value:.5g}", str(best.iteration), str(best.path)):
        assert word in record.getMessage()
