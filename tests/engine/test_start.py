"""How a run starts: the four values of ``state.start``, and what each does to counters, data and random numbers."""

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.engine.length import Length
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import agreement
from ignite_engine.state import Start
from tests.kit.tiny import mse, numbers_loader, trainer_of, weights

DATA = [1, 2, 3]


def noting():
    """A trainer, the batches of its updates, and ``state.start`` at each STARTED."""
    batches = []
    trainer, starts = Trainer(lambda engine, batch: batches.append(batch)), list[Start]()
    trainer.add_event_handler(Events.STARTED, lambda: starts.append(trainer.state.start))
    return trainer, batches, starts


def position(trainer):
    return trainer.state.iteration, trainer.state.epoch


def test_first_run_is_fresh_and_so_is_the_same_one_again():
    trainer, batches, starts = noting()
    trainer.run(DATA, max_epochs=2)
    trainer.run(DATA, max_epochs=2)

    assert starts == [Start.FRESH, Start.FRESH]
    assert batches == DATA * 4 and position(trainer) == (6, 2)


@pytest.mark.row("A1")
@pytest.mark.parametrize("limits", [({"max_iters": 4}, {"max_iters": 8}), ({"max_epochs": 1}, {"max_epochs": 3})])
def test_run_with_a_larger_limit_continues_as_if_it_had_been_given_at_first(limits):
    trainer, batches, starts = noting()
    for each in limits:
        trainer.run(DATA, **each)
    whole, expected, _ = noting()
    whole.run(DATA, **limits[-1])

    assert starts == [Start.FRESH, Start.CONTINUED]
    assert batches == expected and position(trainer) == position(whole)


@pytest.mark.parametrize(("limits", "end", "reason"), [((2, 4), 4, "max_iters"), ((2, 9), 6, "max_epochs")])
def test_of_two_limits_the_first_that_is_reached_ends_the_run(limits, end, reason):
    trainer, batches, starts = noting()
    trainer.add_event_handler(Events.STARTED, lambda: ends.append(trainer.last_iteration))
    ends = []
    trainer.run(DATA, max_epochs=limits[0], max_iters=limits[1])

    assert batches == (DATA * 3)[:end] and trainer.state.reason == reason and ends == [end]
    assert Length.of(*limits, len(DATA)).iterations == end
    trainer.run(DATA, max_epochs=3, max_iters=9)
    assert batches == DATA * 3 and starts == [Start.FRESH, Start.CONTINUED]


def test_run_with_two_limits_is_resumed_to_the_bits_of_one_that_was_not_interrupted(tmp_path):
    whole = trainer_of()
    whole.run(numbers_loader(shuffle=True), max_epochs=3, max_iters=8)
    killed, resumed = trainer_of(), trainer_of()
    Checkpoint(tmp_path).attach(killed, Events.ITERATION_COMPLETED(every=7))
    killed.run(numbers_loader(shuffle=True), max_epochs=3, max_iters=7)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed, Events.COMPLETED)
    checkpoint.resume()
    resumed.run(numbers_loader(shuffle=True), max_epochs=3, max_iters=8)

    assert whole.state.iteration == 8 and torch.equal(weights(whole), weights(resumed))


def test_continued_run_has_the_weights_of_one_run_with_dropout_and_handlers_that_draw():
    def run(*limits):
        trainer = trainer_of(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)))
        for event in (Events.STARTED, Events.EPOCH_STARTED):
            trainer.add_event_handler(event, lambda: torch.rand(3))
        torch.manual_seed(3)
        for limit in limits:
            trainer.run(numbers_loader(12, 2, shuffle=True), max_iters=limit)
        return weights(trainer)

    torch.manual_seed(0)
    whole = run(15)
    torch.manual_seed(0)

    # STARTED draws once more in a run of two parts, which must not be noticed
    assert torch.equal(run(4, 15), whole)


def test_stopped_run_continues_where_it_was():
    trainer, batches, starts = noting()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.request_stop("enough"))
    stopped = trainer.run(DATA, max_epochs=3).iteration
    trainer.run(DATA, max_epochs=3)

    assert stopped == 4 and starts == [Start.FRESH, Start.CONTINUED]
    assert batches == DATA * 3 and position(trainer) == (9, 3)


