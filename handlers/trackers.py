"""Weights & Biases and MLflow, by Ignite's own loggers: values, config and outcome under a run that resumes."""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.handlers.sinks import GuardedSink, Values, new_numbers, require, settings_of

_WANDB_HOST = "api.wandb.ai"
_MLFLOW_STATUS = {"completed": "FINISHED", "interrupted": "KILLED"}


class WandBSink:
    """A sink for Weights & Biases; needs ``ignite-engine[wandb]``. Rank 0 only.

    Args:
        directory: of the run; W&B writes into its ``wandb`` folder.
        project: of W&B.
        run_name: None: that of the directory.
        config: of the run.
        offline: None: online where ``WANDB_API_KEY`` or ``~/.netrc`` has a key, unless ``WANDB_MODE`` says otherwise.
        name: in checkpoints, which hold the run's id: a resumed run continues its W&B run, and what is there already is
            not sent again. Offline each process writes a folder, under the same id, for ``wandb sync``.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str = "ignite_engine",
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        offline: bool | None = None,
        name: str = "wandb",
    ) -> None:
        self.directory, self.name = Path(directory).absolute(), name
        self.project, self.run_name, self.config, self.offline = project, run_name, config, offline
        self.run_id: str | None = None
        self._written: dict[str, int] = {}
        self._logger: Any = None
        self._run: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Log what is new at each METRICS_READY, from STARTED until the run ends for any reason."""
        _attach_guarded(self, trainer, "wandb", self._start, self._end)

    def write(self, iteration: int, values: Values) -> None:
        new = new_numbers(iteration, values, self._written)
        if self._run is not None and new and iteration >= self._run.starting_step:
            self._run.log(new, step=iteration)
            self._written |= dict.fromkeys(new, iteration)

    def state_dict(self) -> dict[str, Any]:
        """The run's id, and the last iteration of each series."""
        return {"run_id": self.run_id, "written": dict(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the saved run when the training starts."""
        self.run_id, self._written = state["run_id"], dict(state["written"])

    def begin_anew(self) -> None:
        """A training starts over, with a run of its own."""
        self.run_id, self._written = None, {}

    def _start(self, trainer: Trainer) -> None:
        import wandb
        from ignite.handlers.wandb_logger import WandBLogger

        self.directory.mkdir(parents=True, exist_ok=True)
        offline = not _wandb_is_configured() if self.offline is None else self.offline
        self._logger = WandBLogger(
            project=self.project,
            name=self.run_name or self.directory.absolute().name,
            id=self.run_id,
            resume="allow" if self.run_id and not offline else None,
            dir=str(self.directory),
            config=dict(self.config or {}),
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),  # no lines of its own on ours
        )
        self._run = self._logger.run
        self.run_id = self._run.id

    def _end(self, trainer: Trainer) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.summary.update({"status": trainer.state.status, "reason": trainer.state.reason})
            run.finish(exit_code=int(trainer.state.status == "failed"))


class MLflowSink:
    """A sink for MLflow; needs ``ignite-engine[mlflow]``. Rank 0 only; values are sent by MLflow's own thread.

    Args:
        directory: of the run.
        experiment: of MLflow.
        run_name: None: that of the directory.
        config: the run's parameters, by dotted keys; logged once.
        tracking_uri: None: ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the directory.
        name: in checkpoints, which hold the run's id: a resumed run continues its MLflow run, and what is there already
            is not sent again. An MLflow run that is active in this thread is used, and not ended.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        experiment: str = "ignite_engine",
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
        name: str = "mlflow",
    ) -> None:
        self.directory, self.name = Path(directory).absolute(), name
        self.experiment, self.run_name, self.config, self.tracking_uri = experiment, run_name, config, tracking_uri
        self.run_id: str | None = None
        self._written: dict[str, int] = {}
        self._logger: Any = None
        self._is_ours = False

    def attach(self, trainer: Trainer) -> None:
        """Log what is new at each METRICS_READY, from STARTED until the run ends for any reason."""
        _attach_guarded(self, trainer, "mlflow", self._start, self._end)

    def write(self, iteration: int, values: Values) -> None:
        if self._logger is not None and (new := new_numbers(iteration, values, self._written)):
            self._logger.log_metrics(new, step=iteration, synchronous=False, run_id=self.run_id)
            self._written |= dict.fromkeys(new, iteration)

    def state_dict(self) -> dict[str, Any]:
        """The run's id, and the last iteration of each series."""
        return {"run_id": self.run_id, "written": dict(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the saved run when the training starts."""
        self.run_id, self._written = state["run_id"], dict(state["written"])

    def begin_anew(self) -> None:
        """A training starts over, with a run of its own."""
        self.run_id, self._written = None, {}

    def _start(self, trainer: Trainer) -> None:
        import mlflow
        from ignite.handlers.mlflow_logger import MLflowLogger

        self._is_ours = mlflow.active_run() is None
        if self._is_ours:
            self.directory.mkdir(parents=True, exist_ok=True)
            folder = self.directory.absolute()
            uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
            with _without_announcements("mlflow"):
                mlflow.set_tracking_uri(uri)
                mlflow.set_experiment(self.experiment)
                mlflow.start_run(run_id=self.run_id, run_name=None if self.run_id else self.run_name or folder.name)
        logger = MLflowLogger()
        started, self.run_id = self.run_id, logger.active_run.info.run_id
        if started == self.run_id:  # what was sent after the checkpoint is there, and it would be there twice
            client = mlflow.MlflowClient()
            for key in client.get_run(self.run_id).data.metrics:
                last = max(metric.step for metric in client.get_metric_history(self.run_id, key))
                self._written[key] = max(last, self._written.get(key, -1))
        elif self.config:
            logger.log_params(settings_of(self.config))
        self._logger = logger

    def _end(self, trainer: Trainer) -> None:
        logger, self._logger = self._logger, None
        if logger is None:
            return
        logger.flush_async_logging()
        logger.set_tag("reason", trainer.state.reason or "")
        if self._is_ours:
            logger.end_run(_MLFLOW_STATUS.get(trainer.state.status, "FAILED"))


def _attach_guarded(
    sink: Any, trainer: Trainer, package: str, start: Callable[[Trainer], None], end: Callable[[Trainer], None]
) -> None:
    guarded = GuardedSink(sink)
    guarded.attach(trainer)
    if idist.get_rank() != 0:
        return
    guarded.guard(require)(package)
    guarded_start, guarded_end = guarded.guard(start), guarded.guard(end)

    def start_and_end(trainer: Trainer) -> None:
        guarded_start(trainer)
        trainer.call_at_end(guarded_end)

    trainer.add_event_handler(Events.STARTED, start_and_end)


@contextlib.contextmanager
def _without_announcements(package: str) -> Iterator[None]:
    """Only warnings of what the package logs, on handlers of its own."""
    log = logging.getLogger(package)
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def _wandb_is_configured() -> bool:
    """Whether W&B can be reached without asking for a key."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode == "online"
    host = os.environ.get("WANDB_BASE_URL", f"https://{_WANDB_HOST}").partition("://")[2].partition("/")[0]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY")) or netrc.netrc().authenticators(host) is not None
    return bool(os.environ.get("WANDB_API_KEY"))
