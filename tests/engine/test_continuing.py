"""A run that goes on, in this process or another: what a random search over features has once found different."""

import copy
from itertools import islice
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader, rng
from ignite_engine.handlers import Checkpoint, EarlyStopping, Evaluation
from tests.kit.tiny import Numbers, trainer_of

Seen = list[tuple[Any, ...]]
Made = tuple[Trainer, Seen]


def stateful(count, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(TensorDataset(torch.arange(count)), 1, **options)


def noting(accumulation_steps=None):
    """A trainer, and epoch, iteration and samples of each update."""
    torch.manual_seed(0)
    seen = []

    def update(engine, batch):
        group = batch if accumulation_steps else [batch]
        seen.append((engine.state.epoch, engine.state.iteration, [int(torch.as_tensor(each[0])) for each in group]))

    trainer = Trainer(update, accumulation_steps)
    return trainer, seen


def assert_goes_on_everywhere(make, run):
    """From each edge of a run all that follows is seen again."""
    (whole, expected), saved = make(), list[tuple[int, Any]]()

    def save():
        saved.append((len(expected), copy.deepcopy(whole.registry.capture())))

    whole.add_event_handler(TrainingEvents.RESUME_POINT, save)
    run(whole)
    assert whole.reproducibility() == [] and len(saved) > 1
    for before, (shared, local) in saved[:-1]:
        resumed, seen = make()
        resumed.registry.load({**shared, **local}, source="memory")
        run(resumed)
        assert seen == expected[before:]
    return whole


@pytest.mark.parametrize("read_between", [0, 2, 6])
@pytest.mark.parametrize("how", ["stop", "interrupt"])
@pytest.mark.parametrize("at", [2, 6])
def test_loader_with_a_state_goes_on_in_this_process_whoever_reads_it_meanwhile(at, how, read_between):
    def run(how):
        trainer, seen = noting()
        data = stateful(6, shuffle=True)
        pause = {"stop": lambda: trainer.request_stop("a pause"), "interrupt": trainer.interrupt, "": lambda: None}[how]
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), pause)
        trainer.run(data, max_epochs=2)
        if how:
            with rng.isolated():
                list(islice(data, read_between))
            trainer.run(data, max_epochs=2)
        return seen

    assert run(how) == run("")


def test_short_last_group_of_a_stream_with_a_state_ends_its_epoch():
    """Gathering it has exhausted the pass: the stream's own state is that of the next one."""

    class Stream:
        def __init__(self):
            self.given = self.passes = 0

        def __iter__(self):
            while self.given < 3:
                self.given += 1
                yield [10 * self.passes + self.given]
            self.given, self.passes = 0, self.passes + 1

        def state_dict(self):
            return {"given": self.given, "passes": self.passes}

        def load_state_dict(self, state):
            self.given, self.passes = state["given"], state["passes"]

    assert_goes_on_everywhere(lambda: noting(2), lambda trainer: trainer.run(Stream(), max_epochs=3))


def test_epoch_after_one_that_was_cut_at_the_end_of_a_stream_with_a_state_has_its_batches():
    """Such a stream goes back to its beginning only when it is asked past its end: the first pass asked is empty."""

    class Stream:
        def __init__(self):
            self.given = 0

        def __iter__(self):
            while self.given < 3:
                self.given += 1
                yield [self.given]
            self.given = 0

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state):
            self.given = state["given"]

    def make():
        trainer, seen = noting()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), trainer.terminate_epoch)
        return trainer, seen

    whole = assert_goes_on_everywhere(make, lambda trainer: trainer.run(Stream(), max_epochs=3))
    assert (whole.state.iteration, whole.state.epoch) == (9, 3)


@pytest.mark.parametrize("at", [Events.ITERATION_COMPLETED, TrainingEvents.METRICS_READY, Events.GET_BATCH_STARTED])
def test_epoch_that_was_cut_short_is_cut_short(at):
    def make():
        trainer, seen = noting()

        def cut():
            if trainer.state.iteration == 5 and trainer.state.epoch == 1:
                trainer.terminate_epoch()

        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(x=1.0))
        trainer.add_event_handler(at, cut)
        return trainer, seen

    data = TensorDataset(torch.arange(5))
    assert_goes_on_everywhere(
        make, lambda trainer: trainer.run(loader(data, shuffle=True), max_epochs=2, epoch_length=7)
    )


def test_epoch_that_is_cut_short_at_its_own_end_has_ended():
    trainer, seen = noting()
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.update(x=1.0))
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: trainer.terminate_epoch())
    state = trainer.run(loader(TensorDataset(torch.arange(4))), max_epochs=2)

    assert (state.status, len(seen)) == ("completed", 8)


def test_save_that_was_asked_for_where_the_epoch_is_cut_short_is_made_at_its_end():
    trainer, _ = noting()
    asked = list[tuple[int, int]]()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.request_save())
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.state.metrics.update(x=1.0))
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: trainer.terminate_epoch())

    @trainer.on(TrainingEvents.RESUME_POINT)
    def note():
        if trainer.state.save_requested:
            asked.append((trainer.state.iteration, trainer.progress.epochs_completed))

    trainer.run(loader(TensorDataset(torch.arange(4))), max_epochs=2)
    assert asked == [(2, 1)]


