"""A run, built again from its stored config, or by the function that built it, to be replayed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from ignite.engine import Events

from ignite_engine import rng
from ignite_engine.checkpointing.layout import named_iteration
from ignite_engine.config import Config
from ignite_engine.config.load import config_from_dict
from ignite_engine.config.sections import OptimizerSection, ScheduleSection, Section
from ignite_engine.data.workers import end_workers
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay.logged import Lines
from ignite_engine.ext.replay.quiet import Quieted
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory, read_yaml
from ignite_engine.runs import recipe
from ignite_engine.runs.fit import only_building
from ignite_engine.runs.run import Run
from ignite_engine.task import IN_PYTHON
from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)

Build = Callable[[Path], Any]
"""``build(directory)`` builds the run as its script does, without resuming and training.

It returns what ``fit`` returns, or the trainer and the arguments of its ``run()``: ``(trainer, {"data": loader})``.
"""

_OFF: dict[str, dict[str, Any]] = {
    "run": {"time_limit": None, "stop_file": None, "must_be_new": False, "restart": False},
    "data": {"persistent_workers": False},
    "evaluation": {"sanity_batches": 0},
    "logging": dict.fromkeys(
        ("console", "progress", "memory", "throughput", "clearml", "tensorboard", "wandb", "mlflow", "report"),
        False,
    ),
    "profiler": {"active": None},
}
"""Settings that decide nothing of what is trained, and would write or measure."""


@dataclass
class Rebuilt:
    """A run that is built, quiet, and has loaded where it begins.

    Attributes:
        arguments: of ``trainer.run``.
        began_at: the checkpoint that it goes on from; None: the start of the run.
    """

    trainer: Trainer
    arguments: Mapping[str, Any]
    quieted: Quieted
    began_at: Path | None = None
    _run: Run | None = None
    _others: list[str] = field(default_factory=list)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The handler that saves the run."""
        return next(iter(self.quieted.checkpoints), None)

    def close(self) -> None:
        """The replay is over: end the workers of a loader of the user's own that are persistent."""
        data = self.arguments.get("data")
        end_workers(getattr(data, "_iterator", None), data)

    def begin(self) -> None:
        """Load the checkpoint from which it is replayed, or what a fresh start loads; a collective."""
        if self._run is not None:
            self.began_at = self._run.begin()
            self._run.first_iteration = self.trainer.state.iteration
        else:
            for checkpoint in self.quieted.checkpoints:
                self.began_at = self.began_at or checkpoint.resume()
        unclaimed = self.trainer.resume_state.unclaimed
        self.quieted.keep_states(self.trainer, [name for name in self._others if name in unclaimed])


def rebuild(directory: Path, build: Build | None, stored: Mapping[str, Any], before: int) -> Rebuilt:
    """Build a run and make it quiet; nothing is loaded yet. A collective.

    Args:
        build: of a run that no config names; None: by its stored config.
        stored: that config, empty if there is none.
        before: it will begin at the newest checkpoint before this iteration.

    Raises:
        ReplayError: one line; there is no run, or ``build`` does not give one.
        ConfigError: its config or its task cannot be built again.
    """
    run: Any
    if build is None:
        run = recipe.build_run(_quiet_config(directory, stored))
    else:
        with only_building():
            run = build(directory)
    if isinstance(run, Run):
        trainer: Any = run.trainer
        arguments: Any = {"data": run.loader, **run.length}
    else:
        trainer, arguments = run if isinstance(run, tuple) and len(run) == 2 else (run, None)
        if not isinstance(trainer, Trainer) or not isinstance(arguments, Mapping):
            raise ReplayError(
                "build(directory) must return the run of fit(), or the trainer and the arguments of its run(), such as "
                f"(trainer, {{'data': loader, 'max_epochs': 5}}); got a {type(run).__name__}."
            )
    if trainer.resume_state.is_pending:
        raise ReplayError("build(directory) has resumed a checkpoint: leave that to the replay, and only build.")
    rebuilt = Rebuilt(trainer, arguments, Quieted(trainer, before, stored or None))
    if isinstance(run, Run):
        trainer.remove_event_handler(run.keep_record, Events.STARTED)
        rebuilt._run, rebuilt._others = run, sorted(run.log_states)
        run.log_states = frozenset()
    return rebuilt