def test_run_stopped_at_its_end_only_completes():
    trainer, batches, starts = noting()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: trainer.request_stop("enough"))
    trainer.run(DATA, max_epochs=1)
    trainer.run(DATA, max_epochs=1)

    assert starts == [Start.FRESH, Start.CONTINUED] and batches == DATA
    assert trainer.state.status == "completed"


@pytest.mark.row("A1")
def test_terminated_run_is_reset_to_the_next_epoch_as_in_ignite():
    def run(kind):
        batches = []
        engine = kind(lambda engine, batch: batches.append(batch))
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=4), engine.terminate)
        engine.run(DATA, max_epochs=4)
        engine.run(DATA, max_epochs=4)
        return batches, engine.state.iteration, engine.state.epoch

    assert run(Trainer) == run(Engine)
    trainer, _, starts = noting()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), trainer.terminate)
    trainer.run(DATA, max_epochs=4)
    trainer.run(DATA, max_epochs=4)
    assert starts == [Start.FRESH, Start.RESET]


@pytest.mark.parametrize(
    ("event", "at", "of_pass"),
    [
        (Events.ITERATION_COMPLETED(once=2), 2, 1),
        (Events.ITERATION_COMPLETED(once=4), 4, 1),
        (Events.ITERATION_COMPLETED(once=5), 5, 2),
        (Events.EPOCH_COMPLETED(once=1), 4, 1),
        (Events.EPOCH_STARTED(once=1), 0, 0),
        (Events.EPOCH_STARTED(once=2), 4, 1),
    ],
)
def test_pass_after_a_terminated_one_is_the_next_in_the_order(event, at, of_pass):
    """Four shuffled batches in a pass: the run that is terminated after ``at`` continues with an untouched pass."""

    def orders(trainer):
        seen = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.batch[0].flatten().tolist())
        )
        return seen

    whole = Trainer(lambda engine, batch: None)
    expected = orders(whole)
    whole.run(numbers_loader(8, shuffle=True), max_epochs=4)
    trainer = Trainer(lambda engine, batch: None)
    seen = orders(trainer)
    trainer.add_event_handler(event, trainer.terminate)
    data = numbers_loader(8, shuffle=True)
    trainer.run(data, max_epochs=4)
    assert seen == expected[:at]
    trainer.run(data, max_epochs=4)

    assert seen[at : at + 4] == expected[4 * of_pass : 4 * of_pass + 4]
    assert expected[:4] != expected[4:8] != expected[8:12]


def test_counters_set_by_hand_reset_the_data():
    trainer, batches, starts = noting()
    trainer.load_state_dict({"iteration": 4, "max_epochs": 2, "epoch_length": 3})
    trainer.run(DATA)

    assert starts == [Start.RESET] and batches == [1, 2] and position(trainer) == (6, 2)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_run_after_an_exception_starts_over(error):
    trainer, batches, starts = noting()

    def fail():
        if len(batches) == 5:
            raise error

    trainer.add_event_handler(Events.ITERATION_COMPLETED, fail)
    with pytest.raises(error):
        trainer.run(DATA, max_epochs=3)
    trainer.run(DATA, max_epochs=3)

    assert starts == [Start.FRESH, Start.FRESH]
    assert batches[5:] == DATA * 3 and position(trainer) == (9, 3)


def test_reason_of_a_run_that_raised_keyboard_interrupt_names_it():
    trainer, *_ = noting()

    def interrupt():
        raise KeyboardInterrupt

    trainer.add_event_handler(Events.ITERATION_COMPLETED, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(DATA)

    assert (trainer.state.status, trainer.state.reason) == ("interrupted", "forced: KeyboardInterrupt")


def test_run_after_a_failure_in_an_update_begins_at_a_step_boundary():
    """A stop that cuts off its first evaluation ends it there."""
    trainer = Trainer(lambda engine, batch: 1 / (engine.state.iteration - 2))
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA)
    boundaries = []
    trainer.add_event_handler(Events.STARTED, trainer.terminate)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: boundaries.append(trainer.state.iteration))
    trainer.run(DATA)

    assert boundaries == [0]


