"""Loader workers leave signals to the training process, end with their run, and never outlive it."""

import multiprocessing
import os
import signal
import time

import pytest
from ignite.engine import Events
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Trainer, loader
from tests.data.kinds import KINDS, Samples
from tests.kit.processes import start, wait_until
from tests.kit.resume import assert_resumes, program
from tests.kit.seen import Seen

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata


class Waiting:
    """Leaves its process's number in a folder, and waits for ever."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 8

    def __getitem__(self, index):
        (self.folder / str(os.getpid())).touch()
        while True:
            time.sleep(60)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("spawn", "forkserver"))]
)
def test_busy_workers_end_when_their_trainer_is_killed(context, tmp_path):
    trainer = start(
        lambda: next(iter(loader(Waiting(tmp_path), num_workers=2, multiprocessing_context=context))), output=os.devnull
    )
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, trainer)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            for worker in workers:
                os.kill(worker, number)  # a launcher's, to the whole group: the trainer is to end them
        os.kill(trainer.pid, 0)
        assert not any(signal_reached(worker) for worker in workers) and all(map(alive, workers))
        os.kill(trainer.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, workers)), timeout_s=20)
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


def signal_reached(pid):
    """Whether a signal waits that is neither blocked nor ignored; then the process is about to end."""
    with open(f"/proc/{pid}/status") as file:
        masks = {line.split(":")[0]: line.split()[-1] for line in file if line.startswith(("Sig", "Shd"))}
    pending = int(masks["SigPnd"], 16) | int(masks["ShdPnd"], 16)
    return bool(pending & ~int(masks["SigBlk"], 16) & ~int(masks["SigIgn"], 16))


class Subclass(DataLoader): ...


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "make", [loader, DataLoader, pytest.param(Subclass, marks=pytest.mark.nightly), StatefulDataLoader]
)
def test_loader_workers_end_with_the_run(make, fails):
    before = set(multiprocessing.active_children())
    trainer, batches = Trainer(lambda engine, batch: batches.append(batch)), []
    if fails:
        handler = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    data, error = make(Samples(8), 2, num_workers=2), None
    try:
        trainer.run(data, max_iters=3)
    except ZeroDivisionError as raised:
        error = raised  # its traceback holds the frames that hold the iterator
        handler.remove()
    assert (error is not None) is fails

    assert not set(multiprocessing.active_children()) - before
    trainer.run(data, max_iters=6)
    assert len(batches) >= 6
    assert not set(multiprocessing.active_children()) - before


def test_loader_workers_end_with_a_pass_that_is_dealt_out():
    trainer = Trainer(lambda engine, batch: None, global_micro_batches=2)
    trainer.run(loader(Samples(8), 2, num_workers=1), max_epochs=2)

    assert trainer.state.iteration == 4 and multiprocessing.active_children() == []


class Around:
    """Data of a user's around a loader."""

    def __init__(self, data):
        self.loader = data

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.parametrize("around", [lambda data: data, Around])
def test_persistent_workers_outlive_the_run_and_are_asked_again(around):
    before = set(multiprocessing.active_children())
    trainer, batches = Trainer(lambda engine, batch: batches.append(int(batch))), []
    kept = DataLoader([1, 2, 3], batch_size=None, num_workers=1, persistent_workers=True)
    data = around(kept if around is Around else loader([1, 2, 3], num_workers=1, persistent_workers=True))
    workers = set()
    for iterations in (2, 6, 9):
        trainer.run(data, max_iters=iterations)
        workers |= set(multiprocessing.active_children()) - before

    assert batches == [1, 2, 3] * 3 and len(workers) == 1
    for worker in workers:
        worker.terminate()


class Reshuffled(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch + index for index in range(3)])


def test_epoch_of_a_stream_reaches_workers_that_persist():
    trainer, batches = Trainer(lambda engine, batch: batches.append(int(batch))), []
    data = DataLoader(Reshuffled(), batch_size=None, num_workers=1, persistent_workers=True)
    trainer.run(data, max_epochs=3)
    data._iterator._shutdown_workers()

    assert batches == [0, 1, 2, 1, 2, 3, 2, 3, 4]


WITH_WORKERS = {
    "loader": lambda: loader(Samples(6), 2, shuffle=True, num_workers=2),
    "DataLoader": lambda: DataLoader(Samples(6), 2, shuffle=True, num_workers=1),
    "unsized": KINDS["unsized"],
}


@pytest.mark.parametrize("kind", ["loader", pytest.param("DataLoader", marks=pytest.mark.nightly)])
def test_resumes_with_workers_that_have_fetched_ahead(kind, tmp_path):
    made = program([Seen], data=WITH_WORKERS[kind])
    assert_resumes(made, tmp_path, at=(2,), how=["stop", "same process"])


@pytest.mark.parametrize("kind", ["Generated", pytest.param("Counted", marks=pytest.mark.nightly)])
def test_stream_in_workers_goes_on_where_it_was_in_a_second_resume_too(kind, tmp_path):
    """Torchdata counts twice what it has replayed."""
    import tests.data.kinds as kinds
    from ignite_engine.handlers import Checkpoint

    seen = []
    for limit in (2, 3, 5, 12):
        trainer = Trainer(lambda engine, batch: seen.append(batch[0][0, 0].item()))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(StatefulDataLoader(getattr(kinds, kind)(), 1, num_workers=2), max_iters=limit)
        reasons = [each for each in trainer.reproducibility() if "its batches are replayed" in each]
        assert bool(reasons) == (kind == "Generated")

    assert seen == [float(index) for index in range(5) for _ in range(2)] + [0.0, 0.0]
