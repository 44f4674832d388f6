"""Contenders in separate, long-lived processes that take turns, so that a slow minute affects all of them."""

from __future__ import annotations

import logging
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

WARMUP_ROUNDS = 2
BEFORE = "@before"


@dataclass
class Measured:
    """What one contender did.

    Args:
        cpu_us: CPU time per micro-batch of each round, in microseconds, in the order of the rounds.
        digest: of the final weights.
        log_lines: lines of the running loss over all rounds of a process.
        processes: that the rounds come from, as many from each, one process after the other.
    """

    setting: str
    name: str
    cpu_us: list[float]
    digest: str
    log_lines: int
    processes: int = 1

    @classmethod
    def joined(cls, runs: Sequence[Measured]) -> Measured:
        """Those of one contender in several processes; the digest is that of each where they differ."""
        first = runs[0]
        digests = dict.fromkeys(run.digest for run in runs)
        cpu_us = [us for run in runs for us in run.cpu_us]
        return cls(first.setting, first.name, cpu_us, " ".join(digests), first.log_lines, len(runs))


class _Worker:
    def __init__(self, setting: str, name: str, micro_batches: int, passes: int, before: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.setting, self.name, self.micro_batches = setting, name, micro_batches
        self.pipe, far_end = context.Pipe()
        arguments = (far_end, setting, name, micro_batches, passes, before)
        self.process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
        # Ctrl-C is handled by the parent, which ends its workers; a child inherits what is ignored here
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        far_end.close()
        self.cpu_us: list[float] = []

    def receive(self) -> object:
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(
                f"Contender {self.name} ({self.setting}) ended early with exit code {self.process.exitcode}; "
                "its traceback is above."
            ) from None

    def one_round(self) -> None:
        self.pipe.send("go")
        seconds = self.receive()
        assert isinstance(seconds, float)
        self.cpu_us.append(seconds / self.micro_batches * 1e6)


def measure(
    contenders: Sequence[tuple[str, str]], micro_batches: int, rounds: int, before: Path | None = None
) -> list[Measured]:
    """Run every ``(setting, name)`` for ``rounds`` rounds of ``micro_batches``, one at a time, in random order.

    A round is an epoch of one single run; between its epochs a contender waits for its turn, which costs no CPU time.
    Two additional rounds at the start are not counted. A name that ends with ``BEFORE`` is measured with the engine
    and the contender of the checkout ``before``.

    Raises:
        RuntimeError: a contender died.
    """
    passes = WARMUP_ROUNDS + rounds
    workers: list[_Worker] = []
    try:
        for setting, name in contenders:
            workers.append(_Worker(setting, name, micro_batches, passes, before))
            if len(workers) % 2 == 0:  # started all at once they would only compete for the cores
                workers[-1].receive()
        for index, worker in enumerate(workers):
            if index % 2 == 0:
                worker.receive()
        order = random.Random(0)
        for _ in range(passes):
            for worker in order.sample(workers, len(workers)):
                worker.one_round()
        measured = []
        for worker in workers:
            digest, log_lines = worker.receive(), worker.receive()
            assert isinstance(digest, str) and isinstance(log_lines, int)
            cpu_us = worker.cpu_us[WARMUP_ROUNDS:]
            measured.append(Measured(worker.setting, worker.name, cpu_us, digest, log_lines))
        return measured
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()


def _work(pipe: Connection, setting: str, name: str, micro_batches: int, passes: int, before: Path | None) -> None:
    if name.endswith(BEFORE):
        sys.path.insert(0, str(before))
        for module in [module for module in sys.modules if module.partition(".")[0] == "benchmarks"]:
            del sys.modules[module]
    import torch

    from benchmarks.contenders import CONTENDERS
    from benchmarks.workload import build, weights_digest

    torch.set_num_threads(1)
    # handlers that are never due and a schedule beyond the end are what is measured, and each is warned of
    logging.disable(logging.WARNING)
    since: float | None = None

    def gate() -> None:
        nonlocal since
        if since is None:
            pipe.send("ready")
        else:
            pipe.send(time.process_time() - since)
        pipe.recv()
        since = time.process_time()

    work = build(micro_batches, passes, gate)
    CONTENDERS[setting][name.removesuffix(BEFORE)](work)
    assert since is not None
    pipe.send(time.process_time() - since)
    pipe.send(weights_digest(work.model))
    pipe.send(len(work.log))
    pipe.recv()  # terminated here: its own exit would disturb another's round