def test_epoch_cut_short_before_an_update_leaves_a_clean_edge():
    trainer, _ = noting()
    last = list[bool]()
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: trainer.terminate_epoch())
    trainer.add_event_handler(Events.EPOCH_STARTED(once=2), lambda: trainer.terminate())
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: last.append(trainer.state.last))
    trainer.run(loader(TensorDataset(torch.arange(4))), max_epochs=3)

    assert last[-1]


def test_end_of_a_pass_is_told_by_the_resumed_run_too():
    def make():
        trainer, seen = noting()
        trainer.add_event_handler(
            Events.DATALOADER_STOP_ITERATION, lambda: seen.append(("stop", trainer.state.iteration))
        )
        return trainer, seen

    data = TensorDataset(torch.arange(2))
    assert_goes_on_everywhere(make, lambda trainer: trainer.run(loader(data), max_epochs=3))


def test_evaluation_before_training_is_not_made_again():
    def make():
        trainer, seen = noting()
        evaluator = create_evaluator(torch.nn.Linear(1, 1), lambda model, batch: 1.0, {"x": Average()})
        Evaluation(evaluator, [torch.zeros(1)]).attach(trainer, Events.STARTED | Events.EPOCH_COMPLETED)
        EarlyStopping("val/x", patience=3).attach(trainer)
        return trainer, seen

    data = TensorDataset(torch.arange(4))
    whole = assert_goes_on_everywhere(make, lambda trainer: trainer.run(loader(data), max_epochs=9))
    assert (whole.state.iteration, whole.state.evaluations) == (12, 4)


def test_iteration_is_evaluated_once_where_a_pass_without_a_length_ends():
    """Its last iteration has an edge of its own before the epoch's."""

    class Unsized:
        def __iter__(self):
            return iter([[0], [1]])

    def make():
        trainer, seen = noting()
        evaluator = create_evaluator(torch.nn.Linear(1, 1), lambda model, batch: 1.0, {"x": Average()})
        evaluation = Evaluation(evaluator, [torch.zeros(1)])
        evaluation.attach(trainer, Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED)
        trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED, lambda: seen.append(("evaluated", trainer.state.iteration))
        )
        return trainer, seen

    (whole, expected), saved = make(), list[Any]()
    whole.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: saved.append((len(expected), copy.deepcopy(whole.registry.capture())))
    )
    whole.run(Unsized(), max_epochs=2)
    before, (shared, local) = saved[1]  # after the second iteration, the pass's last
    resumed, seen = make()
    resumed.registry.load({**shared, **local}, source="memory")
    resumed.run(Unsized(), max_epochs=1)
    assert expected[:before] == [(1, 1, [0]), (1, 2, [1]), ("evaluated", 2)] and seen == []


def test_finished_run_stands_in_the_epoch_in_which_it_ended():
    data = TensorDataset(torch.arange(4))
    whole, _ = noting()
    whole.run(loader(data), max_iters=3)
    again, _ = noting()
    shared, local = whole.registry.capture()
    again.registry.load({**shared, **local}, source="memory")
    heard = list[int]()
    again.add_event_handler(Events.STARTED, lambda: heard.append(again.state.epoch))

    assert again.run(loader(data), max_iters=3).epoch == whole.state.epoch == 1 and heard == [1]


@pytest.mark.parametrize("steps", [None, 2, 3, 5])
def test_other_groups_from_anywhere_take_each_batch_once(steps):
    data = TensorDataset(torch.arange(5))
    for at in range(1, 11):
        whole, seen = noting()
        whole.run(loader(data, shuffle=True), max_epochs=2)
        expected = sorted(sample for *_, samples in seen[at:] for sample in samples)
        whole, _ = noting()
        whole.add_event_handler(Events.ITERATION_COMPLETED(once=at), lambda: whole.request_stop("here"))  # noqa: B023
        whole.run(loader(data, shuffle=True), max_epochs=2)
        shared, local = whole.registry.capture()
        other, seen = noting(steps)
        other.registry.load({**shared, **local}, source="memory")
        state = other.run(loader(data, shuffle=True), max_epochs=2)
        assert sorted(sample for *_, samples in seen for sample in samples) == expected
        assert state.epoch == 2


def test_other_groups_from_the_end_of_an_epoch_on():
    """Saved with every batch of the pass consumed, the next epoch begins at its first iteration."""
    whole, _ = noting(2)
    saved = list[Any]()
    whole.add_event_handler(TrainingEvents.RESUME_POINT, lambda: saved.append(copy.deepcopy(whole.registry.capture())))
    whole.run(stateful(5), max_epochs=1)
    other, seen = noting()
    other.registry.load({**saved[-1][0], **saved[-1][1]}, source="memory")
    state = other.run(stateful(5), max_epochs=3)

    assert (state.iteration, state.epoch, len(seen)) == (3 + 2 * 5, 3, 10)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shuffle": True}, None),
        ({"shuffle": False}, None),
        ({"shuffle": False, "batch_size": None}, None),
        ({"sampler": WeightedRandomSampler([1.0] * 6, 6)}, "WeightedRandomSampler"),
        ({"batch_size": 1, "batch_sampler": BatchSampler(RandomSampler(range(6)), 1, False)}, "RandomSampler"),
    ],
    ids=["shuffled", "in order", "single", "weighted", "batches"],
)
def test_order_that_a_loader_with_a_state_does_not_save_is_in_the_exactness_report(options, told):
    from torchdata.stateful_dataloader import StatefulDataLoader

    trainer, _ = noting()
    trainer.run(StatefulDataLoader(TensorDataset(torch.arange(6)), **options), max_epochs=1)
    reason = f"StatefulDataLoader does not save the order of its {told}: it is drawn again"
    assert trainer.reproducibility() == ([] if told is None else [reason])


