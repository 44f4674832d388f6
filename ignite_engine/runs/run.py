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

from ignite_engine.checkpoint.lock import read_chosen
from ignite_engine.checkpoint.retention import BestCheckpoint
from ignite_engine.checkpoint.shards import is_sharded
from ignite_engine.checkpoint.sources import NAMES, find_source, followed, scored_by
from ignite_engine.checkpoint.states.loading import load_evaluated
from ignite_engine.checkpoint.states.model_and_optimizer import unwrap
from ignite_engine.checkpoint.store import CheckpointStore, Loaded
from ignite_engine.data.readers import Place
from ignite_engine.data.workers import note_dead_worker
from ignite_engine.errors import Interrupted, NotExact, PeerFailed, StateMismatch, one_line
from ignite_engine.events import Phase
from ignite_engine.loop.describe import lr_text, model_table
from ignite_engine.ranks import agreement, attempt
from ignite_engine.ranks.watch import cause_of, known_failure, on_failure, reason_of
from ignite_engine.runs.code import commit_of_code
from ignite_engine.runs.config.load import Config
from ignite_engine.runs.config.named import parameters_of
from ignite_engine.runs.run_directory import PhaseTimes, RunDirectory, weights_sha256
from ignite_engine.runs.task import Task
from ignite_engine.schedules import Schedule
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
        total: updates of a run that is not resumed with other groups, data or ranks; None: windows do not say.
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
    total: int | None
    schedules: Mapping[str, Any]
    startup: PhaseTimes
    config: dict[str, Any]
    checkpoint: Checkpoint | None = None
    first_iteration: int | None = None
    load: Callable[[], object] | None = None
    write_report: Callable[[], Path] | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    _metrics_before: Mapping[str, Any] = field(default_factory=dict)
    _differences: Sequence[str] = ()
    _is_recorded: bool = False
    _resumed: Path | None = None

    @property
    def length(self) -> Mapping[str, int]:
        """``max_epochs``, ``max_iters`` or both, as ``trainer.run`` takes it."""
        limits = {"max_iters": self.settings.run.max_iterations, "max_epochs": self.settings.run.max_epochs}
        return {key: value for key, value in limits.items() if value is not None}

    @property
    def evaluations(self) -> Iterable[Evaluation]:
        """New evaluations of each validation and test set; each writes ``trainer.state.metrics`` when called."""
        from ignite_engine.runs.evaluations import Evaluations

        known, _ = parameters_of(Evaluations)
        entry = {key: value for key, value in self.settings.handler("Evaluation").items() if key in known}
        return Evaluations(self, **entry).of({**self.task.val_sets, **self.task.test_sets})

    def load_excluded(self) -> bool:
        """Load the sources before a checkpoint, if those of this run are saved without some of the weights."""
        if self.load is None or self.checkpoint is None or not self.checkpoint.options.exclude:
            return False
        self.load()
        return True

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last value of everything that was measured, by name."""
        metrics: Mapping[str, float] = self.summary.get("metrics", {})
        return metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was logged at each log point, and by a follower: ``pandas.DataFrame(run.history)`` is a table of it."""
        return list(self.directory.logged())

    def __repr__(self) -> str:
        if not self.summary:
            return f"Run({self.directory.given}: not trained)"
        values = "".join(f", {key} {value:g}" for key, value in self.metrics.items() if key == "loss" or "val/" in key)
        return f"Run({self.directory.given}: {self.summary['status']} at iteration {self.summary['iteration']}{values})"

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
            return self._train()

    def _take_folder(self, held: contextlib.ExitStack) -> None:
        """Lock the folder; a run that it holds is moved aside, or refused, where the config says so."""
        directory, section = self.directory, self.settings.run
        key = "restart" if section.restart else "directory"
        try:
            if section.restart and (aside := directory.move_aside()) is not None:
                logger.info("The run that was in %s is now in %s.", directory.given, aside)
            held.enter_context(directory.held())
        except (OSError, ValueError) as error:
            problem = str(error) if isinstance(error, ValueError) else one_line(error)
            complaint = f"got '{getattr(section, key)}', but the folder cannot be used: {problem}."
            raise self.settings.error(f"run.{key}", complaint) from None
        if section.must_be_new and (files := directory.files_of_a_run()):
            raise self.settings.error(
                "run.must_be_new",
                f"got true, but {directory.given} holds a run ({', '.join(files)}); give another run.directory, or set "
                "it to false to resume.",
            )

    def _train(self) -> dict[str, Any]:
        trainer, rank = self.trainer, agreement.rank()
        resumed: Path | None = None
        # until its settings are in force, a start leaves the record of a run as it was
        self._is_recorded = not self.directory.config.exists()
        try:
            with self.startup("directory"):
                if rank == 0 and self._is_recorded:
                    self._begin_directory()
            with self.startup("resume"):
                try:
                    resumed = self._resumed = self.begin()
                finally:
                    self._log_differences()
                if resumed is None and rank == 0:
                    self._set_old_metrics_aside()
            self.first_iteration = trainer.state.iteration
            self.startup.log()
            if self.first_iteration:
                self._metrics_before = self.directory.read_summary().get("metrics", {})
            if self._is_recorded:
                self._write_summary("running", resumed)
            trainer.run(self.loader, **self.length)
        except BaseException as raised:
            error, status = cause_of(raised), trainer.state.status
            note_dead_worker(error, self.loader, getattr(trainer.progress.source, "place", Place()).batch)
            # before its first event, or by what nothing has claimed; it has not become another run
            refused = not self._is_recorded and (status == "created" or isinstance(error, StateMismatch | NotExact))
            stopped = isinstance(error, KeyboardInterrupt | Interrupted) and status not in ("interrupted", "failed")
            # while GracefulStop does not listen; where a rank has failed a launcher signals those that live
            if stopped and known_failure() is None:
                number = error.signal if isinstance(error, Interrupted) else signal.SIGINT
                status, trainer.state.reason = "interrupted", signal.Signals(number).name
            status = status if status in ("interrupted", "failed") else "failed"
            trainer.state.reason = trainer.state.reason or reason_of(error)
            if status == "failed" and not isinstance(error, PeerFailed):  # which is in the log already
                logger.error(
                    "The run failed: %s: %s", type(error).__name__, error, extra={"console": False}, exc_info=True
                )
            # stopped while it resumes it is at no iteration, and the record is that of the start before
            if not refused or (status == "interrupted" and self.first_iteration is not None):
                summary = self._write_summary(status, resumed)
                report = self._write_report()
                if status == "interrupted":
                    self._log_outcome(summary, report)
                self._end_trackers(summary)
            if error is not raised:
                raise error from raised
            raise
        summary = self._write_summary(trainer.state.status, resumed)
        if self._differences and not self._is_recorded:
            logger.warning(
                "The run was at its end, so nothing was trained with the settings that differ: %s stays as it was, and "
                "%s has the settings of each start. To train with them give another directory, or restart (fit: "
                "restart=True, config: run.restart), which moves this run aside.",
                *(self.directory.config.name, self.directory.starts.name),
            )
        self._log_outcome(summary, self._write_report())
        self._end_trackers(summary)
        return summary

    def keep_record(self, trainer: Trainer) -> None:
        """At the end of STARTED: the settings are in force."""
        trainer.registry.check_all_claimed()
        end = trainer.last_iteration
        trains = end is None or trainer.state.iteration < end
        if trains and not self._is_recorded:
            self._is_recorded = True
            if agreement.rank() == 0 and (self._differences or not attempt.current.is_known):
                self._begin_directory()
            self._write_summary("running", self._resumed)

    keep_record.phase = Phase.LAST  # type: ignore[attr-defined]  # read by the Trainer

    def take_over(self) -> None:
        """Load the newest checkpoint, and read the summary, of a run that another process has trained."""
        self.begin()
        self.summary = self.directory.read_summary()

    def begin(self) -> Path | None:
        """Resume the newest checkpoint, or else load other weights if asked to; rank 0 decides."""
        has_loaded = self.load_excluded()
        options = self.settings.handler("Checkpoint").get("resume") or {}
        resumed = self.checkpoint.resume(**options) if self.checkpoint is not None else None
        if resumed is None and self.load is not None and not has_loaded:
            self.load()
        return resumed

    def log_length(self, trainer: Trainer) -> None:
        """On STARTED: a fresh run's model, and whether there is anything to train."""
        state, epochs, end = trainer.state, trainer.progress.epochs_completed, trainer.last_iteration
        if state.start is Start.FRESH and agreement.rank() == 0:
            update: Any = trainer.update  # build_run gave it an Update
            entry = self.settings.handlers.get("MetricLogger")
            on_console = entry is not None and entry.get("console") is not False
            for line in model_table(update.model, Parameters(update.optimizers).all()):
                logger.info("%s", line, extra={"console": on_console})
        if end is not None and state.iteration >= end:
            epoch_or_iteration = (
                ("epoch", epochs, state.max_epochs)
                if state.max_iters is None or state.iteration < state.max_iters
                else ("iteration", state.iteration, state.max_iters)
            )
            logger.info(
                "The run is at its end (%s %d of %d): it is only evaluated. A larger limit trains it further, "
                "restart=True (config: run.restart) or another directory trains anew.",
                *epoch_or_iteration,
            )

    def evaluate(self, checkpoint: Path | str | None = None) -> dict[str, Any]:
        """Metrics of every validation and test set with the weights of a checkpoint; a collective, nothing is written.

        One that is not a number, as a value per class or a confusion matrix, is nested lists, or what the metric gave.

        Args:
            checkpoint: its directory, or that of a run, perhaps with a name (``runs/x/best``); or of this run ``best``
                (by the config's metric, or that which the run followed) or ``last``; None: the best, or the last where
                there is no best one.

        Raises:
            CheckpointError: it is damaged, or no checkpoint.
            FileNotFoundError: this run has none.
        """
        store = CheckpointStore(self.directory.checkpoints) if self.checkpoint is None else self.checkpoint.store
        self.load_excluded()

        def load(path: Path) -> Loaded:
            loaded = agreement.together(lambda: store.load(path, agreement.rank(), whole=False))
            agreement.agreed(lambda: load_evaluated(self.trainer.registry, loaded))
            return loaded

        loaded = read_chosen(lambda: self._chosen(store, checkpoint), load, agreement.on_rank_0)
        self.trainer.state.iteration = loaded.manifest.iteration
        self.trainer.state.metrics.clear()
        values: dict[str, Any] = {}
        for evaluation in self.evaluations:
            evaluation(self.trainer)
            values |= {name: in_lists(value) for name, value in evaluation.values.items()}
        values |= self.trainer.state.metrics
        return {"checkpoint": str(loaded.path), "iteration": loaded.manifest.iteration, **dict(sorted(values.items()))}

    def describe(self) -> str:
        """What will run, the learning rate over the run, and all that ``trainer.describe()`` tells, as text."""
        model = unwrap(self.trainer.update.model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        length = ", ".join(f"{key} {value}" for key, value in self.length.items())
        head = [
            f"{self.config['run']['name']}: {type(model).__name__}, {parameters:,} parameters",
            f"Runs for {self.total} updates ({length})" if self.total else f"Runs until its windows end ({length})",
            f"Writes to {self.directory.given}",
        ]
        for name, schedule in self.schedules.items():
            of = f" of {name}" if self.settings.optimizers else ""
            is_known = isinstance(schedule, Schedule)
            head.append(f"Schedule{of}: {schedule if is_known else type(schedule).__name__}")
            head += lr_text(schedule, self.total) if is_known and self.total else []
        return "\n".join([*head, self.trainer.describe(self.loader, **self.length, rates=False)])

    def _begin_directory(self) -> None:
        self.directory.write_config(self.config)
        self.directory.write_environment(agreement.world_size(), commit_of_code())

    def _log_differences(self) -> None:
        """How the config differs from that of the last start."""
        if agreement.rank() != 0:
            return
        self._differences = self.directory.differences(self.config)
        for line in self._differences:
            logger.info("Config differs from the run's last start: %s", line)

    def _log_outcome(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """How the run ended, for a stop where the same command resumes, and last the best checkpoint and the report."""
        if summary["status"] == "interrupted":
            saved = self.checkpoint.store.checkpoints() if self.checkpoint else ()
            resumes = f"resumes from {saved[-1].path.name}" if saved else "starts over: no checkpoint was saved"
            logger.info(
                "Stopped by %s at iteration %d; the same command %s.", summary["reason"], summary["iteration"], resumes
            )
        else:
            logger.info(
                "Completed at iteration %d in %.1f s, weights %s; results are in %s.",
                summary["iteration"],
                summary["wall_s"],
                summary["weights_sha256"][:12],
                self.directory.given,
            )
        if (best := summary["best"]) is not None:
            path = self.directory.given / self.directory.checkpoints.name / best["checkpoint"]
            pages = "" if report is None else f"; report: {self.directory.given / report.name}"
            logger.info("Best %s%s.", BestCheckpoint(path, best["value"], best["iteration"], best["metric"]), pages)
        elif report is not None:
            logger.info("Report: %s.", self.directory.given / report.name)

    def _write_report(self) -> Path | None:
        if agreement.rank() != 0 or self.write_report is None:
            return None
        try:
            return self.write_report()
        except Exception as error:  # the outcome of the run does not depend on its report
            logger.warning("No report could be written: %s: %s.", type(error).__name__, error)
            return None

    def _end_trackers(self, summary: Mapping[str, Any]) -> None:
        if agreement.rank() == 0:
            from ignite_engine.handlers.trackers.tracker import end_of_run

            end_of_run(self.directory.path, summary["status"], summary["reason"])

    def _set_old_metrics_aside(self) -> None:
        """Log points of a run that left no checkpoint would appear twice."""
        for path in filter(Path.exists, (self.directory.metrics, self.directory.followed)):
            aside = path.with_suffix(".jsonl.old")
            os.replace(path, aside)
            logger.warning("%s belonged to a run without a checkpoint: it is now %s.", path, aside.name)

    def _chosen(self, store: CheckpointStore, asked: Path | str | None) -> Path:
        if asked is not None and str(asked) not in NAMES:
            return find_source(asked)
        options = None if self.checkpoint is None else self.checkpoint.options
        own = (options.best, options.mode) if options is not None and options.best is not None else None
        rule = own or followed(store.checkpoints())
        checkpoint_found = None
        if asked == "best" or (asked is None and rule):
            checkpoint_found = store.best(*(rule or scored_by(store)))  # which says how to set one
        if checkpoint_found is None and asked != "best":
            checkpoint_found = store.latest().checkpoint
        if checkpoint_found is None:
            scored = f" with {rule[0]}" if asked == "best" and rule else ""
            raise FileNotFoundError(
                f"{store.directory} holds no valid checkpoint{scored}; train first, or give --checkpoint."
            )
        return checkpoint_found.path

    def _plain_metrics(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """What was measured, as JSON has it; handlers may have written a value after the last log point."""
        metrics = {}
        for name, value in sorted({**before, **self.trainer.state.metrics}.items()):
            try:
                metrics[name] = plain_metric(name, value)
            except ValueError as error:
                logger.warning("summary.json lacks a value: %s", error)
        return metrics

    def _best(self) -> dict[str, Any] | None:
        """The best checkpoint of the run so far, as ``summary.json`` has it."""
        if self.checkpoint is None or self.first_iteration is None or agreement.rank() != 0:
            return None
        if (best := self.checkpoint.best) is None:
            return None
        mode = self.checkpoint.options.mode
        return {
            **{"metric": best.metric, "mode": mode, "value": best.value},
            **{"iteration": best.iteration, "checkpoint": best.path.name},
        }

    def _write_failure(self, line: str) -> None:
        """A rank failed; this one writes it, whichever it is. The main thread may be blocked and never do so."""
        so_far = {} if self.first_iteration is None else self._so_far()
        try:
            summary = {**self.directory.read_summary(), **so_far, "status": "failed", "reason": line}
            self.directory.write_summary(summary)
        except OSError as error:
            logger.error("%s could not be written: %s.", self.directory.summary, error)

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
            "metrics": self._plain_metrics(before),
            "wall_s": time.perf_counter() - self.startup.began,
            "written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _write_summary(self, status: str, resumed: Path | None) -> dict[str, Any]:
        """Write ``summary.json`` on rank 0 and return its content."""
        state, update = self.trainer.state, self.trainer.update
        model = unwrap(update.model)
        digest = None
        failed = status == "failed"
        # of a sharded model peers, which may be gone, hold the rest
        if status != "running" and not (failed and any(map(is_sharded, model.state_dict().values()))):
            with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
                digest = weights_sha256(model)
        start = "restart" if resumed else "fresh" if self.load is None else "fine-tune"
        has_started = self.first_iteration is not None
        summary: dict[str, Any] = {
            "status": status,
            "reason": state.reason if status != "running" else None,
            **self._so_far(),
            "best": self._best(),
            "weights_sha256": digest,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "world_size": agreement.world_size(),
            "start": start if has_started else None,
            "resumed_from": resumed.name if resumed else None,
            "startup_s": dict(self.startup.seconds),
            "checkpoints": asdict(self.checkpoint.times) if self.checkpoint else {},
        }
        self.summary = summary
        if agreement.rank() == 0:
            try:
                if status != "running" and has_started and not self.directory.config.exists():
                    logger.warning(
                        "%s was deleted during the run; what was written before is lost.", self.directory.given
                    )
                    self._begin_directory()
                self.directory.write_summary(summary)
            except OSError as error:
                if status != "failed":
                    raise
                # the error that failed the run is raised instead: often the same full disk
                logger.error("%s could not be written: %s.", self.directory.summary, error)
        return summary
