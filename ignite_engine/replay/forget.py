"""``forget``: a run as if it had never seen some samples, from the newest checkpoint before their first use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ignite_engine import rng
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.config import Config, load_config
from ignite_engine.config.load import config_from_dict
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.errors import ReplayError
from ignite_engine.replay.rebuild import Build, config_at, environment_of, iterations_of, where_it_was
from ignite_engine.replay.stored import loadable
from ignite_engine.run_directory import RunDirectory, write_whole
from ignite_engine.runs import recipe
from ignite_engine.runs.components import agreed_task, check_fit
from ignite_engine.runs.exclusion import digest_of, read_indices, record_excluded, recorded, without_excluded
from ignite_engine.runs.fit import excluding, only_building
from ignite_engine.runs.loaders import data_loader
from ignite_engine.runs.run import Run
from ignite_engine.task import IN_PYTHON

LIST, RECORD = "excluded.txt", "forgotten.json"
"""The files of the new run that say what it has forgotten."""
_TRAINED = ("task", "task_options", "data", "optimizer", "optimizers", "schedule", "update")
"""Sections that decide on the weights."""


@dataclass(frozen=True)
class Use:
    """The first use of one of the samples."""

    iteration: int
    epoch: int
    sample: int


@dataclass(frozen=True)
class Forgetting:
    """What is to be done, and what it costs."""

    run: Path
    directory: Path
    config: dict[str, Any]
    """The config of the new run."""
    excluded: frozenset[int]
    first_use: Use | None
    checkpoint: Path | None
    """The newest before the first use; None: there is none."""
    checkpoint_iteration: int
    iterations: int
    """How far the run has come."""
    ranks: int

    def __str__(self) -> str:
        if self.first_use is None:
            return (
                f"{self.run} has used none of the samples in {self.iterations} iterations: nothing is to be forgotten."
            )
        use, since = self.first_use, "the beginning" if self.checkpoint is None else self.checkpoint.name
        again = self.iterations - self.checkpoint_iteration
        return (
            f"Sample {use.sample} is the first to be used, in iteration {use.iteration} (epoch {use.epoch}). "
            f"From {since} on {again} of {self.iterations} iterations are trained again, in {self.directory}."
        )


def forget(run: str | Path, samples: str | Path, directory: str | Path, build: Build | None = None) -> Forgetting:
    """Train a run of one process again as if it had never seen some samples; see :func:`plan_to_forget`."""
    forgetting = plan_to_forget(Path(run), Path(samples), Path(directory), build=build)
    if forgetting.first_use is not None:
        train_without(load_config(begin_to_forget(forgetting)), build)
    return forgetting


def train_without(config: Config, build: Build | None) -> None:
    """Train the run that :func:`begin_to_forget` has begun; a collective."""
    if build is None:
        with recipe.logged(config):
            recipe.build_run(config).train()
    else:
        with excluding(config.directory / LIST):
            build(config.directory)


def plan_to_forget(
    run: Path, samples: Path, directory: Path, ranks: int | None = None, build: Build | None = None
) -> Forgetting:
    """What forgetting takes; nothing is written.

    Args:
        samples: a file as of ``data.exclude``; what the run already excludes stays excluded.
        directory: of the new run.
        ranks: processes; None: as the run had.
        build: of a run of ``fit``: ``build(directory)`` calls it.

    Raises:
        ReplayError: one line; there is no run, or it cannot be had without these samples.
        ConfigError: its task or its data cannot be built again.
    """
    come = iterations_of(run)
    stored = config_at(run, come + 1)
    had = int(environment_of(run).get("world_size", 1))
    _check(run, directory, stored, had, ranks or had, come, build)
    values: dict[str, Any] = loadable(stored)
    values["task"] = where_it_was(values["task"], run)
    values["run"] |= {"directory": str(directory), "must_be_new": False, "restart": False}
    values["run"]["name"] = directory.resolve().name
    values["checkpoint"]["mirror"] = None  # it is the old run's
    values["data"]["exclude"] = str(samples)
    config = config_from_dict(values)
    loader = _loader(config, samples, build)
    size = len(loader.dataset)
    excluded, before = read_indices(samples, size), frozenset[int]()
    if (already := stored["data"].get("exclude")) is not None:
        before = read_indices(Path(already), size)
        if recorded(run) not in (None, digest_of(before)):
            raise ReplayError(
                f"{already} names other samples than those that {run} has left out: give it its list again."
            )
    first_use = _first_use(config, loader, excluded - before, had, come)
    found = [one for one in CheckpointStore(run / "checkpoints").checkpoints()]
    found = [one for one in found if first_use is not None and one.iteration < first_use.iteration]
    values["data"]["exclude"] = str(directory / LIST)
    newest = found[-1] if found else None
    return Forgetting(
        run,
        directory,
        values,
        excluded | before,
        first_use,
        None if newest is None else newest.path,
        0 if newest is None else newest.iteration,
        come,
        ranks or had,
    )


def _loader(config: Config, samples: Path, build: Build | None) -> Any:
    """The loader of the training set, or a refusal of data of which no sample can be left out."""
    with rng.isolated():
        if build is not None:
            with only_building(), excluding(samples):
                run = build(config.directory)
            if not isinstance(run, Run):
                raise ReplayError(f"build(directory) must return what fit() returns, got a {type(run).__name__}.")
            return run.loader
        rng.seed_everything(config.run.seed)
        task = agreed_task(config)
        check_fit(config, task)
        task = without_excluded(config, task)
        return data_loader(config, task, task.train_set, training=True)


def _check(run: Path, directory: Path, stored: dict[str, Any], had: int, ranks: int, come: int, build: Any) -> None:
    if not stored:
        raise ReplayError(f"{run} holds no config.yaml: expected the folder of a run.")
    if (stored.get("task") == IN_PYTHON) != (build is not None):
        what = "was made by fit(): give the function that calls it" if build is None else "is of a config: leave out"
        raise ReplayError(f"{run} {what} (build, --build FILE:FUNCTION).")
    if directory.exists() and not directory.is_dir():
        raise ReplayError(f"{directory} is not a folder: give another --directory, which is made.")
    if RunDirectory(directory).files_of_a_run():
        raise ReplayError(f"{directory} holds a run: give another --directory, which is made.")
    if directory.resolve().is_relative_to(run.resolve()):
        raise ReplayError(f"{directory} is in the folder of the run, which is only read: give another --directory.")
    if ranks != had and not stored["update"].get("rank_invariant"):
        raise ReplayError(f"{run} was trained on {had} ranks, got {ranks}: leave --nproc-per-node out.")
    for start in RunDirectory(run).read_history():
        settings = start.get("config") or stored
        if (changed := [key for key in _TRAINED if settings.get(key) != stored.get(key)]) and start["iteration"] < come:
            raise ReplayError(
                f"{run} has changed its settings ({', '.join(changed)}) after iteration {start['iteration']}: forget "
                "trains with one set of them."
            )
    if stored["checkpoint"].get("delta_rows"):
        raise ReplayError(f"{run} saves changed rows alone (checkpoint.delta_rows), which forget cannot take apart.")
    if stored["checkpoint"].get("exclude"):
        raise ReplayError(f"{run} does not save all of its state (checkpoint.exclude): forget cannot begin from it.")


def begin_to_forget(forgetting: Forgetting) -> Path:
    """Make the folder of the new run, at the checkpoint: training it resumes there.

    Returns:
        Its config.
    """
    new, old = RunDirectory(forgetting.directory), RunDirectory(forgetting.run)
    new.path.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{index}\n" for index in sorted(forgetting.excluded))
    write_whole(new.path / LIST, text)
    record_excluded(new.path, forgetting.excluded)
    record = {
        "run": str(forgetting.run.resolve()),
        "config": config_at(forgetting.run, forgetting.iterations + 1),
        "samples": len(forgetting.excluded),
        "sha256": digest_of(forgetting.excluded),
        "first_use": None if forgetting.first_use is None else asdict(forgetting.first_use),
        "checkpoint": None if forgetting.checkpoint is None else forgetting.checkpoint.name,
    }
    write_whole(new.path / RECORD, f"{json.dumps(record, indent=1)}\n")
    if forgetting.checkpoint is not None:
        new.checkpoints.mkdir(exist_ok=True)
        for checkpoint in CheckpointStore(old.checkpoints).checkpoints():
            if checkpoint.iteration <= forgetting.checkpoint_iteration:
                shutil.copytree(checkpoint.path, new.checkpoints / checkpoint.path.name)
        if old.metrics.exists():  # lines after the checkpoint are dropped by the resume
            shutil.copyfile(old.metrics, new.metrics)
    new.write_config(forgetting.config)
    return new.config


def _first_use(config: Config, loader: Any, excluded: frozenset[int], ranks: int, end: int) -> Use | None:
    """The first iteration up to ``end`` in which one of the samples is used."""
    per_pass = _iterations_of_a_pass(config, loader, ranks)
    for number in range(-(-end // per_pass)):
        uses = [
            Use(number * per_pass + iteration, number + 1, index)
            for iteration, index in _uses(config, loader, number, ranks)
            if index in excluded
        ]
        first = min(uses, key=lambda use: use.iteration, default=None)
        if first is not None:
            return first if first.iteration <= end else None
    return None


def _uses(config: Config, loader: Any, number: int, ranks: int) -> Iterator[tuple[int, int]]:
    """The iteration of a pass, from 1, and the index of each sample that is used in it."""
    sampler: ResumableSampler = loader.sampler
    size, in_all = loader.batch_size, config.update.global_micro_batches
    steps, sharing = in_all or config.update.accumulation_steps or 1, 1 if in_all else ranks
    sampler.rank, sampler.world_size = 0, 1
    with sampler.by_hand():
        sampler.pass_number = number
        order = [index for _, index in sampler]
    for position, index in enumerate(order):
        batch = position // sharing // size
        own = len(range(position % sharing, len(order), sharing))
        if not (loader.drop_last and batch >= own // size):
            yield batch // steps + 1, index


def _iterations_of_a_pass(config: Config, loader: Any, ranks: int) -> int:
    return max(iteration for iteration, _ in _uses(config, loader, 0, ranks))
