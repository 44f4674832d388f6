"""Evaluate each checkpoint of a run beside its training, so that log, report and retention know its metrics."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from ignite_engine import rng
from ignite_engine.checkpoint.lock import DirectoryInUse, held, in_use, is_held
from ignite_engine.checkpoint.retention import CheckpointInfo, of_one_run
from ignite_engine.checkpoint.states.loading import load_evaluated
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.data.source import OwnSource
from ignite_engine.errors import CheckpointError, check_type, is_number
from ignite_engine.ext.follow.log import FollowedLog, identity_of
from ignite_engine.ext.report import write_report
from ignite_engine.ranks import agreement
from ignite_engine.runs.run_directory import FOLLOWED_CHECKPOINT, RunDirectory, RunDirectoryInUse
from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)

Announce = Callable[[Mapping[str, Any]], object]
_LOOKS_EVERY_S = 0.5


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
    continues; what was measured is not measured again.

    Args:
        directory: of the run; its checkpoints are there, or in its ``checkpoints``.
        build: makes a trainer as the run's program does, with an Evaluation for each set and, if it has one, the EMA
            attached. Nothing is trained in it.
        every_checkpoint: evaluate all of them, the oldest first, and let none that was seen be deleted before that;
            False: the newest first, and older ones, if they are still there, when there is no newer one.
        wait_s: seconds for which a run that has not begun, was killed, or has failed, is waited for.
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
) -> int:
    """As :func:`follow`, with the trainer and the evaluations themselves.

    Args:
    """
    check_type("wait_s", wait_s, is_number(wait_s), "a number of seconds")
    if not wait_s >= 0:
        raise ValueError(f"wait_s must be at least 0 s, got {wait_s}.")
    if not (evaluations := list(evaluations)):
        raise ValueError("There is nothing to evaluate: attach an Evaluation to the trainer, in a config add val_sets.")
    for evaluation in evaluations:
        if isinstance(evaluation.data, OwnSource) or not isinstance(evaluation.data, Iterable):
            raise ValueError(
                f"{evaluation.name} takes other data each time, such as windows, so it cannot be followed."
            )
    run = RunDirectory(directory)
    with contextlib.ExitStack() as stack:
        agreement.on_rank_0(lambda: _take(run, stack))
        follower = Follower(run, trainer, evaluations, every_checkpoint=every_checkpoint, announce=announce)
        stack.callback(follower.release)
        count = follower.follow(wait_s)
        if agreement.rank() == 0 and (run.path / "report.html").exists():
            write_report(run.given)
        return count


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
        run: RunDirectory,
        trainer: Trainer,
        evaluations: Sequence[Evaluates],
        *,
        every_checkpoint: bool,
        announce: Announce | None,
    ) -> None:
        self.run, self.trainer, self.evaluations = run, trainer, evaluations
        self.every_checkpoint, self.announce = every_checkpoint, announce
        self.log = FollowedLog(run.followed)
        self._refused: list[dict[str, Any]] = []
        self._kept: dict[Path, contextlib.ExitStack] = {}
        """Checkpoints that retention does not delete."""

    def follow(self, wait_s: float) -> int:
        """Evaluate what comes until the run has ended or is given up; returns how many."""
        count, signs, seen_at = 0, None, time.monotonic()
        while True:
            # asked first: what the run has saved before it ended is seen after that
            is_training, status, now = agreement.on_rank_0(self._look)
            if is_training or now != signs:
                signs, seen_at = now, time.monotonic()
            is_silent = agreement.on_rank_0(lambda: time.monotonic() - seen_at > wait_s)  # noqa: B023  # called at once
            chosen = agreement.on_rank_0(self._choose)
            if chosen is not None:
                count += self._evaluate(chosen)
                seen_at = time.monotonic()  # nobody has looked meanwhile
            elif status in ("completed", "interrupted"):
                logger.info("The run in %s has ended; %d of its checkpoints were evaluated.", self.run.given, count)
                return count
            elif is_silent:
                logger.warning(
                    "%s shows no sign of a run for %g s: it has not begun, was killed, or has failed. Run the "
                    "same command again to continue.",
                    *(self.run.given, wait_s),
                )
                return count
            else:
                time.sleep(_LOOKS_EVERY_S)

    def release(self) -> None:
        """Let retention delete what was kept."""
        for path in list(self._kept):
            self._kept.pop(path).close()

    def _look(self) -> tuple[bool, str | None, list[tuple[int, int] | None]]:
        """Whether the run is trained by a process; else the status that it was left with; and signs of life."""
        run = self.run
        signs = [_stamp(path) for path in (run.summary, run.metrics, run.starts, run.checkpoints)]
        # of a run of a config or of fit(), and of Checkpoint alone
        if is_held(run.path) or is_held(run.checkpoints):
            return True, None, signs
        if "status" in (summary := run.read_summary()):
            return False, str(summary["status"]), signs
        history = run.read_history()
        return False, str(history[-1]["what"]) if history else None, signs

    def _store(self) -> CheckpointStore:
        is_folder_of_its_own = self.run.checkpoints.is_dir() or not self.run.path.is_dir()
        return CheckpointStore(self.run.checkpoints if is_folder_of_its_own else self.run.path)

    def _choose(self) -> CheckpointInfo | None:
        """The checkpoint that is evaluated next, kept from deletion; None: there is none now."""
        while waiting := self._waiting():
            if self.every_checkpoint:
                kept = [checkpoint for checkpoint in waiting if self._keep(checkpoint.path)]
                if kept:
                    return kept[0]
            elif self._keep(waiting[-1].path):
                return waiting[-1]
        return None

    def _keep(self, path: Path) -> bool:
        """Keep retention from deleting a checkpoint; False: it has been deleted."""
        if path not in self._kept:
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(in_use(path)):
                    return False
                self._kept[path] = stack.pop_all()
        return True

    def _waiting(self) -> list[CheckpointInfo]:
        """Those of the run that were not evaluated yet, in the order in which it has saved them."""
        current = _without_left(of_one_run(self._store().checkpoints()))
        seen = [*self._refused, *(line[FOLLOWED_CHECKPOINT] for line in self.log.lines())]
        return [checkpoint for checkpoint in current if identity_of(checkpoint) not in seen]

    def _evaluate(self, checkpoint: CheckpointInfo) -> bool:
        """Measure, write, let it go; False: it cannot be read, which is a warning."""
        trainer, path, rank_0 = self.trainer, checkpoint.path, agreement.rank() == 0
        try:
            loaded = agreement.together(lambda: self._store().load(path, agreement.rank(), whole=False))
            agreement.agreed(lambda: load_evaluated(trainer.registry, loaded))
        except CheckpointError as error:
            if rank_0:
                logger.warning("%s is not evaluated: %s", path, error)
                self._refused.append(identity_of(checkpoint))
                self._kept.pop(path).close()
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
        try:
            self._store().annotate(path, metrics=values)
        except CheckpointError as error:
            logger.warning("%s", error)
        if rank_0:
            self.log.add(checkpoint, values)  # last: killed before that, it is measured again
            self._kept.pop(path).close()
            if self.announce is not None:
                about = {"iteration": checkpoint.iteration, "epoch": checkpoint.manifest.epoch}
                self.announce({"checkpoint": str(path), **about, **values})
        return True


def _without_left(saved: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those of one run, in the order in which it has saved them, without iterations that it has left.

    It has left those after an earlier one that it has saved since: it was resumed before them.
    """
    earliest_since, current = math.inf, list[CheckpointInfo]()
    for checkpoint in reversed(saved):
        if checkpoint.iteration < earliest_since:
            current.append(checkpoint)
        earliest_since = min(earliest_since, checkpoint.iteration)
    return current[::-1]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
