"""Which checkpoints are kept, and the best of them: known, restored as it was evaluated, and said at the end."""

import copy
import math
import os
import time

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Loss
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, load_weights
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import EMA, Checkpoint, Evaluation
from tests.kit import saved
from tests.kit.refusals import refuses
from tests.kit.tiny import Passes, linear, mse, numbers_loader, one, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


def scored(trainer, scores, name="val/loss"):
    """Publish these values at these iterations."""

    def score():
        if trainer.state.iteration in scores:
            trainer.state.metrics[name] = scores[trainer.state.iteration]

    trainer.add_event_handler(EACH, score)


SCORES = {1: 3.0, 2: 5.0, 3: math.nan, 4: 1.0, 5: 2.0, 6: 2.0}
BEST = {"keep_last": 1, "best": "val/loss"}


@pytest.mark.row("D1", "D3", "D14")
@pytest.mark.parametrize(
    ("options", "event", "last", "kept"),
    [
        pytest.param({"keep_last": 3}, EACH(every=2), 9, [6, 8, 9], id="the last ones"),
        pytest.param({}, Events.EPOCH_COMPLETED, 12, [6, 12], id="nothing twice at the end"),
        pytest.param({"save_at_end": False}, EACH(every=4), 6, [4], id="not at the end"),
        pytest.param({**BEST, "mode": "max"}, EACH(every=8), 9, [2, 9], id="the largest"),
        pytest.param({**BEST, "keep_best": 2}, EACH(every=8), 9, [1, 4, 9], id="some of the best"),
        pytest.param({"keep_last": 1, "keep_every": 4}, EACH(every=2), 10, [4, 8, 10], id="each fourth for good"),
    ],
)
def test_those_that_were_asked_for_are_kept(options, event, last, kept, tmp_path):
    trainer, announced = trainer_of(), []
    scored(trainer, SCORES)
    Checkpoint(tmp_path, **options).attach(trainer, event)
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, lambda: announced.append(trainer.state.iteration))
    state = trainer.run(numbers_loader(), max_iters=last)

    assert saved.iterations(tmp_path) == kept
    assert announced == sorted(set(announced)) and state.checkpoints == len(announced) and set(kept) <= set(announced)


@pytest.mark.parametrize(("options", "kept"), [({}, [2, 8]), ({"best": "val/accuracy", "mode": "max"}, [7, 8])])
def test_the_best_is_remembered_over_a_resume(options, kept, tmp_path, caplog):
    """Unless another metric is followed: its first value is the best."""

    def run(scores, max_iters, **options):
        trainer, checkpoint = trainer_of(), Checkpoint(tmp_path, **{**BEST, "save_at_end": True, **options})
        scored(trainer, scores, checkpoint.options.best)
        checkpoint.attach(trainer, EACH(every=4))
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=max_iters)

    run({2: 1.0}, 4)
    run({7: 1.5}, 8, **options)
    assert saved.iterations(tmp_path) == kept
    assert any("val/accuracy (max)" in line for line in caplog.messages) == bool(options), "the change is told"


@pytest.mark.parametrize("background", [False, True])
def test_the_last_healthy_one_stays_beside_the_newest(tmp_path, background):
    trainer = trainer_of()

    def break_weights(trainer):
        with torch.no_grad():
            for parameter in trainer.update.model.parameters():
                parameter.fill_(math.nan)

    trainer.add_event_handler(EACH(once=4), break_weights)
    Checkpoint(tmp_path, keep_last=1, background=background).attach(trainer, EACH)
    trainer.run(numbers_loader(), max_iters=6)

    assert not weights(trainer).isfinite().any()
    assert saved.iterations(tmp_path) == [3, 6]
    assert [saved.manifest(tmp_path, iteration)["healthy"] for iteration in (3, 6)] == [True, False]


def test_the_best_value_may_come_at_the_end_of_a_pass_without_a_length(tmp_path):
    trainer, means = Trainer(lambda engine, batch: 1.0), iter([2.0, 1.0, 3.0])
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.update({"val/loss": next(means)}))
    Checkpoint(tmp_path, **BEST).attach(trainer, EACH)
    trainer.run(Passes(3, 5, 2), max_epochs=3)

    assert saved.iterations(tmp_path) == [8, 10] and saved.manifest(tmp_path, 8)["metrics"] == {"val/loss": 1.0}


@pytest.mark.parametrize("resumes", [False, True])
def test_only_a_resumed_run_prunes_at_its_start_what_a_killed_one_left_to_prune(tmp_path, resumes):
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_last=3).attach(trainer, EACH(every=2))
    trainer.run(numbers_loader(), max_iters=6)  # as if killed after the commit of the last one
    again, checkpoint, at_start = trainer_of(), Checkpoint(tmp_path, keep_last=1), []
    checkpoint.attach(again)
    if resumes:
        checkpoint.resume()
    again.add_event_handler(Events.STARTED, lambda: at_start.extend(saved.iterations(tmp_path)))
    again.run(numbers_loader(), max_iters=6)
    assert at_start == ([6] if resumes else [2, 4, 6])


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


@pytest.mark.row("C7")
@pytest.mark.parametrize(
    ("average", "background"),
    [
        *((None, True), ("all", False), ("val", True), ("other", False)),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((None, False), ("all", True), ("val", False), ("other", True))
        ),
    ],
)
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


def test_a_save_in_the_background_is_waited_for(tmp_path, monkeypatch):
    """The best one is still being written when it is asked for."""
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths, **options: (time.sleep(0.05), rename(*paths, **options)))
    trainer, checkpoint = scored_run(tmp_path, lambda iteration: -abs(iteration - 4), background=True)
    seen = []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: seen.append(checkpoint.restore_best()))
    trainer.run(numbers_loader(), max_iters=6)
    assert [each.iteration for each in seen] == [4]


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

    again, other = run_of(tmp_path, nn.Linear(3, 1))
    seen = []
    again.add_event_handler(Events.STARTED, lambda: seen.append(other.best))
    for _ in range(2):  # fresh again, in this process
        again.run(numbers_loader(), max_iters=1)
        assert other.best != first and saved.iterations(tmp_path) == [1]
    assert seen == [None, None]


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
