"""A run that is resumed on another number of ranks sees each sample of the epoch once, and learns the same."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import agreement
from tests.kit.tiny import Numbers, linear, mse, one
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.slow

SAMPLES = 29


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _train(folder, rank, number, steps, stop_at, size):
    seen = []
    drawn = []
    logged = Lines()
    torch.manual_seed(0)  # as a script that seeds all ranks alike
    logging.getLogger("ignite_engine.data.source").addHandler(logged)

    def update(engine, batch):
        group = list(batch) if steps else [batch]
        real = group[: len(group) - engine.state.padding]
        drawn.append(float(torch.rand(())))
        seen.extend((engine.state.epoch, int(sample)) for each in real for sample in each)

    trainer = Trainer(update, steps)
    checkpoint = Checkpoint(f"{folder}/checkpoints")
    checkpoint.attach(trainer)
    checkpoint.resume()
    if stop_at is not None:

        @trainer.on(Events.ITERATION_COMPLETED(once=stop_at))
        def stop():
            trainer.request_stop("here")
            trainer.vote_at_next_boundary()  # at this very iteration, however fast the machine is

    state = trainer.run(loader(torch.arange(SAMPLES), size, shuffle=True), max_epochs=2)
    report = {"seen": seen, "epoch": state.epoch, "logged": logged.lines, "drawn": drawn, "iteration": state.iteration}
    torch.save(report | {"report": trainer.reproducibility()}, f"{folder}/{number}.{rank}.pt")


def _rank(rank, folder, number, ranks, steps, stop_at, size):
    os.environ["OMP_NUM_THREADS"] = "1"
    store = f"file://{folder}/store{number}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        _train(folder, rank, number, steps, stop_at, size)
    finally:
        dist.destroy_process_group()


def run_on(folder, number, ranks, steps, stop_at, size=2):
    if ranks == 1:
        _train(str(folder), 0, number, steps, stop_at, size)
    else:
        on_ranks(ranks, _rank, folder, number, ranks, steps, stop_at, size, joined=False)
    return [torch.load(folder / f"{number}.{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [
        [(2, 2, 2), (1, 4, None)],
        [(3, None, 2), (2, None, 4), (1, 2, None)],  # twice in one epoch
    ],
    ids=["2 to 1 in other groups", "3 to 2 to 1"],
)
@pytest.mark.row("D17")
def test_each_sample_of_the_epoch_is_seen_once(plan, tmp_path):
    seen = []
    last = {}
    for number, (ranks, steps, stop_at) in enumerate(plan):
        for rank, last in enumerate(run_on(tmp_path, number, ranks, steps, stop_at)):
            assert len(last["logged"]) == int(number > 0 and rank == 0)
            seen += last["seen"]

    assert sorted(seen) == [(epoch, sample) for epoch in (1, 2) for sample in range(SAMPLES)]
    assert last["epoch"] == 2


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_global_batch_stays_and_new_ranks_draw_numbers_of_their_own(tmp_path):
    first = run_on(tmp_path, 0, 1, None, 3, size=6)
    rest = run_on(tmp_path, 1, 3, None, None, size=2)

    seen = [each for report in first + rest for each in report["seen"]]
    assert sorted(seen) == [(epoch, sample) for epoch in (1, 2) for sample in range(SAMPLES)]
    assert rest[0]["iteration"] == 2 * 5, "29 samples in updates of 6"
    for each in rest:
        report = "; ".join(each["report"])
        assert (
            "18 of 29 samples of this pass are consumed, the ranks share the rest, 2 in a batch where it was 6"
            in report
        )
        assert "ranks 1, 2 have random numbers drawn from the checkpoint's and their rank" in report
    drawn = [tuple(each["drawn"]) for each in rest]
    assert len(set(drawn)) == 3 and not set(first[0]["drawn"]) & {number for each in drawn for number in each}


# -- every number of ranks to every other -----------------------------------------------------------------------------

GLOBAL_BATCH, PER_EPOCH = 12, 4
SAMPLES_IN_ALL = 3 * GLOBAL_BATCH + 1
STOPS = {"in mid-epoch": 2, "before the last sample": 3, "at the end of the epoch": PER_EPOCH}


class Indexed(Numbers):
    def __getitem__(self, index):
        return index, *super().__getitem__(index)


def _goes_on(folder, rank, ranks, stop_at=None):
    model = linear()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    update = Update(
        wrapped, optimizer, lambda model, batch: mse(model, batch[1:]), weight_fn=lambda batch: len(batch[0])
    )
    trainer = Trainer(update)
    checkpoint, seen = Checkpoint(folder), list[Any]()
    checkpoint.attach(trainer)
    checkpoint.resume()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        if not trainer.state.padding:
            seen.extend((trainer.state.epoch, int(index)) for index in trainer.state.batch[0])
        if trainer.state.iteration == stop_at:
            trainer.request_stop("here")
            trainer.vote_at_next_boundary()

    state = trainer.run(loader(Indexed(SAMPLES_IN_ALL), GLOBAL_BATCH // ranks, shuffle=True), max_epochs=2)
    return {"seen": seen, "iteration": state.iteration, "status": state.status, "weights": one(model).clone()}


def _each_number(rank, folder):
    torch.set_num_threads(1)
    reports = {}
    for phase in ("first", "rest"):
        for ranks in range(rank + 1, 5):
            if ranks > 1:
                store = f"file://{folder}/{phase}{ranks}"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
            for before in range(1, 5) if phase == "rest" else [ranks]:
                for stop in STOPS:
                    saved, now = Path(folder, f"{before} {stop}"), Path(folder, f"{before} {stop} {ranks}")
                    if phase == "first":
                        reports[ranks, stop] = _goes_on(saved, rank, ranks, STOPS[stop])
                        continue
                    if rank == 0:
                        shutil.copytree(saved, now)
                    agreement.wait_for_all()
                    reports[before, stop, ranks] = _goes_on(now, rank, ranks)
            if ranks > 1:
                agreement.forget_groups()
                dist.destroy_process_group()
    torch.save(reports, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def each_number(tmp_path_factory):
    folder = tmp_path_factory.mktemp("each_number")
    on_ranks(4, _each_number, folder, joined=False)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("before", range(1, 5))
def test_any_number_of_ranks_goes_on_on_any_other(each_number, tmp_path, before, stop):
    whole = _goes_on(tmp_path, 0, 1)
    first = [report[before, stop] for report in each_number[:before]]
    assert {(each["status"], each["iteration"]) for each in first} == {("interrupted", STOPS[stop])}
    for ranks in range(1, 5):
        rest = [report[before, stop, ranks] for report in each_number[:ranks]]
        seen = [each for report in first + rest for each in report["seen"]]
        assert sorted(seen) == [(epoch, sample) for epoch in (1, 2) for sample in range(SAMPLES_IN_ALL)], ranks
        assert {(each["status"], each["iteration"]) for each in rest} == {("completed", 2 * PER_EPOCH)}, ranks
        for each in rest:
            torch.testing.assert_close(each["weights"], whole["weights"], rtol=0, atol=1e-6)
