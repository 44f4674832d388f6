"""A run that is resumed on another number of ranks sees each sample of the epoch once."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ignite.engine import Events

from ignite_engine import Trainer, loader
from ignite_engine.handlers import Checkpoint

SAMPLES = 29


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _train(folder: str, rank: int, number: int, steps: int | None, stop_at: int | None, size: int) -> None:
    seen: list[Any] = []
    drawn: list[float] = []
    logged = Lines()
    torch.manual_seed(0)  # as a script that seeds all ranks alike
    logging.getLogger("ignite_engine.data.source").addHandler(logged)

    def update(engine: Any, batch: Any) -> None:
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
        def stop() -> None:
            trainer.request_stop("here")
            trainer.vote_at_next_boundary()  # at this very iteration, however fast the machine is

    state = trainer.run(loader(torch.arange(SAMPLES), size, shuffle=True), max_epochs=2)
    report = {"seen": seen, "epoch": state.epoch, "logged": logged.lines, "drawn": drawn, "iteration": state.iteration}
    torch.save(report | {"report": trainer.reproducibility()}, f"{folder}/{number}.{rank}.pt")


def _rank(rank: int, folder: str, number: int, ranks: int, steps: int | None, stop_at: int | None, size: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    store = f"file://{folder}/store{number}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        _train(folder, rank, number, steps, stop_at, size)
    finally:
        dist.destroy_process_group()


def run_on(
    folder: Path, number: int, ranks: int, steps: int | None, stop_at: int | None, size: int = 2
) -> list[dict[str, Any]]:
    if ranks == 1:
        _train(str(folder), 0, number, steps, stop_at, size)
    else:
        mp.spawn(_rank, args=(str(folder), number, ranks, steps, stop_at, size), nprocs=ranks)
    return [torch.load(folder / f"{number}.{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [
        [(1, None, 3), (4, None, None)],
        [(1, None, 14), (4, None, None)],  # one sample is left for four ranks
        [(2, 2, 2), (1, 4, None)],
        [(3, None, 2), (2, None, 4), (1, 2, None)],  # twice in one epoch
    ],
    ids=["1 to 4", "1 to 4 at the last batch", "2 to 1 in other groups", "3 to 2 to 1"],
)
def test_each_sample_of_the_epoch_is_seen_once(plan: list[tuple[int, int | None, int | None]], tmp_path: Path) -> None:
    seen: list[Any] = []
    last: dict[str, Any] = {}
    for number, (ranks, steps, stop_at) in enumerate(plan):
        for rank, last in enumerate(run_on(tmp_path, number, ranks, steps, stop_at)):
            assert len(last["logged"]) == int(number > 0 and rank == 0)
            seen += last["seen"]

    assert sorted(seen) == [(epoch, sample) for epoch in (1, 2) for sample in range(SAMPLES)]
    assert last["epoch"] == 2


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_global_batch_stays_and_new_ranks_draw_numbers_of_their_own(tmp_path: Path) -> None:
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
