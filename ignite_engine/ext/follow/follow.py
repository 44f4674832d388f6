"""Evaluates each checkpoint of a run beside its training, and adds the metrics to the log and the manifests."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from ignite_engine import rng
from ignite_engine.checkpoint.filesystem import signature
from ignite_engine.checkpoint.lock import DirectoryInUse, held, in_use, is_held
from ignite_engine.checkpoint.retention import CheckpointInfo, of_one_run, superseded
from ignite_engine.checkpoint.states.loading import load_evaluated
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, check_type, is_number
from ignite_engine.ext.report import write_report
from ignite_engine.ranks import agreement
from ignite_engine.runs.run_directory import FOLLOWED_CHECKPOINT, RunDirectory, RunDirectoryInUse, write_whole
from ignite_engine.text import json_values, lines_of
from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)

Announce = Callable[[Mapping[str, Any]], object]
_LOOKS_EVERY_S = 0.5


def follow(
    directory: str | Path,
    build: Callable[[], Trainer],
    *,
    every_checkpoint: bool = False,
    wait_s: float = 300.0,
    announce: Announce = lambda values: None,
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
            attached. Nothing is trained in it, and data that is another each time, such as windows, is not evaluated.
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
    check_type("wait_s", wait_s, is_number(wait_s), "a number of seconds")
    if not wait_s >= 0:
        raise ValueError(f"wait_s must be at least 0 s, got {wait_s}.")
    trainer, run = build(), RunDirectory(directory)
    check_type("what build() returns", trainer, isinstance(trainer, Trainer), "a Trainer")
    attached: list[Any] = [part for name, part in trainer.registry.objects.items() if name.startswith("evaluation/")]
    evaluations = [evaluation for evaluation in attached if isinstance(evaluation.data, Iterable)]
    if not evaluations:
        raise ValueError(
            "There is nothing to evaluate: attach an Evaluation to the trainer, in a config add val_sets. Data of a "
            "function, which is another each time, cannot be followed."
        )
    with contextlib.ExitStack() as stack:

        def take() -> None:
            try:
                stack.enter_context(held(run.followed.parent))
            except DirectoryInUse as holder:
                raise RunDirectoryInUse(
                    f"{run.given} is followed by {holder}: one is enough; stop it to start another."
                ) from None

        agreement.on_rank_0(take)
        follower = _Follower(run, trainer, evaluations, every_checkpoint, announce)
        stack.callback(follower.release)
        count = follower.follow(wait_s)
        if agreement.rank() == 0 and (run.path / "report.html").exists():
            write_report(run.given)
        return count


class _Follower:
    """A process, or a group of ranks, that evaluates the checkpoints of a run."""

    def __init__(
        self, run: RunDirectory, trainer: Trainer, evaluations: Sequence[Any], every: bool, announce: Announce
    ) -> None:
        self.run, self.trainer, self.evaluations = run, trainer, evaluations
        self.every_checkpoint, self.announce = every, announce
        self._refused: list[dict[str, Any]] = []
        self._kept: dict[Path, contextlib.ExitStack] = {}
        """Locks on checkpoints that must not be deleted."""
        self._signs: list[Any] = []
        self._seen_at = time.monotonic()

    def follow(self, wait_s: float) -> int:
        """Evaluate new checkpoints until the run has ended or is given up; returns their number."""
        count = 0
        while True:
            status, chosen = agreement.on_rank_0(self._look)
            is_silent = agreement.on_rank_0(lambda: time.monotonic() - self._seen_at > wait_s)
            if chosen is not None:
                count += self._evaluate(chosen)
                self._seen_at = time.monotonic()  # nobody has looked meanwhile
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
        """Release the locks on checkpoints."""
        for kept in self._kept.values():
            kept.close()

    def _look(self) -> tuple[str | None, CheckpointInfo | None]:
        """The final status of the run, None while it is training; and the checkpoint to evaluate next.

        The status is read first, so that no checkpoint is missed that was saved before the end.
        """
        run = self.run
        signs = [signature(path) for path in (run.summary, run.metrics, run.starts)]
        # fit() and configs hold the run's folder, a Checkpoint alone holds its own
        is_training = is_held(run.path) or is_held(run.checkpoints)
        if is_training or signs != self._signs:
            self._signs, self._seen_at = signs, time.monotonic()
        history = run.read_history()
        status = run.read_summary().get("status") or (history[-1]["what"] if history else None)
        return None if is_training else status, self._choose()

    def _store(self) -> CheckpointStore:
        is_folder_of_its_own = self.run.checkpoints.is_dir() or not self.run.path.is_dir()
        return CheckpointStore(self.run.checkpoints if is_folder_of_its_own else self.run.path)

    def _choose(self) -> CheckpointInfo | None:
        """The checkpoint to evaluate next, locked against deletion; None: there is none now."""
        while waiting := self._waiting():
            wanted = waiting if self.every_checkpoint else waiting[-1:]
            if kept := [checkpoint for checkpoint in wanted if self._keep(checkpoint.path)]:
                return kept[0]
        return None

    def _keep(self, path: Path) -> bool:
        """Lock a checkpoint against deletion; False: it has been deleted."""
        if path not in self._kept:
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(in_use(path)):
                    return False
                self._kept[path] = stack.pop_all()
        return True

    def _waiting(self) -> list[CheckpointInfo]:
        """The checkpoints of the run that were not evaluated yet, in the order of their saves."""
        saved = of_one_run(self._store().checkpoints())
        left = {checkpoint.path for checkpoint in superseded(saved)}
        seen = [*self._refused, *(line[FOLLOWED_CHECKPOINT] for line in self._lines())]
        return [each for each in saved if each.path not in left and _identity_of(each) not in seen]

    def _evaluate(self, checkpoint: CheckpointInfo) -> bool:
        """Evaluate a checkpoint and record the metrics; False, with a warning, if it cannot be read."""
        trainer, path, rank_0 = self.trainer, checkpoint.path, agreement.rank() == 0
        try:
            loaded = agreement.together(lambda: self._store().load(path, agreement.rank(), whole=False))
            agreement.agreed(lambda: load_evaluated(trainer.registry, loaded))
        except CheckpointError as error:
            if rank_0:
                logger.warning("%s is not evaluated: %s", path, error)
                self._refused.append(_identity_of(checkpoint))
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
            self._store().add_metrics(path, values)
        except CheckpointError as error:
            logger.warning("%s", error)
        if rank_0:
            about = {"iteration": checkpoint.iteration, "epoch": checkpoint.manifest.epoch}
            self._log(checkpoint, {**about, **values})  # last: after a kill before this line, it is evaluated again
            self._kept.pop(path).close()
            self.announce({"checkpoint": str(path), **about, **values})
        return True

    def _lines(self) -> list[dict[str, Any]]:
        """The lines that followers have written, one for each checkpoint."""
        lines = lines_of(self.run.followed)
        return [line for line in lines if isinstance(line.get(FOLLOWED_CHECKPOINT), dict) and line[FOLLOWED_CHECKPOINT]]

    def _log(self, checkpoint: CheckpointInfo, line: Mapping[str, Any]) -> None:
        """Add a line; the file is replaced atomically.

        Lines of another run are dropped, and those of iterations that the run has abandoned: it was resumed from an
        earlier checkpoint and has saved this one since.
        """
        manifest, lines = checkpoint.manifest, [json_values({**line, FOLLOWED_CHECKPOINT: _identity_of(checkpoint)})]
        for other in self._lines():
            of = other[FOLLOWED_CHECKPOINT]
            is_valid = other["iteration"] < manifest.iteration or of["created_at"] > manifest.created_at
            if is_valid and of["run_id"] == manifest.run_id:
                lines.append(other)
        lines.sort(key=lambda each: int(each["iteration"]))
        self.run.followed.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.run.followed, "".join(json.dumps(each) + "\n" for each in lines))


def _identity_of(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """Identifies a checkpoint among all that the folder has ever held."""
    manifest = checkpoint.manifest
    return {"name": checkpoint.path.name, "created_at": manifest.created_at, "run_id": manifest.run_id}
