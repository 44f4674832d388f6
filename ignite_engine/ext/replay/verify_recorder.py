"""One line per step boundary with the digest of every piece of state, written by the run itself; and the kill."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine.checkpointing.digests import Pieces, digests
from ignite_engine.events import TrainingEvents
from ignite_engine.rng import capture
from ignite_engine.state import Start
from ignite_engine.trainer import Trainer

OUTPUT = "output"
_SAVE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class BoundaryRecord:
    """The state at one step boundary, or of a run that was just resumed (``resumed``)."""

    iteration: int
    epoch: int
    resumed: bool
    components: Mapping[str, Pieces]

    @property
    def boundary(self) -> tuple[int, int]:
        return self.iteration, self.epoch


class StateRecorder:
    """Appends the digests of all registered parts, output and generators at each step boundary.

    Args:
        path: one JSON object per line; each rank has its own file.
        until: the last iteration that is recorded; the run is then asked to stop.

    Attach it last, so that it sees the state that a checkpoint made at the same boundary holds.
    """

    def __init__(self, path: Path, until: int) -> None:
        self.path, self.until = path, until

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, self._begin)
        trainer.add_event_handler(Events.ITERATION_STARTED, self._stop_at_the_end)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self)

    def __call__(self, trainer: Trainer) -> None:
        if trainer.state.iteration <= self.until:
            self._write(trainer, resumed=False)

    def _begin(self, trainer: Trainer) -> None:
        if trainer.state.start is Start.RESUMED:
            self._write(trainer, resumed=True)

    def _stop_at_the_end(self, trainer: Trainer) -> None:
        if trainer.state.iteration >= self.until:
            trainer.request_stop("the last iteration to compare")

    def _write(self, trainer: Trainer, *, resumed: bool) -> None:
        state, progress = trainer.state, trainer.progress
        components = {
            name: digests(obj.state_dict())
            for name, obj in trainer.registry.objects.items()
            # position and generators are restored when the first batch is fetched
            if name not in ("rng", "data") or (name == "data" and not resumed)
        }
        if not resumed:
            components["rng"] = {name: _one_digest(value) for name, value in capture().items()}
            output = state.output if isinstance(state.output, Mapping) else {"loss": state.output}
            components[OUTPUT] = digests(output)
        row = {
            "iteration": state.iteration,
            "epoch": progress.epochs_completed,
            "resumed": resumed,
            "components": components,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class KillAt:
    """Kills this process (SIGKILL) in the middle of an iteration: after the update, before anything is measured.

    Args:
        iteration: the one to be killed in.
        proof: a file that is written just before the kill.
        ready: whether there is something to resume; it is polled, as a save may still be running in the background.
    """

    def __init__(self, iteration: int, proof: Path, ready: Callable[[], bool]) -> None:
        self.iteration, self.proof, self.ready = iteration, proof, ready

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=self.iteration), self)

    def __call__(self, trainer: Trainer) -> None:
        deadline = time.monotonic() + _SAVE_TIMEOUT_S
        while not self.ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.proof.write_text(str(trainer.state.iteration))
        os.kill(os.getpid(), signal.SIGKILL)


def read_records(path: Path) -> list[BoundaryRecord]:
    """The lines of a :class:`StateRecorder`; an incomplete last line is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        records.append(BoundaryRecord(row["iteration"], row["epoch"], row["resumed"], row["components"]))
    return records


def _one_digest(value: Any) -> str:
    pieces = digests(value)
    return pieces[""] if list(pieces) == [""] else digests(json.dumps(pieces).encode())[""]


def proof_of(name: str) -> str:
    """Name of the file that proves the kill, for the name of the run's records without its suffix."""
    return f"{name}.proof"


def watch(trainer: Trainer, path: Path, *, until: int, kill_at: int | None, ready: Callable[[], bool]) -> None:
    """Attach the recorder, and with ``kill_at`` what kills the process."""
    StateRecorder(path, until).attach(trainer)
    if kill_at is not None:
        KillAt(kill_at, path.with_name(proof_of(path.stem)), ready).attach(trainer)
