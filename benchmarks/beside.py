"""The time of an iteration of a run that something else goes on beside: each run in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.handlers import Checkpoint

EVERY = 50
"""Iterations from save to save; the first ones are not counted."""
CORES = sorted(os.sched_getaffinity(0))


def model_of(mib: float) -> nn.Module:
    """A model whose checkpoint has about that size: AdamW holds two more of each weight."""
    width = max(8, round((mib * 2**20 / 4 / 3) ** 0.5))
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def width_of(model: nn.Module) -> int:
    return next(model.parameters()).shape[1]


def timed_run(directory: Path, iterations: int, mib: float, **options: Any) -> dict[str, float]:
    """Train on the first core, all other threads on the second; seconds of an iteration, its save not counted."""
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pin(os.getpid(), 0)
    keep_freed_memory()
    model = model_of(mib)
    update = Update(
        model, torch.optim.AdamW(model.parameters(), fused=True), lambda model, batch: model(batch).square().mean()
    )
    trainer = Trainer(update)
    checkpoint = Checkpoint(directory, keep_last=1, save_at_end=False, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=EVERY))
    took: list[float] = []
    began = 0.0

    def start() -> None:
        nonlocal began
        for thread in map(int, os.listdir("/proc/self/task")):  # those that upload
            if thread != os.getpid():
                pin(thread, 1)
        began = time.perf_counter()

    def end() -> None:
        took.append(time.perf_counter() - began)
        if len(took) == iterations:  # what is still uploaded is not waited for
            counted = took[EVERY:]
            write(directory, {"mean": fmean(counted), "median": median(counted)})
            os._exit(0)

    trainer.add_event_handler(Events.ITERATION_STARTED, start)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, end)
    batches = [torch.randn(32, width_of(model)) for _ in range(4)]
    trainer.run([batches[index % 4] for index in range(iterations)], max_epochs=1)
    raise AssertionError("the last iteration ends the process")


def keep_freed_memory() -> None:
    """Let glibc give nothing back to the system.

    Otherwise each iteration gets the memory of its gradients anew, page by page, unless something beside training has
    allocated above it: an upload made an iteration up to 1.7 times as fast.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(parameter, 1 << 30)


def pin(thread: int, core: int) -> None:
    """Keep a thread on the first or the second core, where there are two."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, {CORES[core % len(CORES)]})


def write(directory: Path, found: dict[str, float]) -> None:
    directory.with_suffix(".json").write_text(json.dumps(found))


def in_child(work: Callable[[], object]) -> int:
    """Start work in a forked process; its id. Nobody waits for its threads."""
    if process := os.fork():
        return process
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(1)


def measured(directory: Path, iterations: int, mib: float, **options: Any) -> dict[str, float]:
    """What :func:`timed_run` finds in a process of its own."""
    process = in_child(lambda: timed_run(directory, iterations, mib, **options))
    _, status = os.waitpid(process, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"A run of the benchmark ended with code {code}.")
    found: dict[str, float] = json.loads(directory.with_suffix(".json").read_text())
    return found
