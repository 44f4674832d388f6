"""What a rank does from its first line to its end: it meets the others, at the store, within torchrun's attempt."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ignite.distributed as idist
import torch.distributed as dist

from ignite_engine import devices
from ignite_engine.errors import LaunchError, PeerFailed
from ignite_engine.ranks import agreement, signals

logger = logging.getLogger(__name__)

Work = Callable[[int], object]
"""What a rank does, called with its number on this machine; pickle carries it."""
_meetings = itertools.count()  # each in the same place on all ranks of torchrun

_FIRST_POLL_S, _POLL_S = 0.001, 0.02


def is_launched() -> bool:
    """Whether a launcher such as torchrun or SLURM has started this process as one rank of several."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1


def connect(backend: str, init_method: str | None, timeout: timedelta | None) -> Any:
    """Join the other ranks, as the environment says; ``ignite.distributed`` takes the group over.

    Returns:
        Under torchrun the store of this attempt of its ranks, else None.

    Raises:
        LaunchError: it cannot be.
        SystemExit: torchrun has started ranks again that all of them had ended for good.
    """
    for name in ("auto_model", "auto_dataloader"):  # to a logger that is known Ignite gives no handler of its own
        logging.getLogger(f"ignite.distributed.auto.{name}")
    if dist.is_initialized():
        raise LaunchError(
            "This process has a process group already, of another Parallel or of its own: call the function without "
            "Parallel, or destroy the group before."
        )
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    with signals.killing_the_process(), one_line_where_they_cannot_meet():
        store = _store(options) if init_method in (None, "env://") else None
        if store is None:  # as torch and Ignite do it, under SLURM for instance
            idist.initialize(backend, init_method=init_method, **options)
            return None
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
        try:
            devices.set_current(local_rank, backend)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
        slurm = os.environ.pop("SLURM_JOB_ID", None)  # or Ignite takes SLURM's local rank: 0 on all of torchrun's
        idist.sync()
        if slurm is not None:
            os.environ["SLURM_JOB_ID"] = slurm
    return store if "TORCHELASTIC_RUN_ID" in os.environ else None


def _store(options: dict[str, Any]) -> Any:
    """Where ranks meet that torchrun or this module started, or a process alone; None: it is to be found by torch."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _check_agent_lives()
        store = agreement.STORES.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, **options
        )
        # torch's own rendezvous keeps the keys of all groups in one place: a rank could meet one of them that is dead
        store = agreement.STORES.PrefixStore(f"meeting_{next(_meetings)}", store)
        rank = int(os.environ["RANK"])
        attempt = part_of_this_attempt(store, rank, int(os.environ["WORLD_SIZE"]))
        _end_as_before(attempt, rank)
        return attempt
    return None if {"RANK", "WORLD_SIZE", "SLURM_JOB_ID"} & os.environ.keys() else agreement.STORES.HashStore()


def part_of_this_attempt(store: Any, rank: int, world_size: int) -> Any:
    """The part of a store that ranks of torchrun's earlier attempts do not know.

    Each of torchrun's agents counts restarts for itself, so the count is no name for an attempt. Rank 0 draws a name. A
    rank asks for it under a name of its own, new in each attempt, so that it is not answered by a rank 0 that is dead.

    Raises:
        LaunchError: a rank has not asked within the store's timeout; rank 0 names it.
    """
    name = secrets.token_hex(8)
    if rank > 0:
        store.set(f"question_{rank}", name)
        attempt = store.get(f"answer_{name}").decode()
        store.set(f"{attempt}/rank_{rank}", "")
        return agreement.STORES.PrefixStore(attempt, store)
    missing, deadline = list(range(1, world_size)), time.monotonic() + store.timeout.total_seconds()
    pause_s = _FIRST_POLL_S
    while missing:
        for other_rank in missing:
            if store.check([f"question_{other_rank}"]):  # it may be that of a dead rank: another one will follow
                store.set(f"answer_{store.get(f'question_{other_rank}').decode()}", name)
        missing = [other_rank for other_rank in missing if not store.check([f"{name}/rank_{other_rank}"])]
        if missing and time.monotonic() >= deadline:
            ranks = ", ".join(map(str, missing))
            raise LaunchError(
                f"The ranks cannot meet: of {world_size} ranks these did not come within "
                f"{store.timeout.total_seconds():g} s: {ranks}. See why in their logs."
            )
        time.sleep(pause_s if missing else 0.0)
        pause_s = min(2 * pause_s, _POLL_S)
    attempt = agreement.STORES.PrefixStore(name, store)
    attempt.set("code_before", str(_code_of_last_attempt(store)))
    store.set("last_attempt", f"{name} {world_size}")
    return attempt


def _code_of_last_attempt(store: Any) -> int:
    """With which all ranks of torchrun's attempt before this one have ended for good; 0: they have not."""
    if not store.check(["last_attempt"]):
        return 0
    name, ranks = store.get("last_attempt").decode().split()
    last, keys = agreement.STORES.PrefixStore(name, store), [f"code_{rank}" for rank in range(int(ranks))]
    return max(int(last.get(key)) for key in keys) if last.check(keys) else 0


