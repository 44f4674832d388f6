"""Trains with workers, saves beside training, is stopped by SIGTERM, and goes on; on one rank, then on two."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from ignite_engine import fit
from ignite_engine.errors import Interrupted
from ignite_engine.ranks.launch import Parallel


class Stop:
    def attach(self, trainer):
        from ignite.engine import Events

        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: os.kill(os.getpid(), signal.SIGTERM))


def trained(folder, handlers=(), workers=0):
    torch.manual_seed(0)
    data = (torch.arange(48.0).reshape(16, 3) / 48, torch.arange(16.0).reshape(16, 1) / 16)
    return fit(
        nn.Linear(3, 1), lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), data,
        directory=folder, max_epochs=2, batch_size=2, num_workers=workers, handlers=handlers,
        checkpoint={"every": 2, "background": True}, logging={"every": 2},
    )  # fmt: skip


def on_two(local_rank, folder):
    trained(folder)


if __name__ == "__main__":
    assert not Path("/proc/self/status").exists() and not hasattr(signal, "SIGRTMAX")
    folder = sys.argv[1]
    try:
        trained(f"{folder}/one", [Stop()], workers=1)
    except Interrupted as stop:
        assert stop.code == 143
    else:
        raise AssertionError("it was not stopped")
    trained(f"{folder}/one", workers=1)
    with Parallel("gloo", nproc_per_node=2) as parallel:
        parallel.run(on_two, f"{folder}/two")
    print(json.dumps([json.loads(Path(folder, name, "summary.json").read_text())["status"] for name in ("one", "two")]))
