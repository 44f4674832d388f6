"""Which checkpoints are saved, and which of them are kept."""

import math

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.handlers import Checkpoint
from tests.kit import saved
from tests.kit.tiny import Passes, numbers_loader, trainer_of, weights

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
        pytest.param({**BEST}, EACH(every=8), 9, [4, 9], id="the smallest"),
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


def test_a_stop_and_a_request_are_saved_wherever_the_event_stands(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer, EACH(every=1000))
    trainer.add_event_handler(EACH(once=2), trainer.request_save)
    trainer.add_event_handler(EACH(once=4), lambda: trainer.request_stop("enough"))
    state = trainer.run(numbers_loader(), max_epochs=2)

    assert saved.iterations(tmp_path) == [2, 4] and state.status == "interrupted"


@pytest.mark.parametrize(
    ("then", "options", "kept"),
    [
        ({7: 1.5}, {}, [2, 8]),  # no new best
        ({7: 0.5}, {}, [7, 8]),
        ({7: 0.5}, {"best": "val/accuracy", "mode": "max"}, [7, 8]),  # the first value of another metric
    ],
)
def test_the_best_is_remembered_over_a_resume(then, options, kept, tmp_path, caplog):
    def run(scores, max_iters, **options):
        trainer, checkpoint = trainer_of(), Checkpoint(tmp_path, **{**BEST, "save_at_end": True, **options})
        scored(trainer, scores, checkpoint.options.best)
        checkpoint.attach(trainer, EACH(every=4))
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=max_iters)

    run({2: 1.0}, 4)
    run(then, 8, **options)
    assert saved.iterations(tmp_path) == kept
    assert any("val/accuracy (max)" in line for line in caplog.messages) == bool(options), "the change is told"


def test_each_manifest_has_the_metrics_of_its_iteration(tmp_path):
    trainer = trainer_of()
    scored(trainer, {2: 0.5})
    Checkpoint(tmp_path, config={"seed": 3}).attach(trainer, EACH(every=2))
    trainer.run(numbers_loader(), max_iters=4)
    first, second = (saved.manifest(tmp_path, iteration) for iteration in (2, 4))

    assert (first["metrics"], second["metrics"]) == ({"val/loss": 0.5}, {})
    assert (first["epoch"], first["reproducibility"], first["config"]) == (1, [], {"seed": 3})


# -- weights that are not finite --------------------------------------------------------------------------------------


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


# -- passes without a length, whose last iteration shows only when no batch follows -----------------------------------


def test_the_best_value_may_come_at_the_end_of_a_pass_without_a_length(tmp_path):
    trainer, means = Trainer(lambda engine, batch: 1.0), iter([2.0, 1.0, 3.0])
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.update({"val/loss": next(means)}))
    Checkpoint(tmp_path, **BEST).attach(trainer, EACH)
    trainer.run(Passes(3, 5, 2), max_epochs=3)

    assert saved.iterations(tmp_path) == [8, 10] and saved.manifest(tmp_path, 8)["metrics"] == {"val/loss": 1.0}


# -- when old ones are deleted ----------------------------------------------------------------------------------------


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