def _end_as_before(attempt: Any, rank: int) -> None:
    """torchrun starts its ranks again after any code but 0, also where they were stopped: then they end at once.

    Raises:
        SystemExit: with the code of the attempt before this one.
    """
    if not (code := int(attempt.get("code_before"))):
        return
    if rank == 0:
        logger.warning(
            "torchrun has started the ranks again, which had all ended with code %d (%s): they end at once. "
            "--max-restarts is for ranks that fail; a signal to torchrun itself starts none again.",
            *(code, "wrong config or arguments" if code == 2 else "a stop"),
        )
    sys.exit(code)


def _check_agent_lives() -> None:
    """Refuse to wait for torchrun's store where nobody listens: it was there before its ranks, so it is gone.

    A rank whose torchrun was killed before the rank's first line cannot know that by its parent's process id.

    Raises:
        LaunchError: the port is closed, 3 s long.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for _ in range(30):
        try:
            socket.create_connection((address, port), timeout=3.0).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)
        except OSError:  # torch's own attempt says why
            return
    raise LaunchError(f"The ranks cannot meet at {address}, port {port}: torchrun, which listened there, is gone.")


def disconnect() -> None:
    agreement.forget_groups()
    idist.finalize()


@contextmanager
def warnings_said_once() -> Iterator[None]:
    """Ranks but the first leave warnings to their logs, if there are any; without, errors alone are on stderr."""
    last = logging.lastResort
    if agreement.rank() == 0 or last is None:
        yield
        return
    level = last.level
    last.setLevel(logging.ERROR)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        last.setLevel(level)


@contextmanager
def one_line_where_they_cannot_meet(address: str | None = None, port: int | None = None) -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        where = f"{address or os.environ.get('MASTER_ADDR')}, port {port or os.environ.get('MASTER_PORT')}"
        in_use = "EADDRINUSE" in str(error)
        reason = "the port is in use" if in_use else str(error).splitlines()[0].rstrip(".")
        remedy = "end what uses it, or give another port (master_port, or MASTER_PORT)"
        raise LaunchError(f"The ranks cannot meet at {where}: {reason}{'; ' + remedy if in_use else ''}.") from error


# -- a rank that this machine's launcher starts ----------------------------------------------------------------


@dataclass
class Start:
    """What a rank is told by the process that starts it.

    It is the first of our own objects that a rank unpickles, after its imports: there it lets signals in, which the
    parent blocks for the processes it starts, or an import would end with a traceback.

    Attributes:
        environment: in which the rank meets the others.
        starter: its process id; None: that of multiprocessing's fork server, which only the rank can see. A parent that
            was killed before the rank's first line is not the rank's parent there any more.
        passes_on: whether it passes on the signals that it receives.
        backend: None: there is no process group.
    """

    environment: dict[str, str]
    starter: int | None
    passes_on: bool
    backend: str | None
    init_method: str | None
    timeout: timedelta | None

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        signals.begin_rank(passed_on=self.passes_on)


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        code: for the parent to exit with; None: it raised, or was killed.
        at: seconds since the epoch.
        traceback: of what it raised.
        interrupted: a signal ended it, outside of training; peers may wait for it to connect, which no error ends.
    """

    code: int | None
    at: float
    traceback: str = ""
    interrupted: bool = False


def rank_main(start: Start, report: Any, work: Work) -> None:
    signals.begin_rank(passed_on=start.passes_on)  # a forked rank has unpickled nothing
    os.environ.update(start.environment)
    code: int | None = 0
    text = ""
    ending = signals.Ending()
    try:
        with ending, signals.listening(start.starter or os.getppid()):
            if start.backend is not None:
                connect(start.backend, start.init_method, start.timeout)
            try:
                with warnings_said_once():
                    work(int(os.environ.get("LOCAL_RANK", "0")))
            finally:
                signals.ignore_all()
                agreement.forget_groups()
            idist.finalize()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except PeerFailed as error:  # which is in the log; the rank that failed reports why
        code = error.code
    except Exception:
        code, text = None, traceback.format_exc()
    # a code is not the process's own exit status: none of its peers is ended because of it, they may be saving
    with suppress(OSError):  # the parent is gone
        report.send(End(code, time.time(), text, ending.raised_at is not None))
    if code is None:
        sys.exit(1)
