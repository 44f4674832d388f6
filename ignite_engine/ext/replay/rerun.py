"""A run trained again up to one of its iterations: the same run in another folder, from the checkpoint before."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from ignite.engine import Events

from ignite_engine import devices, rng
from ignite_engine.checkpoint.layout import named_iteration
from ignite_engine.checkpoint.lock import in_use
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.data.workers import end_workers
from ignite_engine.errors import CheckpointError, ReplayError
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.loop import bus
from ignite_engine.loop.intervals import Clock
from ignite_engine.ranks import agreement
from ignite_engine.runs import recipe
from ignite_engine.runs.config import Config
from ignite_engine.runs.config.load import validated
from ignite_engine.runs.config.yaml_file import ConfigSource
from ignite_engine.runs.fit import built_with
from ignite_engine.runs.run import Run
from ignite_engine.runs.run_directory import RunDirectory, read_yaml
from ignite_engine.runs.task import IN_PYTHON
from ignite_engine.text import METRICS, lines_of
from ignite_engine.trainer import Trainer

Build = Callable[[Path], Any]
"""``build(directory)`` builds the run in that folder: it calls ``fit``, or returns a trainer and what its run() gets.

``(trainer, {"data": loader, "max_epochs": 5})`` is neither resumed nor trained.
"""
Call = Callable[[Trainer], object]

OFF: dict[str, dict[str, Any] | None] = {
    "Evaluation": {"sanity_batches": 0},
    "Checkpoint": {"memory": None, "mirror": None},
    "MetricLogger": {"console": False},
    **dict.fromkeys(("ClearML", "MLflow", "Profiler", "Progress", "Report", "StopFile")),
    **dict.fromkeys(("TensorBoard", "WallClockLimit", "WandB")),
}
"""Of handlers: what decides nothing of what is trained, and would speak, end the run early or write elsewhere."""


def moved_to(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested settings of a run for the same run in another folder.

    A handler that is turned off stays so, and one under a label of its own changes as its kind does.
    """
    run = {**values.get("run", {}), "restart": False, "directory": str(folder)}
    handlers = {**{label: {} for label in OFF}, **values.get("handlers", {})}
    for label, entry in handlers.items():
        if entry is not None and (kind := entry.get("use", label)) in OFF:
            handlers[label] = None if (change := OFF[kind]) is None else {**entry, **change}
    return {**values, "run": run, "handlers": handlers}


def rerun(
    run: str | Path,
    at: int,
    *,
    since: int | None = None,
    build: Build | None = None,
    attach: Call | None = None,
    call: Call | None = None,
    folder: str | Path | None = None,
) -> Path:
    """Train a run again up to the step boundary after one of its iterations, in a folder of its own; a collective.

    The newest valid checkpoint before that iteration and the log are copied, and the run goes on there as any run does:
    with everything that has a part in it, and with the settings of the start that trained the iteration. It logs what
    it logged, and ends with a checkpoint of the moment. Nothing in the run's own folder is written.

    Args:
        run: its folder.
        at: the iteration, from 1.
        since: begin at the newest checkpoint up to this iteration; None: at the newest before ``at``.
        build: builds a run that no config names, see :data:`Build`.
        attach: called with the trainer before it runs.
        call: called with the trainer at the moment, with ``state.batch``, gradients and random numbers in place.
        folder: a new one, where the run goes on; None: a temporary one, which is the caller's to delete.

    Returns:
        The folder.

    Raises:
        ReplayError: one line; there is no such run or iteration, or it had another number of ranks.
    """
    directory = Path(run)
    start, copy = agreement.on_rank_0(lambda: (start_of(directory, at), _make(directory, folder)))
    try:
        with _as_it_was(start), RunDirectory(copy).logging_to(agreement.rank(), console=False):
            trainer, train = built(build or _config_of(directory, copy, start), copy)
            _check_ranks(directory, trainer, start)
            _follow_clocks(trainer, directory)
            stores = [checkpoint.store.directory for checkpoint in checkpoints_of(trainer)]
            agreement.on_rank_0(lambda: _copy(directory, copy, stores, at - 1 if since is None else since))
            if attach is not None:
                attach(trainer)
            end_at(trainer, at, call, epochs=start.epochs)
            try:
                train()
            finally:  # persistent workers of a loader of the user's own
                end_workers(getattr(trainer.progress.user_data, "_iterator", None), trainer.progress.user_data)
        if trainer.state.iteration < at:
            raise ReplayError(
                f"Trained again, {directory} ends at iteration {trainer.state.iteration}, and it has come to {at}: it "
                "was trained further with other settings, or ended by a handler."
            )
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return copy


