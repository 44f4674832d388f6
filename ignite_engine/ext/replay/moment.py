"""A run brought to one of its iterations again, bit for bit, with everything in place."""

from __future__ import annotations

import bdb
import pdb
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ignite.engine import Events

from ignite_engine.errors import ReplayError
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ext.replay.iteration import Iteration, rates_of, samples_of, scalars_of
from ignite_engine.ext.replay.logged import Difference
from ignite_engine.ext.replay.quiet import OnSave
from ignite_engine.ext.replay.rebuild import (
    Build,
    Rebuilt,
    as_it_was,
    check_ranks,
    config_at,
    iterations_of,
    rebuild,
)
from ignite_engine.ranks import agreement
from ignite_engine.trainer import Trainer

Attach = Callable[[Trainer], None]


class RunDiffers(ReplayError):
    """A replayed run is not what it has logged; the message names the first difference.

    Attributes:
        difference: the iteration, the value's name, and both values.
    """

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


@dataclass
class Moment:
    """A run at one of its step boundaries.

    Attributes:
        trainer: paused there; ``run()`` goes on, unless that was the run's last iteration.
        began_at: the checkpoint from which it was replayed; None: the start of the run.
        replayed: iterations.
        compared: lines of the logs that were compared on the way.
        iterations: what the iterations asked for were.
        difference: where it stopped as it is not what the run has logged; None: it is.
    """

    trainer: Trainer
    began_at: Path | None
    replayed: int
    compared: int
    iterations: dict[int, Iteration] = field(default_factory=dict)
    difference: Difference | None = None

    @property
    def way(self) -> str:
        """Where it comes from, as a sentence."""
        begin = "the start of the run" if self.began_at is None else self.began_at.name
        number, lines = self.replayed, self.compared
        return (
            f"Replayed {number} iteration{'s' * (number != 1)} from {begin}; {lines} logged line{'s' * (lines != 1)} "
            f"compared, {'the last one differs' if self.difference else 'all equal'}."
        )


@contextmanager
def replay(
    run_directory: str | Path, build: Build | None = None, *, at: int, save: str | Path | None = None
) -> Iterator[Trainer]:
    """Bring a run to the step boundary after one of its iterations again, in memory; a collective.

    It begins at the newest checkpoint before that iteration, or at the start of the run, and is trained from there with
    everything that has a part in it: evaluations, schedules, averages, early stopping. Nothing in the run's folder is
    written. What it logs on the way is compared with what the run has logged. Within the ``with`` the trainer is
    paused: ``state.batch``, gradients, optimizers and random numbers are those of the moment.

    Args:
        run_directory: of the run.
        build: builds a run that no config names, see :data:`~ignite_engine.ext.replay.Build`; it gets the folder.
        at: the iteration, from 1.
        save: a folder of checkpoints, which gets one of the moment.

    Raises:
        ReplayError: one line; there is no such run or iteration, or it had another number of ranks.
        RunDiffers: a value is not the one that the run has logged.
    """
    with bring_to(run_directory, build, at=at, save=save) as moment:
        if moment.difference is not None:
            raise RunDiffers(moment.difference)
        yield moment.trainer