def test_resumed_run_starts_at_the_checkpoint_and_once_more_after_a_failure_before_its_first_batch(
    tmp_path,
):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_iters=4)
    resumed, starts = trainer_of(), list[tuple[Start, int]]()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed)

    @resumed.on(Events.STARTED)
    def note():
        starts.append((resumed.state.start, resumed.state.iteration))
        if len(starts) == 1:
            raise OSError("the first time only")

    checkpoint.resume()
    with pytest.raises(OSError):
        resumed.run(numbers_loader(), max_iters=6)
    resumed.run(numbers_loader(), max_iters=6)
    trainer.run(numbers_loader(), max_iters=6)

    assert starts == [(Start.RESUMED, 4)] * 2
    assert torch.equal(weights(resumed), weights(trainer))


def test_unclaimed_parts_are_an_error_and_wait_for_their_object(tmp_path):
    class Kept:
        def state_dict(self):
            return {"value": 3}

        def load_state_dict(self, state):
            self.value = state["value"]

    trainer = trainer_of()
    trainer.register("mine", Kept())
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_iters=2)
    resumed, kept = trainer_of(), Kept()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    checkpoint.resume()
    with pytest.raises(StateMismatch, match=r"holds \['mine'\], for which nothing is registered"):
        resumed.run(numbers_loader(), max_iters=4)
    resumed.register("mine", kept)
    resumed.run(numbers_loader(), max_iters=4)

    assert kept.value == 3 and resumed.state.start is Start.RESUMED and resumed.state.iteration == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_epochs": 1.5}, "max_epochs is invalid.*whole number of at least 1, got 1.5"),
        ({"max_iters": 2.5}, "max_iters is invalid.*got 2.5"),
        ({"max_iters": 0}, "max_iters is invalid.*got 0"),
        ({"epoch_length": 1.5}, "epoch_length must be a whole number of iterations, got 1.5"),
        ({"epoch_length": True}, "epoch_length must be a whole number of iterations, got True"),
        ({"max_epochs": True}, "expected a whole number of at least 1, got True"),
        ({"max_epochs": 3, "epoch_length": 2}, "epoch_length should be same as in the state"),
        ({"max_iters": 9}, "To switch from max_epochs to max_iters"),
    ],
)
def test_stopped_run_survives_arguments_that_are_refused(arguments, message):
    trainer, batches, starts = noting()
    errors = []
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: errors.append(error))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.request_stop("enough"))
    trainer.run(DATA, max_epochs=3)
    with pytest.raises(ValueError, match=message):
        trainer.run(DATA, **arguments)
    trainer.run(DATA, max_epochs=3)

    assert starts == [Start.FRESH, Start.CONTINUED] and batches == DATA * 3 and errors == []


def test_paused_run_survives_arguments_that_are_refused():
    trainer, batches, starts = noting()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), trainer.interrupt)
    trainer.run(DATA, max_epochs=2)
    with pytest.raises(ValueError, match="epoch_length should be same"):
        trainer.run(DATA, max_epochs=2, epoch_length=7)
    trainer.run(DATA, max_epochs=2)

    assert starts == [Start.FRESH, Start.CONTINUED] and batches == DATA * 2


def test_finished_run_that_is_resumed_trains_nothing(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_epochs=2)
    resumed = trainer_of()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    events = []
    for event in (Events.STARTED, Events.ITERATION_STARTED, TrainingEvents.RESUME_POINT, Events.COMPLETED):
        resumed.add_event_handler(event, lambda _, name=event.name: events.append(name))
    checkpoint.resume()
    resumed.run(numbers_loader(), max_epochs=2)

    assert events == ["STARTED", "COMPLETED"] and resumed.state.epoch == 2


