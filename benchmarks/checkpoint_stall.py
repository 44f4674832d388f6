"""What a checkpoint of ~50M parameters with AdamW state costs the training loop: the stall, and all time lost.

    python -m benchmarks.checkpoint_stall [--rounds N] [--width 2048] [--threads 1] [--directory DIR] [--json PATH]

One process, one training run. In each round every contender saves once, in random order; between two saves
training continues until the first is on disk. See ``benchmarks/README.md`` for how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn

from benchmarks.overhead import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine import Phase, Trainer, TrainingEvents, Update
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.handlers import Checkpoint

QUIET_ITERATIONS = 4  # at least, after each save
OURS, COPY = "ours, background", "memory copy"
STALL_GOAL, COPYING_GOAL = 0.1, 1.3


class Contenders:
    """The saves, by name; each is called at a step boundary and returns a function that says whether it has ended."""

    def __init__(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.directory, self.model, self.optimizer = directory, model, optimizer
        self._buffers: list[Tensor] = []
        self._stager: Any = None

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def nothing(self) -> Callable[[], bool]:
        return _ended

    def memory_copy(self) -> Callable[[], bool]:
        tensors = _tensors(self.state())
        if not self._buffers:
            self._buffers = [torch.empty_like(tensor) for tensor in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return _ended

    def torch_save(self) -> Callable[[], bool]:
        torch.save(self.state(), self.directory / "torch.pt")
        return _ended

    def ignite(self) -> Callable[[], bool]:
        from ignite.handlers import DiskSaver
        from ignite.handlers.checkpoint import Checkpoint as IgniteCheckpoint

        saver = DiskSaver(self.directory / "ignite", create_dir=True, require_empty=False)
        IgniteCheckpoint({"model": self.model, "optimizer": self.optimizer}, saver, n_saved=1)(self.trainer)
        return _ended

    def dcp(self) -> Callable[[], bool]:
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(self.directory / "dcp", ignore_errors=True)
        with warnings.catch_warnings(action="ignore"):  # that torch.distributed is not initialized, which is intended
            dcp.save(self.state(), checkpoint_id=self.directory / "dcp", no_dist=True)  # type: ignore[attr-defined]
        return _ended

    def store(self) -> Callable[[], bool]:
        store = CheckpointStore(self.directory / "ours")
        shutil.rmtree(store.directory, ignore_errors=True)
        store.save(self.state(), {}, iteration=1, epoch=1)
        return _ended

    trainer: Trainer


@dataclass(frozen=True)
class Measured:
    """Seconds by contender and round; and the bytes of the state.

    Attributes:
        stall: the step boundary, and the wait before the optimizer's step.
        copying: extra time of the save's own iteration. Ours copies in it, the others do everything.
        after: extra time of the iterations after it until the save has ended. Ours hashes and writes.
    """

    stall: dict[str, list[float]]
    copying: dict[str, list[float]]
    after: dict[str, list[float]]
    bytes: int


def measure(rounds: int, width: int, directory: Path) -> Measured:
    """Train, and save in turn by each contender; the first round is not counted."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(width, width), nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    trainer = Trainer(Update(model, optimizer, lambda model, batch: model(batch).square().mean()))
    contenders = Contenders(directory, model, optimizer)
    contenders.trainer = trainer
    checkpoint = Checkpoint(directory / "background", keep_last=1, background=True)
    checkpoint.attach(trainer, Events.COMPLETED)  # and whenever `choose` calls it

    def ours() -> Callable[[], bool]:
        before = trainer.state.checkpoint_path
        return lambda: trainer.state.checkpoint_path != before

    saves: dict[str, Callable[[], Callable[[], bool]]] = {
        "nothing": contenders.nothing,
        COPY: contenders.memory_copy,
        OURS: ours,
        "ours, waited for": contenders.store,
        "torch.save": contenders.torch_save,
        "Ignite Checkpoint": contenders.ignite,
        "DCP": contenders.dcp,
    }
    order = [name for _ in range(rounds + 1) for name in random.sample(list(saves), len(saves))]
    clock = _Clock(trainer)
    stalls: dict[str, list[float]] = {name: [] for name in saves}
    spans: dict[str, list[list[float]]] = {name: [] for name in saves}
    current: list[Any] = ["", _ended]

    @trainer.on(Events.ITERATION_COMPLETED)
    def choose() -> None:
        """Start the next contender's turn when the previous save is on disk and enough iterations have passed."""
        iterations = spans[current[0]][-1] if current[0] else []
        if trainer.state.iteration < 3 or (current[0] and not (len(iterations) >= QUIET_ITERATIONS and current[1]())):
            return
        if not order:
            trainer.terminate()
            return
        current[0] = order.pop()
        spans[current[0]].append([])
        if current[0] == OURS:
            current[1] = ours()
            checkpoint(trainer)

    @trainer.on(TrainingEvents.RESUME_POINT)
    def save() -> None:
        if current[0] and not spans[current[0]][-1] and current[0] != OURS:
            current[1] = saves[current[0]]()

    def account(iteration_s: float, stall_s: float) -> None:
        if current[0]:
            if not spans[current[0]][-1]:
                stalls[current[0]].append(stall_s)
            spans[current[0]][-1].append(iteration_s)

    clock.listener = account
    batches = [torch.randn(32, width) for _ in range(8)]
    trainer.run(batches, max_epochs=10**6)
    quiet = median(seconds for span in spans["nothing"][1:] for seconds in span)
    return Measured(
        stall={name: each[1:] for name, each in stalls.items()},
        copying={name: [span[0] - quiet for span in each[1:]] for name, each in spans.items()},
        after={name: [sum(span[1:]) - quiet * len(span[1:]) for span in each[1:]] for name, each in spans.items()},
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in _tensors(contenders.state())),
    )


