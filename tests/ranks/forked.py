"""Ranks as processes forked from a child of a fork server: milliseconds each, not an import."""

import os

import torch
import torch.distributed as dist

from ignite_engine.ranks import agreement


def on_ranks(folder, ranks, work):
    """Call ``work(rank)`` on so many gloo ranks, of which this process is the first; the largest exit code.

    Args:
        folder: where the ranks meet.
    """
    torch.set_num_threads(1)
    rank, children = 0, list[int]()
    store = f"file://{folder}/store_{os.getpid()}"
    for other in range(1, ranks):
        if (pid := os.fork()) == 0:
            rank, children = other, []
            break
        children.append(pid)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    work(rank)
    if ranks > 1:
        agreement.wait_for_all()
        agreement.forget_groups()
        dist.destroy_process_group()
    if rank:
        os._exit(0)
    return max((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children), default=0)
