"""Ranks for tests: processes forked from one that has imported torch and the engine, joined in a gloo group.

Multiprocessing's own fork server is that one: it is started by the first test that needs it, and imports once.
"""

import multiprocessing
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ignite_engine.ranks import agreement

TIMEOUT_S = 120
"""For how long a rank waits for its peers: a test whose ranks wait for each other fails soon."""
PRELOADED = [
    *("pytest", "torch.multiprocessing", "torch.distributed.tensor.parallel", "ignite_engine.handlers", __name__),
    "torch._dynamo",  # each process would import it with its first optimizer, for longer than most tests take
]


def on_ranks(ranks, work, folder, *arguments, joined=True):
    """Call ``work(rank, str(folder), *arguments)`` in each of ``ranks`` new processes, and wait for their end.

    Args:
        work: a function of a module.
        folder: where the ranks meet.
        joined: they form a gloo group; else ``work`` makes one, or several.

    Raises:
        torch.multiprocessing.ProcessRaisedException: of the first rank that raised, with its traceback.
        torch.multiprocessing.ProcessExitedException: of the first rank that ended with another exit code than 0.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(
        _rank, (ranks, work, str(folder), arguments, joined, dict(os.environ)), ranks, start_method="forkserver"
    )


def _rank(
    rank,
    ranks,
    work,
    folder,
    arguments,
    joined,
    environment,
):
    os.environ.clear()  # else the one of the test that started the server
    os.environ.update(environment)
    torch.set_num_threads(1)
    if not joined:
        work(rank, folder, *arguments)
        return
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    work(rank, folder, *arguments)
    agreement.forget_groups()
    dist.destroy_process_group()
