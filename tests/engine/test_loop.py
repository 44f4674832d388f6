"""What the loop itself promises beyond Ignite's: where an epoch and a run end, and how few frames there are."""

import traceback

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator
from ignite_engine.engine.saved_progress import counters
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.tiny import events_of, linear, mse, numbers_loader, trainer_of, weights

DATA = [1, 2, 3]


def constant(engine, batch):
    return 1.0


def test_six_frames_in_four_files_from_run_to_the_optimizer():
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.extend(traceback.extract_stack())
            return super().step(closure)

    model = linear()
    Trainer(Update(model, Watched(model.parameters(), lr=0.1), mse), 2).run(numbers_loader(4, 2))
    names = [each.name for each in seen]
    between = seen[names.index("run") : len(names) - 1 - names[::-1].index("step")]
    own = [each for each in between if "site-packages" not in each.filename]
    first = next(index for index, each in enumerate(own) if each.filename.endswith("trainer.py"))

    way = "\n".join(f"{each.filename}:{each.lineno} {each.name}" for each in own[first:])
    remedy = f"a function between run() and optimizer.step() must go: call what you need beside the others\n{way}"
    assert len(own[first:]) <= 6, remedy
    assert len({each.filename for each in own[first:]}) <= 4, remedy


def test_epoch_that_was_saved_when_it_was_full_completes_without_another_iteration(tmp_path):
    """An exception in EPOCH_COMPLETED, saved by ``on_exception``: all iterations of the epoch are done."""
    trainer = trainer_of()
    Checkpoint(tmp_path, on_exception=True).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(6, 2), max_epochs=2)
    resumed, epochs = trainer_of(), list[tuple[int, int]]()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    resumed.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: epochs.append((resumed.state.epoch, resumed.state.iteration))
    )
    assert checkpoint.resume() is not None
    resumed.run(numbers_loader(6, 2), max_epochs=2)

    assert epochs == [(1, 3), (2, 6)]


@pytest.mark.parametrize("epoch_length", [2, 3, 4])
def test_resume_with_an_epoch_length_at_or_below_the_position_ends(tmp_path, epoch_length):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_iters=3)
    resumed = trainer_of()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    checkpoint.resume()
    resumed.run(numbers_loader(), max_epochs=2, epoch_length=epoch_length)

    assert resumed.state.epoch == 2 and resumed.state.iteration == max(3, epoch_length) + epoch_length


def test_data_without_a_batch_is_an_error():
    class Nothing:
        def __iter__(self):
            return iter(())

    for limits in ({"max_epochs": 2, "epoch_length": 8}, {"max_iters": 3}):
        trainer = Trainer(constant)
        with pytest.raises(ValueError, match="The data gave no batch, and the run is not at its end"):
            trainer.run(Nothing(), **limits)
        assert trainer.state.status == "failed"


def test_handler_of_exception_raised_that_raises_is_called_once():
    def fail(engine, batch):
        raise ZeroDivisionError

    trainer, errors = Trainer(fail), list[BaseException]()

    @trainer.on(Events.EXCEPTION_RAISED)
    def again(error):
        errors.append(error)
        raise error

    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA)
    assert len(errors) == 1


def test_filter_of_an_event_that_counts_nothing_is_an_error_as_in_ignite():
    trainer = Trainer(constant)
    trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION(once=1), lambda: None)

    with pytest.raises(RuntimeError, match="Unknown event name"):
        trainer.run(DATA, max_epochs=2)


def test_boundary_of_an_epochs_last_iteration_is_after_the_epoch():
    trainer, seen = Trainer(constant), list[tuple[int, int]]()
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: seen.append((trainer.state.iteration, trainer.progress.epochs_completed))
    )
    trainer.run(DATA, max_epochs=2)

    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)]


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_iters": 6}], ids=["2 epochs", "6 iterations"])
@pytest.mark.parametrize("asked_at", [TrainingEvents.EVALUATION_COMPLETED, TrainingEvents.METRICS_READY, "beside"])
@pytest.mark.parametrize("asked", ["nothing", "finish", "terminate_epoch"])
@pytest.mark.parametrize(
    "evaluated_at", [Events.ITERATION_COMPLETED(once=4), Events.ITERATION_COMPLETED(once=6), Events.EPOCH_COMPLETED]
)
def test_what_a_repeated_evaluation_asks_for_happens_as_in_the_whole_run(
    tmp_path, evaluated_at, asked, asked_at, limits
):
    """An epoch whose iterations are all done gets its EPOCH_COMPLETED, unless the whole run would not have fired it."""

    def run(folder, stop):
        trainer = trainer_of()

        def predict(model, batch):
            if stop:
                trainer.request_stop("enough")
            return batch

        def ask():
            if trainer.state.evaluations == 1 and asked != "nothing":
                _ = trainer.finish("asked") if asked == "finish" else trainer.terminate_epoch()

        evaluator = create_evaluator(trainer.update.model, predict, {"mean": Average()})
        Evaluation(evaluator, [torch.tensor([1.0])] * 3).attach(trainer, evaluated_at)
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        if asked_at != "beside":
            trainer.add_event_handler(asked_at, ask)
        elif asked == "terminate_epoch":  # a handler of the same iteration, which the resumed run does not repeat
            trainer.add_event_handler(evaluated_at, lambda: trainer.terminate_epoch())
        checkpoint.resume()
        seen = events_of(trainer, (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, TrainingEvents.METRICS_READY))
        seen_last = events_of(trainer, (Events.TERMINATE_SINGLE_EPOCH, Events.TERMINATE, Events.COMPLETED))
        trainer.run(numbers_loader(), **limits)
        return trainer, seen if stop else seen + seen_last

    whole, expected = run(tmp_path / "whole", stop=False)
    stopped, before = run(tmp_path / "cut", stop=True)
    assert (stopped.state.status, stopped.state.evaluations) == ("interrupted", 0)
    resumed, after = run(tmp_path / "cut", stop=False)

    assert before + after == expected
    position, expected_position = counters(resumed.progress), counters(whole.progress)
    assert position | {"checkpoints": 0} == expected_position | {"checkpoints": 0}
    assert torch.equal(weights(resumed), weights(whole))
    for name in ("status", "reason", "epoch", "metrics"):
        assert getattr(resumed.state, name) == getattr(whole.state, name), name
