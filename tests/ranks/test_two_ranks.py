"""Whatever stops or ends one rank does so on both, at the same iteration, and the run goes on to the same bits."""

import os
import signal

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import TerminateOnNan
from ignite.metrics import Average
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader, seed_everything
from ignite_engine.errors import Interrupted
from ignite_engine.handlers import Checkpoint, EarlyStopping, Evaluation, GracefulStop, WallClockLimit
from ignite_engine.handlers.limits import StopFile
from tests.kit.clock import still_clock
from tests.kit.floors import needs
from tests.kit.processes import ranks
from tests.kit.tiers import tiered
from tests.kit.tiny import Numbers, linear, one, trainer_of

ITERATIONS, STEP_S = 40, 0.04


def by_ranks(number, *those):
    """A handler that sends this process a signal, on some of the ranks."""

    def prepare(rank, trainer, folder, clock):
        if rank in those:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), lambda: os.kill(os.getpid(), number))

    return prepare


def asked_for(rank, trainer, folder, clock):
    if rank == 1:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), lambda: trainer.request_stop("enough"))


def by_a_file(rank, trainer, folder, clock):
    StopFile(folder / "stop").attach(trainer)
    if rank == 1:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), lambda: (folder / "stop").touch())


def by_a_clock(rank, trainer, folder, clock):
    """Rank 0's runs ahead."""
    WallClockLimit(seconds=30.0, margin_s=1.0).attach(trainer)
    if rank == 0:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), lambda: clock.move(30.0))


STOPS = {
    "SIGINT to both": (by_ranks(signal.SIGINT, 0, 1), 130, "SIGINT"),
    "SIGTERM to rank 1": (by_ranks(signal.SIGTERM, 1), 143, "SIGTERM"),
    "SIGHUP to rank 0": (by_ranks(signal.SIGHUP, 0), 143, "SIGHUP"),
    "request of rank 1": (asked_for, None, "enough"),
    "stop file": (by_a_file, None, "stop file"),
    "time limit": (by_a_clock, None, "time limit"),
}


def train(rank, folder, clock, prepare=None, background=False):
    """A process's part of a run: its losses, what was saved and when each rank was told, and how it ended."""
    seed_everything(3)
    trainer = trainer_of(DistributedDataParallel(linear(dropout=True)), lr=0.01)
    checkpoint, losses, saved = Checkpoint(folder, background=background), [], []
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=8))
    GracefulStop().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: clock.move(STEP_S))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(float(trainer.state.output["loss"])))

    @trainer.on(TrainingEvents.CHECKPOINT_SAVED)
    def note():
        saved.append((trainer.state.iteration, trainer.state.saved_iteration))

    if prepare is not None:
        prepare(rank, trainer, folder, clock)
    checkpoint.resume()
    code = None
    try:
        trainer.run(loader(Numbers(2 * ITERATIONS), 2, shuffle=True), max_epochs=2)
    except Interrupted as error:
        code = error.code
    state = trainer.state
    return losses, saved, (code, state.status, state.reason, state.iteration), one(trainer.update.model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")

    def work(rank):
        with still_clock() as clock:
            return train(rank, folder, clock)

    return ranks(2, work)


@pytest.mark.row("G2")
@pytest.mark.parametrize(
    ("how", "background"),
    [
        *((how, False) for how in ("SIGINT to both", "SIGTERM to rank 1", "stop file", "time limit")),
        *(pytest.param(how, False, marks=pytest.mark.nightly) for how in ("SIGHUP to rank 0", "request of rank 1")),
        pytest.param("SIGTERM to rank 1", True, marks=pytest.mark.nightly),
    ],
)
def test_both_ranks_stop_at_one_iteration(how, background, whole, tmp_path):
    prepare, code, reason = STOPS[how]

    def work(rank):
        with still_clock() as clock:
            return train(rank, tmp_path, clock, prepare, background), train(rank, tmp_path, clock)

    found = ranks(2, work)
    (_, first, end, _), (_, second, other_end, _) = (stopped for stopped, _ in found)
    assert end == other_end and end[:2] == (code, "interrupted") and reason in end[2] and 9 <= end[3] < ITERATIONS
    assert first == second and first[-1] == (end[3], end[3]), "the events come at one iteration, the last one here"
    for (stopped, rest), (losses, _, last, weights) in zip(found, whole, strict=True):
        assert stopped[0] + rest[0] == losses and rest[2] == last and torch.equal(rest[3], weights)


@pytest.mark.row("G2")
def test_sigusr1_to_one_rank_saves_on_both_and_the_run_continues(whole, tmp_path):
    def work(rank):
        with still_clock() as clock:
            return train(rank, tmp_path, clock, by_ranks(signal.SIGUSR1, 1))

    (_, first, end, weights), (_, second, other_end, _) = ranks(2, work)
    assert first == second and end == other_end == whole[0][2] and torch.equal(weights, whole[0][3])
    (more,) = {iteration for iteration, _ in first} - {iteration for iteration, _ in whole[0][1]}
    assert 9 <= more < 2 * ITERATIONS


def evaluates(rank, folder, stops):
    """A run that evaluates 25 samples after iteration 4: how many of its batches it saw, and the metric."""
    seed_everything(3)
    trainer, seen = trainer_of(DistributedDataParallel(linear(dropout=True))), []
    with still_clock() as clock:

        def predict(model, batch):
            clock.move(1.0)
            seen.append(trainer.state.iteration)
            if stops and rank == 1 and len(seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return model(batch[0]) * torch.rand(1)

        evaluator = create_evaluator(trainer.update.model, predict, {"mean": Average()})
        Evaluation(evaluator, loader(Numbers(25), 2), resumes=True).attach(trainer, Events.ITERATION_COMPLETED(once=4))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        GracefulStop(exit=False).attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Numbers(32), 2, shuffle=True), max_epochs=1)
    return len(seen), dict(trainer.state.metrics)


