"""Does a resumed run equal the uninterrupted one? Both are trained, one is killed, and their folders are compared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ignite.engine import Events

from ignite_engine.checkpoint.states.model_and_optimizer import weights_of
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.ext.replay.compare import compare
from ignite_engine.ext.replay.rerun import checkpoints_of, end_at
from ignite_engine.ext.replay.steps import STEPS, Steps
from ignite_engine.text import lines_of
from ignite_engine.trainer import Trainer

_SAVE_TIMEOUT_S = 120.0


class NotProven(RuntimeError):
    """The resumed run is another one, or there is nothing to compare; one line."""


@dataclass(frozen=True)
class Phase:
    """One start of the run, in a process of its own, to the iteration ``until``.

    Attributes:
        save_at, kill_at: it is saved after the one, and killed (SIGKILL) in the other, after the update.
        broken: a weight is changed once the run is resumed, which must be noticed.
    """

    directory: str
    until: int
    save_at: int | None = None
    kill_at: int | None = None
    broken: bool = False

    def train(self, trainer: Trainer, train: Callable[[], object]) -> None:
        """Train this part of a run, on each rank."""
        Steps(Path(self.directory)).attach(trainer)
        if self.broken:
            trainer.add_event_handler(Events.STARTED, _change_a_weight)
        if self.kill_at is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=self.save_at), trainer.request_save)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=self.kill_at), _kill)
        end_at(trainer, self.until)
        train()

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def _kill(trainer: Trainer) -> None:
    """Once there is something to resume: a save may still be running in the background."""
    deadline = time.monotonic() + _SAVE_TIMEOUT_S
    stores = [CheckpointStore(checkpoint.store.directory) for checkpoint in checkpoints_of(trainer)]
    while not all(store.checkpoints() for store in stores) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def _change_a_weight(trainer: Trainer) -> None:
    weights = weights_of(trainer.registry.objects, trainer.registry.kinds)
    with torch.no_grad():
        next(weight for weight in weights.values() if weight.is_floating_point()).mul_(1.01).add_(0.01)


def verify(start: Callable[[Phase], None], folder: Path, iterations: int, kill_at: int | None) -> list[str]:
    """Compare the run with the same run that was killed and resumed.

    Args:
        start: trains a :class:`Phase` of the run in new processes, and returns when they have ended.
        folder: an empty one.
        iterations: how many are compared, if the run has so many.
        kill_at: the iteration in which it is killed; None: past the middle.

    Returns:
        What was found equal, and what was not compared, a line each.

    Raises:
        NotProven: what differs first, or a start did not end as expected.
    """
    reference, killed, control = (folder / name for name in ("reference", "killed", "control"))
    start(Phase(str(reference), iterations))
    iterations = _last_iteration(reference)
    if iterations < 3 or (kill_at or 0) >= iterations:
        raise NotProven(f"The run ends at iteration {iterations}: there is nothing to compare after a kill.")
    kill_at = kill_at or max(2, (3 * iterations + 2) // 5)
    start(Phase(str(killed), iterations, kill_at - max(1, kill_at // 5), kill_at))
    if _last_iteration(killed) != kill_at - 1:
        raise NotProven(f"The run was not killed at iteration {kill_at}: it ended at {_last_iteration(killed)}.")
    ignored: set[str] = set()
    while (difference := compare(reference, killed, kill_at - 1, ignore=ignored).difference) is not None:
        if not difference.what.startswith("the state of"):
            raise NotProven(
                f"The run is not deterministic: two runs from the same start differ, {difference}, before anything was "
                "killed: set run.deterministic=true if it trains on a device, and call seed_everything() before the "
                "data and the model are made."
            )
        ignored.add(difference.what)
    shutil.copytree(killed, control)
    before_the_kill = len(_iterations(killed)[0])
    start(Phase(str(killed), iterations))
    resumed = _iterations(killed)[0][before_the_kill:]
    since = resumed[0] - 1 if resumed else 0
    if since == 0:
        raise NotProven("Nothing was resumed: the run that should have resumed started over.")
    found = compare(reference, killed, iterations, since=since, ignore=ignored)
    if found.difference is not None:
        raise NotProven(
            f"Resume is NOT exact: killed at iteration {kill_at} and resumed from {since}, the run differs first at "
            f"{found.difference}. What the run depends on and does not save, trainer.register(name, object) saves; a "
            "thread of your own that changes it, or draws random numbers, must not run during a save or a start."
        )
    start(Phase(str(control), since + 1, broken=True))
    if compare(reference, control, since + 1, since=since, ignore=ignored).difference is None:
        raise NotProven("A weight was changed in the resumed run on purpose, and no difference was found.")
    return [
        f"Resume is exact: killed at iteration {kill_at}, resumed from {since}, equal up to {iterations}: {found}. A "
        "weight that was changed on purpose was noticed.",
        *(f"  not compared, as two runs from the same start differ in it: {name}" for name in sorted(ignored)),
    ]


def _last_iteration(folder: Path) -> int:
    """The last one that all ranks have completed; 0: none."""
    return min((numbers[-1] for numbers in _iterations(folder) if numbers), default=0)


def _iterations(folder: Path) -> list[list[int]]:
    """Those that each rank has completed; after a resume some of them again."""
    return [[line["iteration"] for line in lines_of(path)] for path in sorted(folder.glob(STEPS.format("*")))]
