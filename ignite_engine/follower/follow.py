"""Evaluate each checkpoint of a run beside its training, so that log, report and retention know its metrics."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from ignite_engine import rng
from ignite_engine.checkpointing import CheckpointError, CheckpointInfo, CheckpointStore, SaveOptions
from ignite_engine.checkpointing.filesystem import DirectoryInUse, held
from ignite_engine.checkpointing.retention import of_one_run
from ignite_engine.data.windows import Windows
from ignite_engine.errors import check_type, is_number
from ignite_engine.followed_log import FollowedLog, identity_of
from ignite_engine.follower.here import Here
from ignite_engine.follower.there import There, begins_there
from ignite_engine.mirror import MirrorOptions
from ignite_engine.mirror.followed import without_left
from ignite_engine.mirror.remote import Remote
from ignite_engine.ranks import agreement
from ignite_engine.report import write_report
from ignite_engine.run_directory import FOLLOWED_CHECKPOINT, RunDirectory, RunDirectoryInUse
from ignite_engine.states.loading import load_evaluated
from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)

Announce = Callable[[Mapping[str, Any]], object]


class Evaluates(Protocol):
    """What is needed of an evaluation."""

    def __call__(self, trainer: Trainer, /) -> None: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


def follow(
    directory: str | Path,
    build: Callable[[], Trainer],
    *,
    every_checkpoint: bool = False,
    wait_s: float = 300.0,
    announce: Announce | None = None,
) -> int:
    """Evaluate each new checkpoint of a run once, beside its training, until the run has ended; a collective.

    What each :class:`~ignite_engine.handlers.Evaluation` measures has the bits that the run itself would measure at
    that iteration, on as many ranks. It is in ``follow/metrics.jsonl`` of the run's folder, with which the report,
    ``compare`` and ``run.history`` join the run's log, and in the checkpoint's manifest: the run keeps the best ones by
    it, and ``RUN/best`` finds them. A checkpoint is not deleted while it is evaluated. Killed and started again it
    continues; nothing that was measured is measured again.

    Args:
        directory: of the run; its checkpoints are there, or in its ``checkpoints``.
        build: makes a trainer as the run's program does, with an Evaluation for each set and, if it has one, the EMA
            attached. Nothing is trained in it.
        every_checkpoint: evaluate all of them, the oldest first, and let none that was seen be deleted before that;
            False: the newest first, and older ones, if they are still there, when there is no newer one.
        wait_s: seconds for which a run that has not begun, or was killed, is waited for; half of it, and 60 s at most,
            for one that says it has failed.
        announce: called on rank 0 with ``checkpoint``, ``iteration``, ``epoch`` and what was measured, by name.

    Returns:
        How many were evaluated.

    Raises:
        RunDirectoryInUse: another process follows the run.
        StateMismatch: the model is another one than the run's.
        TypeError, ValueError: a setting is of another type or out of its range, or no Evaluation is attached.
    """
    check_type("build", build, callable(build), "a function that makes the trainer")
    trainer = build()
    check_type("what build() returns", trainer, isinstance(trainer, Trainer), "a Trainer")
    evaluations = [obj for name, obj in trainer.registry.objects.items() if name.startswith("evaluation/")]
    options: dict[str, Any] = {"every_checkpoint": every_checkpoint, "wait_s": wait_s, "announce": announce}
    return follow_with(directory, trainer, evaluations, **options)


def follow_with(
    directory: str | Path,
    trainer: Trainer,
    evaluations: Iterable[Any],
    *,
    every_checkpoint: bool = False,
    wait_s: float = 300.0,
    announce: Announce | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """As :func:`follow`, with the trainer and the evaluations themselves.

    Args:
        defaults: of the run's config, for the report.
    """
    check_type("wait_s", wait_s, is_number(wait_s), "a number of seconds")
    if not wait_s >= 0:
        raise ValueError(f"wait_s must be at least 0 s, got {wait_s}.")
    if not (evaluations := list(evaluations)):
        raise ValueError("There is nothing to evaluate: attach an Evaluation to the trainer, in a config add val_sets.")
    for evaluation in evaluations:
        if isinstance(evaluation.data, Windows) or not isinstance(evaluation.data, Iterable):
            raise ValueError(
                f"{evaluation.name} takes other data each time, such as windows, so it cannot be followed."
            )
    run = RunDirectory(directory)
    with contextlib.ExitStack() as stack:
        agreement.on_rank_0(lambda: _take(run, stack))
        place = _place_of_run(run, trainer, wait_s)
        stack.callback(place.release)
        follower = Follower(place, trainer, evaluations, every_checkpoint=every_checkpoint, announce=announce)
        count = follower.follow()
        if agreement.rank() == 0 and (run.path / "report.html").exists():
            write_report(run.given, None, defaults)
        return count


def _place_of_run(run: RunDirectory, trainer: Trainer, wait_s: float) -> Here | There:
    """Where the run is: in its folder, or else in the mirror of the trainer's Checkpoint."""
    options = [getattr(obj, "options", None) for obj in trainer.registry.objects.values()]
    mirrors = [MirrorOptions.of(saves.mirror) for saves in options if isinstance(saves, SaveOptions) and saves.mirror]
    if mirrors and begins_there(run, remote := Remote(mirrors[0].url), wait_s):
        return There(remote, run, wait_s, mirrors[0].parallel)
    return Here(run, wait_s)