@pytest.mark.parametrize("how", ["stop", "interrupt"])
def test_no_data_after_a_pause_is_refused_before_the_run(how):
    """The length of the epoch is known, so that nothing asks for the data's."""
    trainer, seen = noting()
    pause = {"stop": lambda: trainer.request_stop("a pause"), "interrupt": trainer.interrupt}[how]
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), pause)
    data = [torch.tensor([number]) for number in range(4)]
    trainer.run(data, max_epochs=2)
    started = []
    trainer.add_event_handler(Events.STARTED, lambda: started.append(1))
    with pytest.raises(ValueError, match="Input data has zero size"):
        trainer.run([], max_epochs=2)
    assert started == []
    trainer.run(data, max_epochs=2)
    assert [number for _, number, _ in seen] == list(range(1, 9)), "the refused run has changed the run"


def mean_of(model, batch):
    return model(batch[0][:, None]).mean()


def test_refused_runs_leave_the_users_loader_as_it_was():
    """It deals batches out, not samples, while a run counts micro-batches over all ranks."""
    data = loader(TensorDataset(torch.arange(4.0)), 1)
    before = dict(vars(data.sampler))
    model = torch.nn.BatchNorm1d(1)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_of, rank_invariant=True)
    for refused, arguments in (
        (Trainer(lambda engine, batch: 0.0, global_micro_batches=2), {"max_epochs": 1, "epoch_length": 0}),
        (Trainer(update, global_micro_batches=2), {"max_epochs": 1}),
    ):
        with pytest.raises(ValueError, match=r"zero size|BatchNorm1d"):
            refused.run(data, **arguments)
        assert vars(data.sampler) == before
    trainer, seen = noting()
    trainer.run(data)
    assert [samples for _, _, samples in seen] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("event", [TrainingEvents.METRICS_READY, TrainingEvents.RESUME_POINT])
@pytest.mark.parametrize("at", [2, 4])
def test_interrupt_after_the_vote_pauses_at_that_boundary(event, at, tmp_path):
    """What was asked for there is done before the pause."""
    for asks in ("nothing", "save", "stop"):
        trainer, seen = noting()
        checkpoint = Checkpoint(tmp_path / f"{asks}{event}{at}")
        checkpoint.attach(trainer, Events.COMPLETED)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.state.metrics.update(x=1.0))

        def pause(engine):
            if engine.state.iteration == at and len(seen) == at:  # noqa: B023  # called in this turn
                seen.append((0, 0, []))  # noqa: B023
                engine.interrupt()
                if asks == "save":  # noqa: B023
                    engine.request_save()
                elif asks == "stop":  # noqa: B023
                    engine.request_stop("a pause")

        trainer.add_event_handler(event, pause)
        data = [torch.tensor([number]) for number in range(4)]
        trainer.run(data, max_epochs=2)
        assert trainer.state.iteration == at and (trainer.state.status == "interrupted") is (asks == "stop")
        saved = [each.iteration for each in checkpoint.store.checkpoints()]
        assert saved == ([] if asks == "nothing" else [at])
        trainer.run(data, max_epochs=2)
        assert [number for _, number, _ in seen if number] == list(range(1, 9))


@pytest.mark.parametrize("kind", ["update", "mapping", "number", "other"])
def test_end_of_data_that_a_resume_finds_has_the_output_of_the_last_iteration(tmp_path, kind):
    def run(folder, stop_at=None):
        outputs, seen = iter(range(1, 9)), list[Any]()
        if kind == "update":
            trainer = trainer_of(clip_norm=1.0)
        elif kind == "other":
            trainer = Trainer(lambda engine, batch: [batch])
        else:
            trainer = Trainer(
                lambda engine, batch: {"a": engine.state.iteration, "b": batch} if kind == "mapping" else next(outputs)
            )
        if folder is not None:
            checkpoint = Checkpoint(folder)
            checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100))
            checkpoint.resume()
        if stop_at is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(copy.deepcopy(trainer.state.output)))
        trainer.run(Once([Numbers(4)[index] for index in (0, 1, 2)]), max_epochs=1)
        return seen

    (whole,) = run(None)
    assert run(tmp_path, stop_at=3) == []
    (resumed,) = run(tmp_path)
    if kind == "mapping":  # what is numbers
        whole.pop("b")
    assert str(resumed) == str(None if kind == "other" else whole)


class Once:
    """Data without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)