@contextmanager
def bring_to(
    run_directory: str | Path,
    build: Build | None = None,
    *,
    at: int,
    until: int | None = None,
    before: int | None = None,
    save: str | Path | None = None,
    debug: bool = False,
    attach: Sequence[Attach] = (),
    on_save: OnSave | None = None,
) -> Iterator[Moment]:
    """As :func:`replay`, and what it found on the way; a difference ends it there and is not raised.

    Args:
        until: go on to this iteration; each from ``at`` on is described.
        before: begin at the newest checkpoint before this iteration; None: before ``at``.
        debug: open the debugger before the update of ``at``.
        attach: called with the trainer before it runs, once it is quiet.
        on_save: called where the run has saved a checkpoint, with the trainer and what it held: the parts that the
            ranks share, and this rank's.
    """
    directory, until = Path(run_directory), until or at
    if save is not None and Path(save).resolve().is_relative_to(directory.resolve()):
        raise ReplayError(f"save: {save} is in the folder of the run, which is only read: give another one.")
    if not 1 <= at <= until:
        raise ReplayError(f"got iterations {at} to {until}, expected numbers from 1, the smaller one first.")
    stored = config_at(directory, at)
    check_ranks(directory, stored)
    known = iterations_of(directory)
    if until > known:
        raise ReplayError(f"{directory} has {known} iterations, got {until}.")
    with as_it_was(directory):
        rebuilt = rebuild(directory, build, stored, at if before is None else before)
        rebuilt.quieted.on_save = on_save
        rebuilt.begin()
        first = rebuilt.trainer.state.iteration
        watch = _Watch(rebuilt, at, until, save, debug=debug)
        for call in attach:
            call(rebuilt.trainer)
        watch.attach(rebuilt.trainer)
        trainer = rebuilt.trainer
        try:
            trainer.run(**rebuilt.arguments)
        except bdb.BdbQuit:
            raise ReplayError(f"The debugger was left, or has no terminal: iteration {at} is not made.") from None
        if watch.save_failed:
            raise ReplayError(f"save: no checkpoint could be written to {save}; the line above says why.")
        quieted = rebuilt.quieted
        compared = sum(lines.compared for lines in quieted.compared)
        moment = Moment(
            *(trainer, rebuilt.began_at, trainer.state.iteration - first, compared, watch.iterations),
            quieted.difference,
        )
        if trainer.state.iteration < until and moment.difference is None:
            raise ReplayError(
                f"The replayed run ends at iteration {trainer.state.iteration}, and the run has come to {until}: it "
                f"was trained further with other settings, or ended by a handler."
            )
        try:
            yield moment
        finally:
            rebuilt.close()


class _Watch:
    """Describes the iterations asked for, and pauses the run after the last one, or at a difference."""

    def __init__(self, rebuilt: Rebuilt, at: int, until: int, save: str | Path | None, *, debug: bool) -> None:
        if save is not None and rebuilt.checkpoint is None:
            raise ReplayError("save: the run has no Checkpoint handler, which would save it.")
        self.rebuilt, self.at, self.until, self.save, self.debug = rebuilt, at, until, save, debug
        self.iterations: dict[int, Iteration] = {}
        self.save_failed = False
        self._paused = False

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.ITERATION_STARTED, self._begin)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._step)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._complete)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._save)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._pause)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, self._note_failure)

    def _begin(self, trainer: Trainer) -> None:
        number = trainer.state.iteration
        if not self.at <= number <= self.until:
            return
        self.iterations[number] = Iteration(number, trainer.state.epoch, samples_of(trainer), rates=rates_of(trainer))
        if self.debug and number == self.at:
            pdb.set_trace()

    def _step(self, trainer: Trainer) -> None:
        if (iteration := self.iterations.get(trainer.state.iteration)) is not None:
            iteration.rates = rates_of(trainer)

    def _complete(self, trainer: Trainer) -> None:
        number = trainer.state.iteration
        if (iteration := self.iterations.get(number)) is not None:
            iteration.output = scalars_of(trainer.state.output)

    def _save(self, trainer: Trainer) -> None:
        if self.save is not None and trainer.state.iteration == self.until:
            self.rebuilt.quieted.save_into(self.save, trainer)

    def _note_failure(self, trainer: Trainer) -> None:
        self.save_failed = True  # the run's own saves are counted, and cannot fail

    def _pause(self, trainer: Trainer) -> None:
        quieted = self.rebuilt.quieted
        if agreement.world_size() > 1:  # rank 0 has the logs
            quieted.difference = agreement.on_rank_0(lambda: quieted.difference)
        if not self._paused and (quieted.difference is not None or trainer.state.iteration >= self.until):
            self._paused = True
            trainer.interrupt()

    _save.phase = Phase.PREPARE  # type: ignore[attr-defined]  # before the run counts its own save
    _begin.phase = _complete.phase = _pause.phase = Phase.LAST  # type: ignore[attr-defined]