def _take(run: RunDirectory, stack: contextlib.ExitStack) -> None:
    try:
        stack.enter_context(held(run.followed.parent))
    except DirectoryInUse as holder:
        raise RunDirectoryInUse(
            f"{run.given} is followed by {holder}: one is enough; stop it to start another."
        ) from None


class Follower:
    """One process, or group of ranks, that evaluates the checkpoints of a run."""

    def __init__(
        self,
        place: Here | There,
        trainer: Trainer,
        evaluations: Sequence[Evaluates],
        *,
        every_checkpoint: bool,
        announce: Announce | None,
    ) -> None:
        self.place, self.trainer, self.evaluations = place, trainer, evaluations
        self.every_checkpoint, self.announce = every_checkpoint, announce
        self.log = FollowedLog(place.run.followed)
        self._refused: list[dict[str, Any]] = []
        self._current: list[CheckpointInfo] = []
        """What the run had saved at the last look, without iterations that it has left."""

    def follow(self) -> int:
        """Evaluate what comes until the run has ended or is given up; returns how many."""
        count, place = 0, self.place
        place.begin(self.log)
        while True:
            # asked first: what the run has saved before it ended is seen after that
            life = place.ask(lambda: (place.life.has_ended(), place.life.is_silent()), None)
            has_ended, is_given_up = life or (False, agreement.on_rank_0(place.life.is_silent))
            chosen = place.ask(lambda: [self._choose()], None)  # None: the run was not reached, and may have more
            if chosen and chosen[0] is not None:
                count += self._evaluate(chosen[0])
                place.life.wait_anew()
            elif has_ended and chosen:
                place.end()
                logger.info("The run in %s has ended; %d of its checkpoints were evaluated.", place, count)
                return count
            elif is_given_up:
                place.end()
                logger.warning(
                    "%s shows no sign of a run for %g s: it has not begun, or was killed. The same command goes on.",
                    *(place, place.life.wait_s),
                )
                return count
            else:
                time.sleep(place.look_every_s)

    def _choose(self) -> CheckpointInfo | None:
        """The checkpoint that is evaluated next, held; None: there is none now."""
        while waiting := self._waiting():
            if self.every_checkpoint:
                held_now = [checkpoint for checkpoint in waiting if self.place.hold(checkpoint)]
                if held_now:
                    return held_now[0]
            elif self.place.hold(waiting[-1]):
                return waiting[-1]
        return None

    def _waiting(self) -> list[CheckpointInfo]:
        """Those of the run that were not evaluated yet, in the order in which it has saved them."""
        self._current = without_left(of_one_run(self.place.saved()))
        seen = [*self._refused, *(line[FOLLOWED_CHECKPOINT] for line in self.log.lines())]
        return [checkpoint for checkpoint in self._current if identity_of(checkpoint) not in seen]

    def _evaluate(self, checkpoint: CheckpointInfo) -> bool:
        """Measure, write, let it go; False: it cannot be read, which is a warning."""
        trainer, place = self.trainer, self.place
        try:
            if (path := place.bring(checkpoint)) is None:
                return False
            store = CheckpointStore(path.parent)
            loaded = agreement.together(lambda: store.load(path, agreement.rank(), whole=False))
            agreement.agreed(lambda: load_evaluated(trainer.registry, loaded))
        except CheckpointError as error:
            if agreement.rank() == 0:
                logger.warning("%s is not evaluated: %s", place.name_of(checkpoint), error)
            self._refused.append(identity_of(checkpoint))
            place.let_go(checkpoint)
            return False
        trainer.state.iteration = loaded.manifest.iteration
        trainer.state.metrics.clear()
        with rng.isolated():
            if "rng" in loaded.local:  # where the run's own evaluation of this iteration began
                rng.restore(loaded.local["rng"])
            for evaluation in self.evaluations:
                evaluation.load_state_dict({"evaluated_at": None, "unfinished_at": None, "rng": None})
                evaluation(trainer)
        values = {name: float(value) for name, value in trainer.state.metrics.items() if isinstance(value, Real)}
        if agreement.rank() == 0:
            self.log.add(checkpoint, values, self._current)
        place.measured(checkpoint, values)
        place.let_go(checkpoint)
        if agreement.rank() == 0 and self.announce is not None:
            manifest, name = checkpoint.manifest, place.name_of(checkpoint)
            self.announce({"checkpoint": name, "iteration": manifest.iteration, "epoch": manifest.epoch, **values})
        return True