@pytest.mark.row("C5")
def test_long_evaluation_continues_where_both_ranks_were(tmp_path):
    def work(rank):
        return [evaluates(rank, tmp_path / name, stops) for name, stops in (("a", False), ("b", True), ("b", False))]

    first, second = ranks(2, work)
    assert first[1][0] == second[1][0] and 2 <= first[1][0] < 6, "they broke off at different batches, or late"
    for count, (whole, stopped, rest) in zip((7, 6), (first, second), strict=True):
        assert whole[0] == stopped[0] + rest[0] == count and rest[1] == whole[1]


# --------------------------------------------------------------------------------------------------------- terminate


def terminates(event):
    def prepare(trainer, rank):
        if rank == 1:
            trainer.add_event_handler(event, lambda: trainer.terminate())

    return prepare


def terminates_on_nan(trainer, rank):
    handler = TerminateOnNan(output_transform=lambda output: float("nan") if rank == 1 else 0.0)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=7), handler)


# with the iteration and the epoch, which no clock decides: a run that is killed and run again ends there, too
ENDINGS = {
    "start": (terminates(Events.STARTED), (0, 0)),
    "epoch started": (terminates(Events.EPOCH_STARTED(once=2)), (41, 2)),
    "fetching": (terminates(Events.GET_BATCH_STARTED(once=5)), (6, 1)),
    "first iteration": (terminates(Events.ITERATION_COMPLETED(once=1)), (1, 1)),
    "iteration": (terminates(Events.ITERATION_COMPLETED(once=5)), (5, 1)),
    "epoch completed": (terminates(Events.EPOCH_COMPLETED(once=2)), (80, 2)),
    "not a number": (terminates_on_nan, (7, 1)),
}


@pytest.mark.parametrize("name", tiered(ENDINGS, "start", "fetching", "iteration", "epoch completed"))
def test_terminate_on_one_rank_ends_all_at_the_same_iteration(name):
    prepare, place = ENDINGS[name]

    def work(rank):
        trainer = trainer_of(DistributedDataParallel(linear()), lr=0.01)
        prepare(trainer, rank)
        state = trainer.run(loader(Numbers(80)), max_epochs=3)
        return (state.iteration, state.epoch), state.status, state.reason

    assert ranks(2, work) == [(place, "completed", "terminate")] * 2


def test_what_rank_0_alone_finishes_or_writes_reaches_both():
    def ends(rank, prepare, does):
        trainer = trainer_of(DistributedDataParallel(linear()), lr=0.01)
        prepare(trainer)
        if rank == 0:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, does, trainer)
        state = trainer.run(loader(Numbers(8), 2), max_epochs=4)
        return state.epoch, state.iteration, state.status, state.reason, state.metrics.get("acc")

    def work(rank):
        early = EarlyStopping("acc", mode="max", patience=1)
        yield ends(rank, lambda trainer: None, lambda trainer: trainer.finish("pruned"))
        yield ends(rank, early.attach, lambda trainer: trainer.state.metrics.update(acc=0.5))

    first, second = ranks(2, lambda rank: [*work(rank)])
    (*place, why, _), (*other, early, acc) = first
    assert first == second and [why, acc] == ["pruned", 0.5] and "early stopping: acc" in early
    assert place == [1, 2, "completed"] and other == [2, 4, "completed"]


@needs("rank_invariant")
@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_terminate_ends_a_rank_invariant_run_at_the_same_iteration_on_one_process_and_two(event):
    def work(rank, ending):
        trainer = Trainer(invariant_update(), global_micro_batches=2)
        if rank == ending:
            trainer.add_event_handler(event(once=5), lambda: trainer.terminate())
        state = trainer.run(loader(Numbers(80), 2), max_epochs=1)
        return state.iteration, state.reason, [each.tolist() for each in trainer.update.model.parameters()]

    one_process = work(0, 0)
    assert one_process[:2] == (5, "terminate")
    assert ranks(2, work, 1) == [one_process] * 2


def invariant_update():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Update(model, optimizer, lambda model, batch: model(batch[0]).square().mean(), accumulate="rank_invariant")


@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_stop_that_one_rank_asks_for_is_heard_within_two_iterations(at):
    def work(rank):
        trainer = trainer_of(DistributedDataParallel(linear()), lr=0.01)
        if rank == 1:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), lambda: trainer.request_stop("enough"))
        state = trainer.run(loader(Numbers(80)), max_epochs=3)
        return state.iteration, state.status, state.reason

    first, second = ranks(2, work)
    assert first == second and first[1:] == ("interrupted", "enough") and first[0] <= at + 1