def checkpoints_of(trainer: Trainer) -> list[Checkpoint]:
    """The handlers that save the run."""
    return [obj for obj in trainer.registry.objects.values() if isinstance(obj, Checkpoint)]


def end_at(trainer: Trainer, at: int, call: Call | None = None, *, epochs: int = 0) -> None:
    """Let the run pause at the step boundary after an iteration, saved, after ``call``; attached last.

    Args:
        epochs: that are completed there: where data turns out to have ended an iteration has a second boundary.
    """

    def pause(within_epoch: bool) -> None:
        completed = trainer.progress.epochs_completed + (not within_epoch)
        if trainer.state.iteration == at and completed >= epochs:
            trainer.interrupt()

    def at_the_boundary() -> None:
        if trainer.should_interrupt and call is not None:
            call(trainer)

    at_the_boundary.phase = Phase.LAST  # type: ignore[attr-defined]  # read by the Trainer
    trainer.add_event_handler(Events.ITERATION_COMPLETED, pause, True)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, pause, False)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, at_the_boundary)


def iterations_of(directory: Path) -> int:
    """How far the run has come, as its files say."""
    files = RunDirectory(directory)
    logged = [line["iteration"] for line in lines_of(files.metrics)]
    saved = map(named_iteration, files.checkpoints.glob("*"))  # others may lie among them
    known: list[int] = [files.read_summary().get("iteration") or 0, *logged[-1:], *filter(None, saved)]
    return max(known)


@dataclass(frozen=True)
class Start:
    """A start of a run.

    Attributes:
        config: its settings; empty: they are not known.
        environment: what it ran with.
        epochs: that the run had completed where it saved the iteration that is asked for; 0: it did not.
    """

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    epochs: int = 0

    @property
    def world_size(self) -> int:
        return int(self.environment.get("world_size", 1))


