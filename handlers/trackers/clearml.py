"""ClearML: a task, offline in the run's folder or on the server that is configured."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ignite_engine.handlers.trackers.tracker import Row, Tracker, numbers
from ignite_engine.text import read_object


class ClearML(Tracker):
    """Sends metrics, config, environment, report, best checkpoint and outcome to a ClearML task.

    Args:
        directory: of the run. Offline, the session is in ``clearml/offline/<task id>`` below it, and after the run as a
            zip file beside it; ``clearml.Task.import_offline_session`` reads either.
        project: of ClearML.
        task: the task's name; None: that of the directory.
        config: reported as the task's hyperparameters and as a configuration object; None: the run's ``config.yaml``.
        tags: of the task.
        offline: None: online if a server is configured, by ``clearml.conf`` or ``CLEARML_`` variables.
        name: of its files in ``directory/trackers``; they hold the task's id: a resumed run continues its task.

    A value that is not finite is a line in the task's log. ``Task.current_task()`` is in the tracker's process only.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str = "ignite_engine",
        task: str | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        offline: bool | None = None,
        name: str = "clearml",
    ) -> None:
        super().__init__(directory, name=name)
        self.project, self.task, self.config, self.tags, self.offline = project, task, config, list(tags), offline
        self._task: Any = None

    def begin(self, first: int, kept: dict[str, Any], run: Mapping[str, Any]) -> None:
        """Continue the task that is ``kept``; an offline session drops its points from ``first`` on."""
        offline = not _has_server() if self.offline is None else self.offline
        folder, known = self.directory / "clearml", kept.get("id", "")
        if known.startswith("offline-") != offline:  # a session cannot be continued on a server, nor a task offline
            known = ""
        if self._task is not None:
            self._task.flush(wait_for_uploads=True)
        if known and offline:
            _drop_points(folder / "offline" / known / "metrics.jsonl", first)
        if self._task is None:
            self._task = self._begun(folder, known, offline, run["command"])
            kept["id"] = self._task.id
            self._task.connect_configuration(run["environment"], name="environment")
            stored = self.directory / "config.yaml"
            if config := self.config or (yaml.safe_load(stored.read_text("utf-8")) if stored.exists() else None):
                self._task.connect_configuration(config, name="config")
                self._task.set_parameters_as_dict(config)
            self._task.set_user_properties(status="running", reason="")

    def push(self, rows: Sequence[Row]) -> None:
        logger = self._task.get_logger()
        for row in rows:
            for name, number in numbers(row).items():
                title, _, series = name.partition("/")
                if math.isfinite(number):
                    logger.report_scalar(title, series or title, number, row["iteration"])
                else:  # ClearML would plot it as 0
                    logger.report_text(f"iteration {row['iteration']}: {name} is {number}", print_console=False)

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Send report and best checkpoint, by path, and close the task: completed, stopped or failed."""
        task = self._task
        offline, status, reason = task.id.startswith("offline-"), outcome["status"], outcome["reason"] or ""
        if (report := self.directory / "report.html").exists():
            task.upload_artifact("report", report, wait_on_upload=True)
        self._register_model(offline)
        self._task = None
        task.set_user_properties(status=status, reason=reason)
        task.flush(wait_for_uploads=True)
        task.close()
        if offline or status == "completed":  # which close() has said
            return
        if status == "failed":
            task.mark_failed(status_reason=reason, force=True)
        else:
            task.stopped(status_reason=reason, force=True)

    def _begun(self, folder: Path, known: str, offline: bool, command: list[str]) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.pop("CLEARML_OFFLINE_MODE", None)
        if offline:
            os.environ |= {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(folder)}
        sys.argv = command

        from clearml import Task
        from clearml.backend_interface.task.task import Task as BackendTask
        from clearml.config.cache import SessionCache

        tasks: Any = Task
        reporting: Any = BackendTask
        # with the subprocess a report blocks for seconds and close() takes up to two minutes
        reporting._report_subprocess_enabled = False
        if offline:
            SessionCache.SESSION_CACHE_FOLDER = str(folder)  # else a file in the user's home
        task = tasks.init(
            project_name=self.project,
            task_name=self.task or self.directory.name,
            tags=self.tags,
            reuse_last_task_id=False,
            continue_last_task=known or False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks={"detect_repository": not offline},
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        if known:
            task.set_initial_iteration(0)  # the log's iterations already continue
        return task

    def _register_model(self, offline: bool) -> None:
        """The best checkpoint, or else the newest, is the task's output model, by path; no file is uploaded."""
        from clearml import OutputModel

        manifests = self.directory.glob("checkpoints/iteration_*/manifest.json")
        checkpoint = max((path.parent for path in manifests), default=None)
        if best := read_object(self.directory / "summary.json").get("best"):
            checkpoint = self.directory / "checkpoints" / best["checkpoint"]
        if checkpoint is None:
            return
        output = OutputModel(task=self._task, name="checkpoint", framework="PyTorch")
        if offline:
            model: Any = output._get_base_model()
            model.locked = False  # clearml 2.1.12 reads it without setting it
        iteration = read_object(checkpoint / "manifest.json").get("iteration", 0)
        output.update_weights(register_uri=checkpoint.as_uri(), iteration=iteration, update_comment=False)


def _drop_points(path: Path, first: int) -> None:
    """Drop the points of an offline session from an iteration on, and a line that a killed process has torn."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events = json.loads(line)
        except ValueError:
            continue
        kept.append([event for event in events if event.get("iter", 0) < first])
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(events) + "\n" for events in kept if events), encoding="utf-8")
    os.replace(part, path)


def _has_server() -> bool:
    if os.environ.get("CLEARML_OFFLINE_MODE", "0").lower() not in ("", "0", "false"):
        return False
    file = Path(os.environ.get("CLEARML_CONFIG_FILE", "~/clearml.conf")).expanduser()
    return file.is_file() or any(os.environ.get(name) for name in ("CLEARML_API_HOST", "CLEARML_API_ACCESS_KEY"))
