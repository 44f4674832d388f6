"""Runs with ``global_micro_batches`` on any number of ranks, in children of a fork server."""

import logging
from pathlib import Path

import torch
from ignite.engine import Events
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import agreement
from tests.kit.tiny import Numbers, linear, mse
from tests.ranks.forked import on_ranks

MODULES = ("tests.ranks.shares_runs",)


def start(folder, ranks, function, *arguments):
    """Call a function of this module on so many ranks; what it returns is saved by rank."""

    def work(rank):
        torch.save(FUNCTIONS[function](Path(folder), *arguments), f"{folder}/{rank}.pt")

    return on_ranks(Path(folder), ranks, work)


def see(folder, samples, stop_at, drop_last, workers):
    """The samples of each of this rank's micro-batches that counts, by iteration, and what was logged."""
    seen = []
    lines = []
    watch = logging.Handler(logging.WARNING)
    watch.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ignite_engine.data.source").addHandler(watch)

    def update(engine, batch):
        real = batch[: len(batch) - engine.state.padding]
        seen.append((engine.state.epoch, engine.state.iteration, [each.tolist() for each in real]))

    trainer = Trainer(update, global_micro_batches=5)
    checkpoint = Checkpoint(folder.parent / "checkpoints")
    checkpoint.attach(trainer)
    checkpoint.resume()
    if stop_at is not None:

        @trainer.on(Events.ITERATION_COMPLETED(once=stop_at))
        def stop():
            trainer.request_stop("here")
            trainer.vote_at_next_boundary()

    data = loader(torch.arange(samples), 2, shuffle=True, drop_last=drop_last, num_workers=workers)
    trainer.run(data, max_epochs=2)
    return {"seen": seen, "lines": lines}


def learn(folder):
    """Weights and losses with the ordinary update."""
    torch.manual_seed(3)
    model = linear(dtype=torch.float64)
    wrapped = DistributedDataParallel(model) if agreement.world_size() > 1 else model
    update = Update(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), mse, weight_fn=lambda batch: len(batch[0]))
    trainer = Trainer(update, global_micro_batches=5)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output["loss"]))
    trainer.run(loader(Numbers(23, dtype=torch.float64), 2, shuffle=True), max_epochs=2)
    return {
        "model": model.state_dict(),
        "losses": [agreement.mean_of(column) for column in zip(*agreement.gather_floats(list(map(float, losses))))],
    }


FUNCTIONS = {"see": see, "learn": learn}
