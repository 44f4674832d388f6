"""MLflow: a run that is continued, in the folder of ours or on a tracking server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ignite_engine.handlers.trackers.tracker import Row, Tracker, hyperparameters, numbers

_STATUS = {"completed": "FINISHED", "interrupted": "KILLED"}


class MLflow(Tracker):
    """Sends what is logged to MLflow; needs ``ignite-engine[mlflow]``.

    Args:
        directory: of the run.
        experiment: of MLflow.
        run_name: None: that of the directory.
        config: the run's parameters, by dotted keys; logged once.
        tracking_uri: None: ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the directory.
        name: of its files in ``directory/trackers``; they hold the run's id: a resumed run continues its MLflow run.

    MLflow drops no point: after a roll-back it gets what is later than all that it has. A run that is active in the
    training's process is another one.
    """

    extra, takes_again = "mlflow", False

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
        super().__init__(directory, name=name)
        self.experiment, self.run_name, self.config, self.tracking_uri = experiment, run_name, config, tracking_uri
        self._client: Any = None
        self._id = ""

    def begin(self, first: int, kept: dict[str, Any], run: Mapping[str, Any]) -> None:
        import mlflow

        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.directory}/mlflow.db"
        self._client = mlflow.MlflowClient(uri)
        if "id" in kept:
            self._id = kept["id"]
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=self.run_name or self.directory.name).info.run_id
        kept["id"] = self._id
        for key, value in hyperparameters(self.config or {}).items():
            self._client.log_param(self._id, key, value)

    def push(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, number in numbers(row).items():
                self._client.log_metric(self._id, name, number, step=row["iteration"])

    def end(self, outcome: Mapping[str, Any]) -> None:
        self._client.set_tag(self._id, "reason", outcome["reason"] or "")
        self._client.set_terminated(self._id, _STATUS.get(outcome["status"], "FAILED"))