class _Clock:
    """Reports for each iteration, from one step boundary to the next, its duration and how long a save stalled it."""

    def __init__(self, trainer: Trainer) -> None:
        self.listener: Callable[[float, float], None] = lambda *_: None
        self._boundary = self._wait = time.perf_counter()
        self._stall = 0.0
        trainer.add_event_handler(Events.ITERATION_COMPLETED, _handler(self.boundary_begins, Phase.PREPARE))
        trainer.add_event_handler(Events.GET_BATCH_STARTED, _handler(self.boundary_ends, Phase.PREPARE))
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, _handler(self.wait_begins, Phase.PREPARE))
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, _handler(self.wait_ends, Phase.OTHER))

    def boundary_begins(self) -> None:
        """An iteration starts with the step boundary before it: a save's own iteration follows its boundary."""
        now = time.perf_counter()
        self.listener(now - self._boundary, self._stall)
        self._boundary, self._stall = now, 0.0

    def boundary_ends(self) -> None:
        self._stall += time.perf_counter() - self._boundary

    def wait_begins(self) -> None:
        self._wait = time.perf_counter()

    def wait_ends(self) -> None:
        self._stall += time.perf_counter() - self._wait


def _handler(function: Callable[[], None], phase: Phase) -> Callable[[], None]:
    def handler() -> None:
        function()

    handler.phase = phase  # type: ignore[attr-defined]  # read by the bus
    return handler


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def _ended() -> bool:
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_stall", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=2048, help="of 12 linear layers; 2048: 50M parameters")
    parser.add_argument("--threads", type=int, default=1, help="for computation")
    parser.add_argument("--directory", type=Path, help="to save in; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(options.rounds, options.width, Path(folder))
    print(f"{machine()}\n{options.rounds} rounds, {found.bytes / 2**20:.0f} MiB of state, {os.cpu_count()} cores\n")
    print(f"{'':<20}{'stall ms':>10}{'to the copy [95 %]':>24}{'lost in its own iteration ms':>30}{'after it ms':>13}")
    copy = found.stall[COPY]
    for name, values in found.stall.items():
        if name != "nothing":
            print(
                f"{name:<20}{1e3 * median(values):>10.1f}{ratio_of_medians(values, copy)!s:>24}"
                f"{1e3 * median(found.copying[name]):>30.0f}{1e3 * median(found.after[name]):>13.0f}"
            )
    print()
    for what, each, goal in (("stall", found.stall, STALL_GOAL), ("lost while copying", found.copying, COPYING_GOAL)):
        ratio = ratio_of_medians(each[OURS], copy)
        met = "met" if ratio.value <= goal else "missed"
        print(f"{OURS}, {what} / the stall of the {COPY}: {ratio}, goal {goal}: {met}")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), **asdict(found)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
