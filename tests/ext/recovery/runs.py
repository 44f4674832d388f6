"""A small run whose state is copied into memory, on one rank or several, and its copies in this machine's memory."""

import json
import logging
import shutil
import signal
import warnings

import ignite.distributed as idist
import torch
from ignite.engine import Events

from ignite_engine import Parallel
from ignite_engine.handlers import Checkpoint, MetricLogger
from tests.ext.recovery.deaths import Deaths, copies_of
from tests.kit.processes import child, ranks, start_ranks
from tests.kit.sharded import gathered, in_layout
from tests.kit.tiny import linear, numbers_loader, trainer_of

KILLED = -signal.SIGKILL
WORLDS = {"plain": 1, "ddp": 2, "fsdp": 2}
"""The ranks of each layout."""


def train(
    rank,
    folder,
    deaths=(),
    *,
    layout="plain",
    samples=None,
    save_every=8,
    seed=0,
    resume=True,
    prepare=lambda trainer, checkpoint: None,
    **options,
):
    """24 iterations from wherever the run in ``folder`` was: with what it ended, where it began, what was said."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    folder.mkdir(exist_ok=True)
    logger = logging.getLogger("ignite_engine")
    logger.setLevel(logging.INFO)
    said = logging.FileHandler(folder / f"said_{rank}")
    logger.addHandler(said)
    model = linear(dropout=True)
    if layout != "plain":
        model, _ = in_layout(layout, model)
    trainer = trainer_of(model)
    torch.manual_seed(seed + rank)
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    deaths = Deaths(folder, deaths)
    checkpoint = Checkpoint(folder / "checkpoints", **{"memory": 1, **options})
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=save_every))
    try:
        prepare(trainer, checkpoint)
        if resume:
            checkpoint.resume()
        with (folder / f"starts_{rank}").open("a") as file:
            file.write(f"{trainer.state.iteration}\n")
        deaths.attach(trainer)
        trainer.run(numbers_loader(samples or 24 * WORLDS[layout], 2, shuffle=True), max_epochs=2)
    finally:
        logger.removeHandler(said)
    end = {
        "weights": torch.cat([gathered(value.detach()).flatten() for value in model.parameters()]).tolist(),
        "log": (folder / "metrics.jsonl").read_text() if rank == 0 else "",
        "checkpoints": trainer.state.checkpoints,
    }
    (folder / f"end_{rank}").write_text(json.dumps(end))
    return end


def alone(folder, **options):
    """``train`` on one rank in a process of its own, to its end."""
    return child(lambda: train(0, folder, **options))


def supervised(folder, deaths, layout="plain", **options):
    """``train`` on the ranks of a layout, which are forked again after each death."""
    world, backend = (2, "gloo") if WORLDS[layout] == 2 else (None, None)

    def one_rank(local_rank):
        train(idist.get_rank(), folder, deaths, layout=layout, **options)

    def program():
        with Parallel(backend, nproc_per_node=world, restarts=50) as parallel:
            parallel.run(one_rank)

    child(program)


def once(folder, deaths=(), layout="plain", world=None, **options):
    """``train`` on the ranks of a layout, which nobody starts again: their exit codes, negative if killed."""

    def one_rank(rank):
        train(rank, folder, deaths, layout=layout, **options)

    world = world or WORLDS[layout]
    started = start_ranks(world, one_rank, joined=layout != "plain")
    return [each.wait() for each in started]


def whole(folder, layout="plain", world=None, **options):
    """``train`` on ranks that stand ready, to its end."""
    return ranks(world or WORLDS[layout], lambda rank: train(rank, folder, layout=layout, **options))


def starts(folder, rank=0):
    """The iterations at which the run began, start by start."""
    return [int(line) for line in (folder / f"starts_{rank}").read_text().split()]


def ends(folder, layout="plain"):
    return [json.loads((folder / f"end_{rank}").read_text()) for rank in range(WORLDS[layout])]


def said(folder, rank=0):
    return (folder / f"said_{rank}").read_text()


def forget(folder):
    for path in copies_of(folder):
        shutil.rmtree(path)
