"""Saves in the background of one training run: the part of ``benchmarks.save_and_load`` in which training goes on."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ignite.engine import Events
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.machine import installed
from benchmarks.turns import Times
from benchmarks.workload import Training, tensors_of
from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.events import Phase
from ignite_engine.handlers import Checkpoint

QUIET_ITERATIONS = 3  # at least, with each save
NOTHING, COPY, OURS = "nothing", "memory copy", "ours"

Done = Callable[[], None]
Begin = Callable[[Path, Done], Callable[[], object] | None]
"""Starts a save into a folder at a step boundary, and calls ``Done`` from whatever thread when it is complete. Returns
what has to be waited for before the optimizer steps, if anything has to be."""


class Contenders:
    """The saves by name, with what they keep from one save to the next."""

    def __init__(self, training: Training, scratch: Path) -> None:
        self.training = training
        self._stagers: dict[str, DefaultStager] = {}
        self._buffers: list[Tensor] = []
        self._lightning: Any = None
        self._store = scratch / "store"
        self.begin: dict[str, Begin] = {
            NOTHING: self.nothing,
            COPY: self.memory_copy,
            "DCP async, thread": self.dcp("thread", in_thread=False),
            "DCP async, staged in a thread": self.dcp("staged", in_thread=True),
            "DCP async, process": self.dcp("process", in_thread=False, process=True),
        }
        if installed("lightning"):
            self.begin["Lightning AsyncCheckpointIO"] = self.lightning
        # a process group of one: the process that DCP starts asks for its rank
        dist.init_process_group("gloo", init_method=f"file://{self._store}", rank=0, world_size=1)

    def close(self) -> None:
        for stager in self._stagers.values():
            stager.close()
        if self._lightning is not None:
            self._lightning.teardown()
        dist.destroy_process_group()

    def nothing(self, folder: Path, done: Done) -> None:
        done()

    def memory_copy(self, folder: Path, done: Done) -> None:
        """Into memory that is kept."""
        tensors = tensors_of(self.training.state())
        if not self._buffers:
            self._buffers = [torch.empty_like(tensor) for tensor in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor)
        done()

    def dcp(self, name: str, *, in_thread: bool, process: bool = False) -> Begin:
        """With a stager that is kept; the one that caches (``BlockingAsyncStager``) needs an accelerator."""

        def begin(folder: Path, done: Done) -> Callable[[], object] | None:
            if name not in self._stagers:
                self._stagers[name] = DefaultStager(StagingOptions(False, process, in_thread, False))
            found = dcp.async_save(  # type: ignore[attr-defined]  # torch hides it
                self.training.state(),
                checkpoint_id=folder / "dcp",
                async_stager=self._stagers[name],
                async_checkpointer_type=AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD,
                no_dist=not process,
            )
            staged: Future[Any] | None = None
            if isinstance(found, AsyncSaveResponse):
                staged, found = found.staging_completion, found.upload_completion

            def ended(future: Future[Any]) -> None:
                future.result()
                done()

            found.add_done_callback(ended)
            return None if staged is None else staged.result

        return begin

    def lightning(self, folder: Path, done: Done) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        class Reporting(TorchCheckpointIO):  # type: ignore[misc]  # optional, so its types are not there
            def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
                super().save_checkpoint(checkpoint, path, storage_options)
                self.done()

        if self._lightning is None:
            self._lightning = AsyncCheckpointIO(Reporting())
        self._lightning.checkpoint_io.done = done
        self._lightning.save_checkpoint(self.training.state(), folder / "state.ckpt")


@dataclass(frozen=True)
class Measured:
    """Seconds by contender and round.

    Attributes:
        stall: the step boundary, and the wait before the optimizer's step.
        complete: from the step boundary until the save is complete.
        copying: extra time of the save's own iteration.
        after: extra time of the iterations after it, while the save goes on.
        deleting: of what the save wrote, in no other figure.
    """

    stall: Times
    complete: Times
    copying: Times
    after: Times
    deleting: Times


@dataclass
class _Turn:
    name: str
    began: float
    folder: Path
    ended: float | None = None
    stall: float = 0.0
    iterations: list[float] = field(default_factory=list)
    wait: Callable[[], object] | None = None
    deleting: float = 0.0

    def done(self) -> None:
        self.ended = time.perf_counter()

    def delete(self) -> None:
        """All checkpoints; not the folder, which ours has locked."""
        began = time.perf_counter()
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif self.name != OURS:
                path.unlink()
        self.deleting = time.perf_counter() - began


def background(training: Training, rounds: int, directory: Path) -> Measured:
    """Train, and save in turn by each contender; the first round is not counted."""
    contenders = Contenders(training, directory)
    try:
        turns = _train(training, contenders, rounds, directory)
    finally:
        contenders.close()
    counted = {name: each[1:] for name, each in turns.items()}
    quiet = median(seconds for turn in counted[NOTHING] for seconds in turn.iterations)
    del counted[NOTHING]

    def of(value: Callable[[_Turn], float]) -> Times:
        return {name: [value(turn) for turn in each] for name, each in counted.items()}

    complete = of(lambda turn: (turn.ended or 0.0) - turn.began)
    del complete[COPY]
    return Measured(
        stall=of(lambda turn: turn.stall),
        complete=complete,
        copying=of(lambda turn: turn.iterations[0] - quiet),
        after=of(lambda turn: sum(turn.iterations[1:]) - quiet * len(turn.iterations[1:])),
        deleting=of(lambda turn: turn.deleting),
    )


def _train(training: Training, contenders: Contenders, rounds: int, directory: Path) -> dict[str, list[_Turn]]:
    """A turn is a save at a step boundary, and the iterations until it is complete; then its files are deleted."""
    trainer = Trainer(Update(training.model, training.optimizer, training.loss_fn))
    ours = directory / "ours"
    checkpoint = Checkpoint(ours, background=True, save_at_end=False)
    checkpoint.attach(trainer, Events.COMPLETED)  # and whenever `choose` calls it
    names = [*contenders.begin, OURS]
    order = [name for _ in range(rounds + 1) for name in random.sample(names, len(names))]
    turns: dict[str, list[_Turn]] = {name: [] for name in names}
    current: _Turn | None = None
    previous: Path | None = None
    rest = QUIET_ITERATIONS
    boundary = wait_began = 0.0
    stall = 0.0

    def boundary_begins() -> None:
        """An iteration starts with the step boundary before it: a save's own iteration follows its boundary."""
        nonlocal boundary, stall
        now = time.perf_counter()
        if current is not None:
            if not current.iterations:
                current.stall = stall
            current.iterations.append(now - boundary)
        boundary, stall = now, 0.0

    def choose() -> None:
        nonlocal current, rest, previous
        if current is not None:
            announced = current.name != OURS or trainer.state.checkpoint_path != previous
            if len(current.iterations) < QUIET_ITERATIONS or current.ended is None or not announced:
                return
            current.delete()
            current, rest = None, 1  # the iteration that holds the deletion
        elif rest:
            rest -= 1
        elif order:
            folder = Path(tempfile.mkdtemp(dir=directory))
            current = _Turn(order.pop(), boundary, folder)
            turns[current.name].append(current)
            if current.name == OURS:
                current.folder, previous = ours, trainer.state.checkpoint_path
                checkpoint(trainer)
                threading.Thread(target=_watch, args=(ours, current.done), daemon=True).start()
        else:
            trainer.terminate()

    def save() -> None:
        if current is not None and not current.iterations and current.name != OURS:
            current.wait = contenders.begin[current.name](current.folder, current.done)

    def boundary_ends() -> None:
        nonlocal stall
        stall += time.perf_counter() - boundary

    def wait_begins() -> None:
        nonlocal wait_began
        wait_began = time.perf_counter()
        if current is not None and current.wait is not None:
            current.wait()
            current.wait = None

    def wait_ends() -> None:
        nonlocal stall
        stall += time.perf_counter() - wait_began

    trainer.add_event_handler(Events.ITERATION_COMPLETED, _in_phase(Phase.PREPARE, boundary_begins))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, choose)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, save)
    trainer.add_event_handler(Events.GET_BATCH_STARTED, _in_phase(Phase.PREPARE, boundary_ends))
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, _in_phase(Phase.PREPARE, wait_begins))
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, wait_ends)
    trainer.run(training.batches, max_epochs=10**6)
    return turns


def _watch(folder: Path, done: Done) -> None:
    """The engine says that a save has ended at the next step boundary only; on the disk it is seen at once."""
    store = CheckpointStore(folder)
    while not store.checkpoints():
        time.sleep(0.001)
    done()


def _in_phase(phase: Phase, function: Callable[[], None]) -> Callable[[], None]:
    function.phase = phase  # type: ignore[attr-defined]  # read by the bus
    return function
