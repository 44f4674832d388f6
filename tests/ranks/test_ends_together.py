"""Whatever ends one rank ends all of them, at the same iteration."""

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import TerminateOnNan
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import Numbers, linear, mse, on_two_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def ending(prepare, rank):
    """Iteration, epoch, status and reason of a run under DDP, of 3 epochs of 40 iterations."""
    model = DistributedDataParallel(linear())
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), 0.01), mse))
    prepare(trainer, rank)
    state = trainer.run(loader(Numbers(80)), max_epochs=3)
    return [state.iteration, state.epoch, state.status, state.reason]


def terminates(event):
    def prepare(trainer, rank):
        if rank == 1:
            trainer.add_event_handler(event, lambda: trainer.terminate())

    return prepare


def terminates_on_nan(trainer, rank):
    handler = TerminateOnNan(output_transform=lambda output: float("nan") if rank == 1 else 0.0)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=7), handler)


def terminates_where_all_pause(trainer, rank):
    terminates(Events.ITERATION_COMPLETED(once=3))(trainer, rank)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), trainer.interrupt)


def terminates_before_going_back(rank, directory):
    """``terminate()`` on rank 1 in the iteration before one that is not finite, for which the run goes back."""
    model = DistributedDataParallel(linear())
    update = Update(model, torch.optim.SGD(model.parameters(), 0.01), mse, non_finite="rollback")
    trainer, broken = Trainer(update), list[int]()
    Checkpoint(directory).attach(trainer, Events.ITERATION_COMPLETED(once=2))

    @trainer.on(Events.ITERATION_COMPLETED(once=4))
    def terminate_once():
        if rank == 1 and not broken:
            trainer.terminate()

    @trainer.on(Events.ITERATION_STARTED(once=5))
    def break_once():
        if not broken:
            broken.append(trainer.state.iteration)
            trainer.state.batch = [value * float("nan") for value in trainer.state.batch]

    state = trainer.run(loader(Numbers(80)), max_epochs=3)
    return [broken, state.iteration, state.status, state.reason]


CASES = {
    "pausing": terminates_where_all_pause,
    "start": terminates(Events.STARTED),
    "epoch started": terminates(Events.EPOCH_STARTED(once=2)),
    "fetching": terminates(Events.GET_BATCH_STARTED(once=5)),
    "iteration": terminates(Events.ITERATION_COMPLETED(once=5)),
    "epoch completed": terminates(Events.EPOCH_COMPLETED(once=2)),
    "not a number": terminates_on_nan,
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    def cases(rank):
        answers = {name: ending(prepare, rank) for name, prepare in CASES.items()}
        return {**answers, "going back": terminates_before_going_back(rank, folder / "checkpoints")}

    folder = tmp_path_factory.mktemp("ranks")
    return on_two_ranks(cases, folder / "store")


@pytest.mark.parametrize("name", CASES)
def test_terminate_on_one_rank_ends_all_at_the_same_iteration(name, endings):
    first, second = endings[name]

    assert first == second and first[2:] == ["completed", "terminate() on rank 1"] and first[0] < 120


def test_terminate_ends_at_an_iteration_that_no_clock_decides(endings):
    """A run that is killed and run again ends at the same one, with the same bits."""
    reached = {name: first[0] for name, (first, _) in endings.items()}

    assert (
        reached["iteration"] == reached["fetching"] == reached["not a number"] == 16 and reached["epoch started"] == 48
    )


def test_terminate_at_the_start_or_at_the_end_of_an_epoch_ends_there(endings):
    assert endings["start"][0][:2] == [0, 0] and endings["epoch completed"][0][:2] == [80, 2]


def test_terminate_is_not_forgotten_where_the_run_goes_back(endings):
    first, second = endings["going back"]

    assert first == second and first[0] == [5] and first[1] < 120
    assert first[2:] == ["completed", "terminate() on rank 1"]