def start_of(directory: Path, at: int) -> Start:
    """The start that trained an iteration: it has saved the first checkpoint from there on, or it is the last one.

    Raises:
        ReplayError: there is no such run or iteration, or the run's config cannot be read.
    """
    if not directory.is_dir():
        raise ReplayError(f"{directory} does not exist: expected the folder of a run.")
    if not 1 <= at <= (known := iterations_of(directory)):
        raise ReplayError(f"{directory} has {known} iterations, got {at}.")
    files = RunDirectory(directory)
    try:
        config, environment = (
            read_yaml(path.read_text(encoding="utf-8")) if path.exists() else {}
            for path in (files.config, files.environment)
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ReplayError(f"{directory} cannot be replayed: {' '.join(str(error).split())}") from None
    store, epochs = CheckpointStore(files.checkpoints), 0
    for checkpoint in reversed(store.checkpoints()):
        if checkpoint.iteration < at:
            break
        config, environment = checkpoint.manifest.config or {}, environment | checkpoint.manifest.environment
        if checkpoint.iteration == at:
            with suppress(CheckpointError):  # a damaged one says nothing
                loaded = store.load(checkpoint.path, mmap=True)
                epochs = {**loaded.shared, **loaded.local}["trainer"]["epochs_completed"]
    return Start(config, environment, epochs)


def _check_ranks(directory: Path, trainer: Trainer, start: Start) -> None:
    """Refuse what reads other runs, and another number of ranks, unless the run's bits do not depend on it."""
    for obj in trainer.registry.objects.values():
        if reason := getattr(obj, "outside_of_run", None):
            raise ReplayError(f"{directory} cannot be replayed: it {reason}, and which it was is not kept.")
    had, now, any_ranks = start.world_size, agreement.world_size(), trainer.update.rank_invariant
    if now != had and not any_ranks:
        raise ReplayError(
            f"{directory} was trained on {had} ranks, and this is {now}: replay it on as many, such as by "
            f"--nproc-per-node {had}."
        )


def _make(directory: Path, folder: str | Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="rerun-"))
    path = Path(folder).absolute()
    if path.resolve().is_relative_to(directory.resolve()):
        raise ReplayError(f"{folder} is in the folder of the run, which is only read: give another one.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ReplayError(f"{folder} is there already: give the name of a new folder.")
    path.mkdir(parents=True, exist_ok=True)
    return path


def built(recipe_or_build: Config | Build, folder: Path) -> tuple[Trainer, Callable[[], object]]:
    """The trainer of a run in ``folder``, and a function that resumes and trains it.

    Args:
        recipe_or_build: its config, of that folder, or what builds it.

    Raises:
        ReplayError: one line; ``build`` does not give one, or it would write elsewhere.
        ConfigError: its config or its task cannot be built.
    """
    made: Any
    if isinstance(recipe_or_build, Config):
        made = recipe.build_run(recipe_or_build)
    else:
        with built_with(partial(moved_to, folder)):
            made = recipe_or_build(folder)
    if isinstance(made, Run):
        return made.trainer, made.train
    trainer, arguments = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(trainer, Trainer) or not isinstance(arguments, Mapping):
        raise ReplayError(
            "build(directory) must return the run of fit(), or the trainer and the arguments of its run(), such as "
            f"(trainer, {{'data': loader, 'max_epochs': 5}}); got a {type(made).__name__}."
        )
    if trainer.resume_state.is_pending:
        raise ReplayError("build(directory) has resumed a checkpoint: leave that to the replay, and only build.")
    loggers = [obj for obj in trainer.registry.objects.values() if isinstance(obj, MetricLogger)]
    written = [checkpoint.store.directory for checkpoint in checkpoints_of(trainer)]
    written += [logger.directory for logger in loggers if logger.directory is not None]
    outside = [str(path) for path in written if not path.resolve().is_relative_to(folder.resolve())]
    outside += [name for checkpoint in checkpoints_of(trainer) for name in checkpoint.tiers]
    if outside:
        raise ReplayError(f"build(directory) must write into directory alone: leave out {', '.join(outside)}.")

    def train() -> None:
        for checkpoint in checkpoints_of(trainer):
            checkpoint.resume()
        trainer.run(**arguments)

    return trainer, train


def _config_of(directory: Path, folder: Path, start: Start) -> Config:
    """The config of the same run in another folder."""
    stored = start.config
    if stored.get("task", IN_PYTHON) == IN_PYTHON:
        made = "was made by fit() in Python" if "task" in stored else "holds no config that names a task"
        raise ReplayError(f"{directory} {made}: give the function that builds the run (build, --build FILE:FUNCTION).")
    # files of the task and of handlers are looked for where they were found
    known = start.environment
    configs = [word for word in known.get("command", []) if str(word).endswith((".yaml", ".yml"))]
    path = Path(known.get("working_directory", "."), *configs[:1]) if configs else directory / "config.yaml"
    return moved(stored, path, folder)


def moved(values: Mapping[str, Any], path: Path | None, folder: Path) -> Config:
    """The config of nested values, which are those of a file, for the same run in another folder."""
    return validated(ConfigSource(moved_to(folder, values), path))


def _follow_clocks(trainer: Trainer, directory: Path) -> None:
    """What comes by a clock comes where the run has logged."""
    logged = {line["iteration"] for line in lines_of(RunDirectory(directory).metrics)}
    for _, handler in bus.filtered(trainer):
        if isinstance(handler.filter, Clock):
            handler.filter = lambda engine, count: count in logged


def _copy(directory: Path, folder: Path, stores: Iterable[Path], until: int) -> None:
    """Copy the newest valid checkpoint up to an iteration of each store, and the logs if there is one."""
    for store in stores:
        there = CheckpointStore(directory / store.relative_to(folder))
        for checkpoint in reversed(there.checkpoints()):
            with in_use(checkpoint.path):
                if checkpoint.iteration <= until and not there.verify(checkpoint.path):
                    shutil.copytree(checkpoint.path, store / checkpoint.path.name)
                    break
    if any(any(store.glob("*")) for store in stores):  # else the run begins anew
        for log in directory.glob("*.jsonl"):
            if log.name in (METRICS, "trail.jsonl"):
                shutil.copyfile(log, folder / log.name)


@contextmanager
def _as_it_was(start: Start) -> Iterator[None]:
    """The number of threads that the run had; afterwards torch and all random numbers are as before."""
    threads = torch.get_num_threads()
    with rng.isolated(), devices.torch_kept():
        torch.set_num_threads(start.environment.get("threads", threads))
        yield