def config_at(directory: Path, before: int) -> dict[str, Any]:
    """The config of the start that trained the iteration, as stored; empty: the run has none.

    Raises:
        ReplayError: there is no run, or its config cannot be read.
    """
    files = RunDirectory(directory)
    if not directory.is_dir():
        raise ReplayError(f"{directory} does not exist: expected the folder of a run.")
    starts = [line for line in files.read_history() if isinstance(line.get("config"), dict)]
    found = [line["config"] for line in starts if line["iteration"] < before]
    if found:
        return dict(found[-1])
    if not files.config.exists():
        return {}
    try:
        values = read_yaml(files.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ReplayError(f"{files.config} cannot be read: {' '.join(str(error).split())}") from None
    return values if isinstance(values, dict) else {}


def iterations_of(directory: Path) -> int:
    """How far the run has come, as its files say."""
    files = RunDirectory(directory)
    summary = files.read_summary().get("iteration")
    saved = map(named_iteration, files.checkpoints.glob("*"))  # others may lie among them
    return max([summary if isinstance(summary, int) else 0, Lines(files.metrics).last, *filter(None, saved)])


def environment_of(directory: Path) -> dict[str, Any]:
    """What the run's last start has recorded of its machine; empty: nothing."""
    try:
        values = json.loads(RunDirectory(directory).environment.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _quiet_config(directory: Path, stored: Mapping[str, Any]) -> Config:
    """The stored config with everything off that writes."""
    if not stored:
        raise ReplayError(f"{directory} holds no config.yaml: give the function that builds the run (build, --build).")
    if stored.get("task") == IN_PYTHON:
        raise ReplayError(
            f"{directory} was made by fit() in Python: give the function that calls it (build, --build FILE:FUNCTION)."
        )
    values = _loadable(stored)
    for section, settings in _OFF.items():
        values.setdefault(section, {}).update(settings)
    values["run"]["directory"] = str(directory)
    values["task"] = _where_it_was(values["task"], directory)
    return config_from_dict(values)


def _loadable(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the sections in whose place is what the task has made, a scheduler of its own say."""

    values = {key: dict(value) if isinstance(value, Mapping) else value for key, value in stored.items()}
    models: dict[str, type[Section]] = {"optimizer": OptimizerSection, "schedule": ScheduleSection}
    for section, model in models.items():
        try:
            model.model_validate(values.get(section, {}))
        except ValueError:  # pydantic's error is one
            del values[section]
    return values


def _where_it_was(task: str, directory: Path) -> str:
    """A task's file with its whole path, where it was found when the run was started."""
    file, _, function = task.rpartition(":")
    if not file.endswith(".py") or Path(file).is_absolute():
        return task
    environment = environment_of(directory)
    worked_in = Path(environment.get("working_directory", "."))
    configs = [worked_in / word for word in environment.get("command", []) if str(word).endswith((".yaml", ".yml"))]
    folders = [folder for config in configs for folder in config.parents]
    folders += [worked_in, *directory.resolve().parents]
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    return task if found is None else f"{found}:{function}"


def check_ranks(directory: Path, stored: Mapping[str, Any]) -> None:
    """Refuse another number of ranks than the run had, unless its bits do not depend on it.

    Raises:
        ReplayError: one line.
    """
    had, now = environment_of(directory).get("world_size", 1), agreement.world_size()
    invariant = stored.get("update", {}).get("accumulate") == "rank_invariant"
    if now != had and not (invariant and now == 1):
        raise ReplayError(
            f"{directory} was trained on {had} ranks, and this is {now}: replay it on as many, such as by "
            f"--nproc-per-node {had}{' or 1' if invariant else ''}."
        )


@contextmanager
def as_it_was(directory: Path) -> Iterator[None]:
    """The number of threads that the run had; afterwards torch and all random numbers are as before."""
    threads, had = torch.get_num_threads(), environment_of(directory).get("threads")
    with ExitStack() as stack:
        stack.enter_context(rng.isolated())
        stack.callback(torch.set_num_threads, threads)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if isinstance(had, int) and had != threads:
            torch.set_num_threads(had)
        yield