def test_started_is_in_the_epoch_in_which_the_run_was_saved(tmp_path):
    """What is measured there, an evaluation that was interrupted, say, is logged with that epoch."""
    for iterations, epoch in ((4, 1), (6, 1), (7, 2)):
        folder = tmp_path / str(iterations)
        trainer = trainer_of()
        Checkpoint(folder).attach(trainer)
        trainer.run(numbers_loader(12, 2), max_iters=iterations)
        resumed, epochs = trainer_of(), list[int]()
        checkpoint = Checkpoint(folder)
        checkpoint.attach(resumed)
        for event in (Events.STARTED, Events.EPOCH_STARTED):
            resumed.add_event_handler(event, lambda engine, seen=epochs: seen.append(engine.state.epoch))
        checkpoint.resume()
        resumed.run(numbers_loader(12, 2), max_epochs=3)

        assert epochs == [epoch, *range(epoch + 1, 4)]  # no EPOCH_STARTED for an epoch that has begun


@pytest.mark.parametrize(
    ("key", "other", "said"),
    [
        ("accumulation_steps", 4, "accumulation_steps is 2 on rank 0 and 4 on rank 1"),
        ("max_epochs", 2, "max_epochs is 1 on rank 0 and 2 on rank 1"),
        (
            "optimizer.param_groups[0]['lr']",
            0.5,
            r"optimizer.param_groups\[0\]\['lr'\] is 0.1 on rank 0 and 0.5 on rank 1",
        ),
    ],
)
def test_other_settings_on_a_rank_are_refused_on_all(key, other, said, monkeypatch):
    monkeypatch.setattr(agreement, "world_size", lambda: 2)
    monkeypatch.setattr(agreement, "gather_objects", lambda mine: [mine, {**mine, key: other}])
    trainer = trainer_of(accumulation_steps=2)
    with pytest.raises(ValueError, match=f"^{said}: every rank must train with the same settings.$"):
        trainer.run(numbers_loader(), max_epochs=1)
    assert trainer.state.iteration == 0


@pytest.mark.parametrize("refused", [{"epoch_length": 0}, {"max_epochs": 1}, {"max_iters": 9}, "empty data"])
def test_refused_run_changes_nothing_of_the_run_before(refused):
    def trained(refuse):
        trainer, sizes = Trainer(lambda engine, batch: sizes.append(len(batch)), accumulation_steps=3), list[int]()
        counters = []
        trainer.run(numbers_loader(8, 1), max_epochs=2)
        if refuse:
            before = trainer.progress.position
            data = [] if refused == "empty data" else numbers_loader(8, 1)
            arguments = {"max_epochs": 2} if refused == "empty data" else refused
            with pytest.raises(ValueError, match=r"."):
                trainer.run(data, **arguments)
            assert trainer.progress.position == before
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: counters.append((trainer.state.iteration, trainer.state.epoch))
        )
        trainer.run(numbers_loader(8, 1), max_epochs=3)
        return sizes, counters

    assert trained(refuse=True) == trained(refuse=False) and trained(refuse=True)[0] == [3, 3, 2] * 3


@pytest.mark.parametrize("stop", [2, 6, 8])
def test_what_was_done_at_the_start_of_an_epoch_is_done_once_and_stays(tmp_path, stop):
    """A part in eval mode, parameters that are not frozen any more, a group that was added."""

    def run(folder, end):
        torch.manual_seed(0)
        first, last = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()), nn.Linear(4, 1)
        model = nn.Sequential(first, last)
        first.requires_grad_(False)
        optimizer = torch.optim.AdamW(last.parameters(), lr=0.05)
        trainer, checkpoint = Trainer(Update(model, optimizer, mse)), Checkpoint(tmp_path / folder)

        def unfreeze():
            first.requires_grad_(True)
            first.eval()
            optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.01})

        trainer.add_event_handler(Events.EPOCH_STARTED(once=2), unfreeze)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(12, 2), **({"max_epochs": 3} if end is None else {"max_iters": end}))
        return model

    whole = run("whole", None)
    run("stopped", stop)
    resumed = run("stopped", None)
    assert all(torch.equal(*pair) for pair in zip(whole.state_dict().values(), resumed.state_dict().values()))
    assert [module.training for module in whole.modules()] == [module.training for module in resumed.modules()]
