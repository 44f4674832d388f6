"""The life of a rank, from joining the others at the store to its exit."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ignite.distributed as idist
import torch.distributed as dist

from ignite_engine import devices
from ignite_engine.errors import LaunchError, PeerFailed, one_line
from ignite_engine.ranks import agreement, signals

Work = Callable[[int], object]
"""The work of a rank, called with its number on this machine; must be picklable."""
_meetings = itertools.count()  # each in the same place on all ranks of torchrun


def is_launched() -> bool:
    """Whether a launcher such as torchrun or SLURM has started this process as one rank of several."""
    return "RANK" in os.environ or (_is_of_srun() and int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def _is_of_srun() -> bool:
    """The shell of ``salloc`` and the script of ``sbatch`` have SLURM's other variables too, and are no ranks."""
    return "SLURM_STEP_ID" in os.environ


def _connect(backend: str, timeout: timedelta | None) -> None:
    """Join the other ranks, as the environment says; ``ignite.distributed`` takes the group over.

    Raises:
        LaunchError: it cannot be.
    """
    for name in ("auto_model", "auto_dataloader"):  # to a logger that is known Ignite gives no handler of its own
        logging.getLogger(f"ignite.distributed.auto.{name}")
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        with signals.stops_go_to(signal.SIG_DFL):
            if (store := _store(options)) is None:  # as torch and Ignite do it, under SLURM for instance
                idist.initialize(backend, **options)
                return
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
            devices.set_current(int(os.environ.setdefault("LOCAL_RANK", "0")), backend)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
            slurm = os.environ.pop("SLURM_JOB_ID", None)  # or Ignite takes SLURM's local rank: 0 on all of torchrun's
            idist.sync()
            if slurm is not None:
                os.environ["SLURM_JOB_ID"] = slurm
    except (dist.DistError, ValueError) as error:
        raise LaunchError(
            f"The ranks cannot meet: {one_line(error)}. See in their logs why one did not come."
        ) from error


def _store(options: dict[str, Any]) -> Any:
    """Where ranks meet that torchrun or this package started, or a process alone; None: it is to be found by torch."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = agreement.STORES.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, **options
        )
        # torch's own rendezvous keeps the keys of all groups in one place: a rank could meet one of them that is dead
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return agreement.STORES.PrefixStore(f"attempt_{attempt}/meeting_{next(_meetings)}", store)
    has_peers = _is_of_srun() or {"RANK", "WORLD_SIZE"} & os.environ.keys()
    return None if has_peers else agreement.STORES.HashStore()


@contextmanager
def joined(backend: str, timeout: timedelta | None) -> Iterator[None]:
    """Within it this process is one of the ranks, as the environment says."""
    with signals.stops_go_to(signals.Ending()):
        _connect(backend, timeout)
        try:
            if agreement.rank() > 0 and logging.lastResort is not None:
                # warnings are for the logs of ranks but the first, if there are any: without, stderr shows errors alone
                logging.lastResort.setLevel(logging.ERROR)
                logging.captureWarnings(True)
            yield
        finally:
            agreement.forget_groups()
            idist.finalize()


# -- a rank that this machine's launcher starts ----------------------------------------------------------------


@dataclass
class Start:
    """What a rank is told by the process that starts it.

    Attributes:
        environment: in which the rank meets the others.
        passes_on: whether the parent passes on the signals that it receives.
        backend: None: there is no process group, and no other rank.
    """

    environment: dict[str, str]
    passes_on: bool
    backend: str | None
    timeout: timedelta | None


def rank_main(local_rank: int, start: Start, work: Work) -> None:
    """The exit status says how it ended: a code, or 1 for an exception, which torch hands to the parent."""
    signals.begin_rank(passed_on=start.passes_on)
    os.environ.update(start.environment)
    if start.backend is not None:
        os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank))
    group = nullcontext() if start.backend is None else joined(start.backend, start.timeout)
    try:
        with signals.stops_go_to(signals.Ending()), group:
            try:
                work(local_rank)
            finally:
                signals.ignore_all()
    except KeyboardInterrupt:  # of which torch would make code 0
        sys.exit(128 + signal.SIGINT)
    except PeerFailed:  # which is in the log; the rank that failed reports why
        sys.exit(1)
