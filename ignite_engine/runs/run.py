"""A run, ready to train, evaluate or describe. ``recipe.build_run`` makes one."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ignite_engine import devices
from ignite_engine.checkpoint.lock import read_chosen
from ignite_engine.checkpoint.retention import BestCheckpoint
from ignite_engine.checkpoint.sources import NAMES, find_source, followed
from ignite_engine.checkpoint.states.loading import load_evaluated
from ignite_engine.checkpoint.states.model_and_optimizer import unwrap
from ignite_engine.checkpoint.store import CheckpointStore, Loaded
from ignite_engine.errors import Interrupted, PeerFailed
from ignite_engine.events import Phase
from ignite_engine.loop.describe import model_table
from ignite_engine.ranks import agreement, attempt
from ignite_engine.ranks.watch import cause_of, known_failure, on_failure, reason_of
from ignite_engine.runs.code import commit_of_code
from ignite_engine.runs.config.load import Config
from ignite_engine.runs.run_directory import PhaseTimes, RunDirectory, weights_sha256
from ignite_engine.runs.task import Task
from ignite_engine.state import Start
from ignite_engine.text import in_lists, plain_metric
from ignite_engine.trainer import Trainer
from ignite_engine.update.parameters import Parameters

if TYPE_CHECKING:
    from ignite_engine.handlers import Checkpoint, Evaluation

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class Run:
    """A trainer with everything attached, its data and its folder.

    Attributes:
        trainer: nothing has run in it yet.
        loader: of the training set.
        directory: nothing has been written to it yet.
        settings: the config.
        task: with the model as it is trained.
        schedules: of learning rates, for each optimizer by its name.
        startup: seconds of the phases of the start-up so far.
        config: the resolved config as plain values; after a resume with the settings of optimizers that are in force.
        checkpoint: saves it; None: nothing does.
        first_iteration: at which ``train`` started, after the resume; None before.
        load: loads other weights where there is nothing to resume; None: the run starts fresh.
        write_report: writes the page of the run when it has ended, and says where; None: there is none.
        summary: what ``summary.json`` holds; empty before ``train``.
    """

    trainer: Trainer
    loader: Iterable[Any]
    directory: RunDirectory
    settings: Config
    task: Task
    schedules: Mapping[str, Any]
    startup: PhaseTimes
    config: dict[str, Any]
    checkpoint: Checkpoint | None = None
    first_iteration: int | None = None
    load: Callable[[], object] | None = None
    write_report: Callable[[], Path] | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    _resumed: Path | None = None
    _differences: Sequence[str] = ()
    _is_recorded: bool = False
    _metrics_before: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> Mapping[str, int]:
        """``max_epochs``, ``max_iters`` or both, as ``trainer.run`` takes it."""
        limits = {"max_iters": self.settings.run.max_iterations, "max_epochs": self.settings.run.max_epochs}
        return {key: value for key, value in limits.items() if value is not None}

    @property
    def evaluations(self) -> Iterable[Evaluation]:
        """New evaluations of each validation and test set; each writes ``trainer.state.metrics`` when called."""
        from ignite_engine.runs.evaluations import Evaluations

        known = ("limit", "resumes", "precision")
        options = {key: value for key, value in self.settings.handler("Evaluation").items() if key in known}
        return Evaluations(self, **options).of({**self.task.val_sets, **self.task.test_sets})

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last value of everything that was measured, by name."""
        metrics: Mapping[str, float] = self.summary.get("metrics", {})
        return metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was logged at each log point, and by a follower: ``pandas.DataFrame(run.history)`` is a table of it."""
        return self.directory.logged()

    def __repr__(self) -> str:
        if not self.summary:
            return f"Run({self.directory.given}: not trained)"
        values = "".join(f", {key} {value:g}" for key, value in self.metrics.items() if key == "loss" or "val/" in key)
        return f"Run({self.directory.given}: {self.summary['status']} at iteration {self.summary['iteration']}{values})"

    # -- training -------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Resume if there is something to resume, run to the end, write the summary; a collective.

        A run that has already reached its end is only evaluated.

        Returns:
            The content of ``summary.json``.

        Raises:
            Interrupted: a signal stopped it. The summary is written first, also when anything else is raised.
            RunDirectoryInUse: another process trains in the folder; nothing is written.
        """
        with contextlib.ExitStack() as held, on_failure(self._write_failure):
            # rank 0 locks the folder for all ranks; if it cannot, all raise
            agreement.on_rank_0(lambda: self._take_folder(held))
            try:
                self._resume_and_run()
            except BaseException as raised:
                error = cause_of(raised)
                self._fail(error)
                if error is not raised:
                    raise error from raised
                raise
            self._end(self.trainer.state.status)
            return dict(self.summary)

    def _take_folder(self, held: contextlib.ExitStack) -> None:
        directory = self.directory
        if self.settings.run.restart and (aside := directory.move_aside()) is not None:
            logger.info("The run that was in %s is now in %s.", directory.given, aside)
        held.enter_context(directory.held())

    def _resume_and_run(self) -> None:
        # until the settings of a start are in force, it leaves the record of a run as it was
        self._is_recorded = not self.directory.config.exists()
        if self._is_recorded:
            self._write_settings()
        with self.startup("resume"):
            self._resumed = self.begin()
        if agreement.rank() == 0:
            self._differences = self.directory.differences(self.config)
            for line in self._differences:
                logger.info("Config differs from the run's last start: %s", line)
            if self._resumed is None:
                self._set_old_metrics_aside()
        self.first_iteration = self.trainer.state.iteration
        if self.first_iteration:
            self._metrics_before = self.directory.read_summary().get("metrics", {})
        self.startup.log()
        if self._is_recorded:
            self._write_summary("running")
        self.trainer.run(self.loader, **self.length)

    def begin(self) -> Path | None:
        """Resume the newest checkpoint, or else load other weights if asked to; rank 0 decides."""
        has_loaded = self.load_excluded()
        options = self.settings.handler("Checkpoint").get("resume") or {}
        resumed = self.checkpoint.resume(**options) if self.checkpoint is not None else None
        if resumed is None and self.load is not None and not has_loaded:
            self.load()
        return resumed

    def load_excluded(self) -> bool:
        """Load the sources before a checkpoint, if those of this run are saved without some of the weights."""
        if self.load is None or self.checkpoint is None or not self.checkpoint.options.exclude:
            return False
        self.load()
        return True

    def take_over(self) -> None:
        """Load the newest checkpoint, and read the summary, of a run that another process has trained."""
        self.begin()
        self.summary = self.directory.read_summary()

    def started(self, trainer: Trainer) -> None:
        """At the end of STARTED the settings are in force: record them, and say what is trained."""
        trainer.registry.check_all_claimed()
        state, end = trainer.state, trainer.last_iteration
        if end is not None and state.iteration >= end:
            logger.info(
                "The run is at its end (iteration %d, epoch %d): it is only evaluated. A larger limit trains it "
                "further, restart=True (config: run.restart) or another directory trains anew.",
                *(state.iteration, trainer.progress.epochs_completed),
            )
            if self._differences:
                logger.warning(
                    "The settings that differ have no effect; %s stays as it was.", self.directory.config.name
                )
        elif not self._is_recorded:
            self._is_recorded = True
            if self._differences or not attempt.current.is_known:
                self._write_settings()
            self._write_summary("running")
        if state.start is Start.FRESH and agreement.rank() == 0:
            update: Any = trainer.update  # build_run gave it an Update
            on_console = self.settings.handler("MetricLogger").get("console", True)
            for line in model_table(update.model, Parameters(update.optimizers).all()):
                logger.info("%s", line, extra={"console": on_console})

    started.phase = Phase.LAST  # type: ignore[attr-defined]  # read by the Trainer

    def _write_settings(self) -> None:
        if agreement.rank() == 0:
            self.directory.write_config(self.config)
            self.directory.write_environment(agreement.world_size(), commit_of_code())

    def _set_old_metrics_aside(self) -> None:
        """Log points of a run that left no checkpoint would appear twice."""
        for path in filter(Path.exists, (self.directory.metrics, self.directory.followed)):
            aside = path.with_suffix(".jsonl.old")
            os.replace(path, aside)
            logger.warning("%s belonged to a run without a checkpoint: it is now %s.", path, aside.name)

    # -- how it ends ----------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Write how the run has ended, unless this start was refused before its settings were in force."""
        state = self.trainer.state
        # where a rank has failed a launcher signals those that live
        is_stop = isinstance(error, KeyboardInterrupt | Interrupted) and known_failure() is None
        if not is_stop and not isinstance(error, PeerFailed):  # which is in the log already
            logger.error("The run failed: %s: %s", type(error).__name__, error, extra={"console": False}, exc_info=True)
        if is_stop:
            number = error.signal if isinstance(error, Interrupted) else signal.SIGINT
            state.reason = state.reason or signal.Signals(number).name
        state.reason = state.reason or reason_of(error)
        if self._is_recorded or (is_stop and self.first_iteration is not None):  # a finished run records a stop, too
            self._end("interrupted" if is_stop else "failed")

    def _end(self, status: str) -> None:
        self._write_summary(status)
        if agreement.rank() != 0:
            return
        report = self._write_report()
        if status != "failed":
            self._log_outcome(report)
        from ignite_engine.handlers.trackers.tracker import end_of_run

        end_of_run(self.directory.path, status, self.summary["reason"])

    def _write_report(self) -> Path | None:
        try:
            return None if self.write_report is None else self.write_report()
        except Exception as error:  # the outcome of the run does not depend on its report
            logger.warning("No report could be written: %s: %s.", type(error).__name__, error)
            return None

    def _log_outcome(self, report: Path | None) -> None:
        """How the run ended, for a stop where the same command resumes, and last the best checkpoint and the report."""
        summary, folder = self.summary, self.directory.given
        if summary["status"] == "interrupted":
            saved = self.checkpoint.store.checkpoints() if self.checkpoint else ()
            resumes = f"resumes from {saved[-1].path.name}" if saved else "starts over: no checkpoint was saved"
            logger.info(
                "Stopped by %s at iteration %d; the same command %s.", summary["reason"], summary["iteration"], resumes
            )
        else:
            logger.info(
                "Completed at iteration %d in %.1f s, weights %s; results are in %s.",
                *(summary["iteration"], summary["wall_s"], summary["weights_sha256"][:12], folder),
            )
        found = []
        if (best := summary["best"]) is not None:
            path = folder / self.directory.checkpoints.name / best["checkpoint"]
            found.append(f"Best {BestCheckpoint(path, best['value'], best['iteration'], best['metric'])}")
        if report is not None:
            found.append(f"{'report' if found else 'Report'}: {folder / report.name}")
        if found:
            logger.info("%s.", "; ".join(found))

    def _write_failure(self, line: str) -> None:
        """A rank failed; this one writes it, whichever it is. The main thread may be blocked and never do so."""
        so_far = {} if self.first_iteration is None else self._so_far()
        self._write({**self.directory.read_summary(), **so_far, "status": "failed", "reason": line})

    def _so_far(self) -> dict[str, Any]:
        """The part of ``summary.json`` that changes while the run trains, and is the same on every rank."""
        state = self.trainer.state
        before = self._metrics_before if state.iteration == self.first_iteration else {}
        return {
            "iteration": state.iteration,
            "epoch": state.epoch,
            "optimizer_steps": state.optimizer_steps,
            "skipped_steps": state.skipped_steps,
            "read_errors": state.read_errors,
            "metrics": {name: plain_metric(name, value) for name, value in sorted({**before, **state.metrics}.items())},
            "wall_s": time.perf_counter() - self.startup.began,
            "written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _write_summary(self, status: str) -> None:
        """Set ``summary``, and write it on rank 0."""
        model = unwrap(self.trainer.update.model)
        start = "restart" if self._resumed else "fresh" if self.load is None else "fine-tune"
        self.summary = {
            "status": status,
            "reason": self.trainer.state.reason if status != "running" else None,
            **self._so_far(),
            "best": self._best(),
            "weights_sha256": weights_sha256(model) if status in ("completed", "interrupted") else None,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "world_size": agreement.world_size(),
            "start": None if self.first_iteration is None else start,
            "resumed_from": self._resumed.name if self._resumed else None,
            "startup_s": dict(self.startup.seconds),
            "checkpoints": asdict(self.checkpoint.times) if self.checkpoint else {},
        }
        if agreement.rank() == 0:
            self._write(self.summary)

    def _write(self, summary: Mapping[str, Any]) -> None:
        try:
            self.directory.write_summary(summary)
        except OSError as error:
            if summary["status"] != "failed":
                raise
            # the error that failed the run is raised instead: often the same full disk
            logger.error("%s could not be written: %s.", self.directory.summary, error)

    def _best(self) -> dict[str, Any] | None:
        """The best checkpoint of the run so far, as ``summary.json`` has it."""
        if self.checkpoint is None or self.first_iteration is None or agreement.rank() != 0:
            return None
        if (best := self.checkpoint.best) is None:
            return None
        about = {"metric": best.metric, "mode": self.checkpoint.options.mode, "value": best.value}
        return {**about, "iteration": best.iteration, "checkpoint": best.path.name}

    # -- evaluating and describing --------------------------------------------------------------------------------

    def evaluate(self, checkpoint: Path | str | None = None) -> dict[str, Any]:
        """Metrics of every validation and test set with the weights of a checkpoint; a collective, nothing is written.

        One that is not a number, as a value per class or a confusion matrix, is nested lists, or what the metric gave.

        Args:
            checkpoint: its directory, or that of a run, perhaps with a name (``runs/x/best``); or of this run ``best``
                or ``last``; None: the best, or the last where no metric is followed.

        Raises:
            CheckpointError: it is damaged, or no checkpoint; or this run has none.
        """
        store = CheckpointStore(self.directory.checkpoints) if self.checkpoint is None else self.checkpoint.store
        self.load_excluded()

        def choose() -> Path:
            name = checkpoint or ("best" if followed(store.checkpoints()) else "last")
            return find_source(store.directory / name if name in NAMES else name)

        def load(path: Path) -> Loaded:
            loaded = agreement.together(lambda: store.load(path, agreement.rank(), whole=False))
            agreement.agreed(lambda: load_evaluated(self.trainer.registry, loaded))
            return loaded

        loaded = read_chosen(choose, load, agreement.on_rank_0)
        self.trainer.state.iteration = loaded.manifest.iteration
        self.trainer.state.metrics.clear()
        values: dict[str, Any] = {}
        run = self.settings.run
        with devices.torch_kept():  # fit() has put back what its run has set
            devices.set_up_torch(run.matmul_precision, run.threads, run.deterministic)
            for evaluation in self.evaluations:
                evaluation(self.trainer)
                values |= {name: in_lists(value) for name, value in evaluation.values.items()}
        values |= self.trainer.state.metrics
        return {"checkpoint": str(loaded.path), "iteration": loaded.manifest.iteration, **dict(sorted(values.items()))}

    def describe(self) -> str:
        """What will run, the learning rate over the run, and all that ``trainer.describe()`` tells, as text."""
        head = f"{self.settings.name} writes to {self.directory.given}"
        return f"{head}\n{self.trainer.describe(self.loader, **self.length, rates=True)}"
