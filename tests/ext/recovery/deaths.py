"""Deaths of ranks where a test wants them, in a program of its own and in the task of a config; each happens once."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import ignite.distributed as idist
from ignite.engine import Events

from ignite_engine import TrainingEvents
from tests.kit import task

EVENTS = {event.name: event for event in (*Events, *TrainingEvents)}


@dataclass(frozen=True)
class Death:
    """How a rank dies.

    Attributes:
        at: the iteration; 0: before its first, while it is built.
        how: a signal, "raise" or "hang".
        in_turn: not before those before it in the list.
        times: how often, one start after the other.
    """

    at: int
    event: str = "ITERATION_COMPLETED"
    rank: int = 0
    how: str = "SIGKILL"
    in_turn: bool = False
    times: int = 1

    @property
    def marker(self):
        """The file that says how often it happened."""
        return f"died_{self.rank}_{self.at}_{self.event}"


class Deaths:
    """A handler, attached after the Checkpoint; ``at_RANK`` is its newest iteration, ``copied_RANK`` that of a copy."""

    def __init__(self, folder, deaths):
        self.folder, self.deaths = Path(folder), deaths
        self.folder.mkdir(parents=True, exist_ok=True)
        self.happen(lambda death: death.at == 0)

    def attach(self, trainer):
        for name in {death.event for death in self.deaths}:
            trainer.add_event_handler(EVENTS[name], self.at, trainer, name)
        trainer.add_event_handler(Events.ITERATION_STARTED, self.note, trainer, "at")
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self.note, trainer, "copied")

    def at(self, trainer, event):
        self.happen(lambda death: (death.at, death.event) == (trainer.state.iteration, event))

    def note(self, trainer, name):
        part = self.folder / f".{name}_{idist.get_rank()}"
        part.write_text(str(trainer.state.iteration))
        part.rename(self.folder / f"{name}_{idist.get_rank()}")

    def happen(self, is_meant):
        for number, death in enumerate(self.deaths):
            if death.in_turn and not all((self.folder / each.marker).exists() for each in self.deaths[:number]):
                continue
            died, rank = self.folder / death.marker, idist.get_rank()
            if is_meant(death) and death.rank == rank and number_in(died) < death.times:
                died.write_text(str(number_in(died) + 1))
                if death.how == "raise":
                    raise ArithmeticError("a program's own error")
                if death.how == "hang":
                    while True:
                        time.sleep(0.05)
                os.kill(os.getpid(), getattr(signal, death.how))


SHARED_MEMORY = Path("/dev/shm")


def copies_of(folder):
    """The folders in shared memory that belong to runs in ``folder``."""
    found = []
    for path in SHARED_MEMORY.glob("ignite-engine-*"):
        with contextlib.suppress(OSError):
            if (path / "directory").readlink().is_relative_to(folder):
                found.append(path)
    return found


def slots_of(folder, rank="*"):
    """Files with a state, the one that was written last at the end."""
    found = [path for folder in copies_of(folder) for path in folder.glob(f"rank_{rank}.*")]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def number_in(path):
    return int(path.read_text()) if path.exists() else 0


def build(options):
    """The kit's task, with ``deaths``."""
    deaths = [Death(**death) for death in options.get("deaths", [])]
    return replace(task.build(options), handlers=[Deaths(options["directory"], deaths)])
