"""``fit``: a run in one call, made of the parts that a config's run is made of."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from ignite.metrics import Metric
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from ignite_engine import devices
from ignite_engine.errors import (
    CheckpointError,
    Interrupted,
    LaunchError,
    NotExact,
    NotFinite,
    RanksDiffer,
    StateMismatch,
    check_type,
    did_you_mean,
    is_whole,
    shapes_of,
)
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.launch import Parallel
from ignite_engine.runs import recipe
from ignite_engine.runs.config import Config, ConfigError
from ignite_engine.runs.config.load import validated
from ignite_engine.runs.config.tables import HANDLERS
from ignite_engine.runs.config.yaml_file import ConfigSource
from ignite_engine.runs.loaders import is_loader
from ignite_engine.runs.run import Run
from ignite_engine.runs.run_directory import RunDirectoryInUse
from ignite_engine.runs.task import IN_PYTHON, Task, problem_of_metrics
from ignite_engine.update import Update, Updates
from ignite_engine.update.losses import LossFn

Data = Dataset[Any] | Sequence[Any] | Iterable[Any]
"""Map-style data, a list of samples, a tuple of tensors or arrays of equal length, a loader, a stream, or windows."""

Values = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
_REFUSALS = (
    *(ConfigError, StateMismatch, NotExact, RunDirectoryInUse),
    *(CheckpointError, LaunchError, NotFinite, RanksDiffer),
)


_SETTINGS = {
    "directory": "run.directory",
    "restart": "run.restart",
    "max_epochs": "run.max_epochs",
    "max_iters": "run.max_iterations",
    "seed": "run.seed",
    "batch_size": "data.batch_size",
    "num_workers": "data.num_workers",
    "precision": "update.precision",
    "accumulation_steps": "update.accumulation_steps",
    "clip_norm": "update.clip_norm",
    "lr": "optimizer.lr",
    "best": "handlers.Checkpoint.best",
    "mode": "handlers.Checkpoint.mode",
    "resume": "handlers.Checkpoint.resume",
}
"""Arguments of :func:`fit` and the settings that they are."""

_BUILT_WITH: ContextVar[Callable[[Values], Values] | None] = ContextVar("built_with", default=None)


@contextmanager
def built_with(change: Callable[[Values], Values]) -> Iterator[None]:
    """Within it :func:`fit` has other settings, nested as in a config, and returns the run untrained."""
    token = _BUILT_WITH.set(change)
    try:
        yield
    finally:
        _BUILT_WITH.reset(token)


def _in_one_line(function: Callable[P, T]) -> Callable[P, T]:
    """Let refusals leave ``function`` without the engine's frames; the run's log has them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        known = [*inspect.signature(function).parameters]
        try:
            for name in kwargs.keys() - {*known}:
                names = [*known, *(f"handlers.{label}" for label in HANDLERS)]
                near = did_you_mean(name, names, limit=len(names))
                raise ConfigError(f"fit(): got {name}, which it does not take{near}")
            return function(*args, **kwargs)
        except _REFUSALS as error:
            raise error.with_traceback(None) from None

    return call


@_in_one_line
def fit(
    model: nn.Module,
    loss_fn: LossFn,
    train_set: Data,
    val_set: Data | Mapping[str, Data] | None = None,
    *,
    directory: str | Path,
    restart: bool = False,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    optimizer: str | Values | Optimizer | Callable[[Any], Optimizer | Mapping[str, Optimizer]] | None = None,
    schedule: str | Values | Callable[[Optimizer], Any] | None = None,
    schedule_per: Literal["step", "epoch"] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    predict: Callable[[Any, Any], Any] | None = None,
    best: str | None = None,
    mode: str | None = None,
    precision: str | None = None,
    accumulation_steps: int | None = None,
    clip_norm: float | None = None,
    num_workers: int | None = None,
    seed: int | None = None,
    resume: Mapping[str, Any] | None = None,
    restarts: int | None = None,
    test_set: Data | Mapping[str, Data] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Any = None,
    weight_fn: Callable[[Any], int | float] | None = None,
    tokens_fn: Callable[[Any], int] | None = None,
    handlers: Mapping[str, Any] | Sequence[Any] = (),
    run: Values | None = None,
    data: Values | None = None,
    update: Values | None = None,
    distributed: Values | None = None,
    load: Sequence[Values] | None = None,
) -> Run:
    """Train a model, with the parts, defaults and files of ``ignite-engine train``.

    Called again with the same arguments, it resumes the run; a finished run is only evaluated. Ctrl-C, SIGTERM and
    SIGHUP stop it, saved. It evaluates each epoch, keeps the best checkpoint, logs, and writes ``report.html``.

    Args:
        model: moved to this process's device, and wrapped for several ranks.
        loss_fn: ``loss_fn(model, batch)``, the mean over the batch; see :class:`~ignite_engine.Update`.
        train_set: map-style, also a list of samples or a tuple of tensors or arrays; a ``DataLoader`` or another loader
            of batches, with its own batch size and workers; an ``IterableDataset``, also of Hugging Face; or
            :class:`~ignite_engine.Windows`. A log message says how it resumes.
        val_set: of the same kinds, evaluated each epoch and at the end, as ``val``; or several by name.
        directory: of the run.
        restart: move a run that the folder holds to ``<directory>.1``, and begin anew.
        max_epochs: passes over the data; give this, ``max_iters`` or both: the first that is reached ends the run.
        max_iters: updates.
        batch_size: per rank; default 32.
        lr: default 0.001.
        optimizer: of ``torch.optim``, by name; its options with their names, ``{"name": "SGD", "momentum": 0.9}``; an
            optimizer; or a function that makes it, or several by name, of the model on its device. Default AdamW.
        schedule: by name (``constant``, ``linear``, ``cosine``, ``wsd``, ...); its options with their names,
            ``{"name": "cosine", "warmup": 0.1}``; or a function of the optimizer that makes any scheduler that
            ``LRSchedule`` takes. Default: constant; ``none`` leaves the rate to the optimizer and your handlers.
        schedule_per: whether a scheduler that a function has made steps with the optimizer (``step``) or once per
            ``epoch``. Default: those of torch once per epoch, but for OneCycleLR and CyclicLR; others by step.
        metrics: Ignite's, by name; without them the loss is evaluated.
        predict: ``predict(model, batch)``, what the metrics take. Default, for batches ``(inputs, targets)``:
            ``(model(inputs), targets)``.
        best: a metric such as ``val/accuracy``; the checkpoint with its best value is kept.
        mode: whether a smaller (``min``) or larger (``max``) value is better; needed if the name does not tell.
        precision: ``fp32``, ``bf16`` or ``fp16``; default ``fp32``.
        accumulation_steps: batches of one update.
        clip_norm: largest norm of the gradients.
        num_workers: processes that load data; default 0.
        seed: of order, augmentation and dropout, default 0; the model has been made already, see ``seed_everything``.
        resume: what a resumed run changes: ``{"lr": 1e-4}``, the base with which its schedule goes on from where it is.
        restarts: train in a process that is forked from this one, and again when it is killed, by the system for its
            memory, say: at most so often in an hour. It resumes by itself; at the end its newest checkpoint is loaded
            here. Default: never, in this process.
        test_set: evaluated by ``run.evaluate()`` only.
        collate_fn, weight_fn, tokens_fn: see :class:`~ignite_engine.Task`.
        sampler: an order of the samples of a map-style ``train_set``, such as a ``WeightedRandomSampler``.
        handlers: by label, as a config has them: settings, ``{"MetricLogger": {"every": 10}}``, or None to turn one
            off; or handlers of your own, attached last, as objects with ``attach(trainer)``, or pairs of one, or of a
            function, with its event. A list is of the latter only.
        run, data, update, distributed, load: any other setting, under the name of its section in a config
            (``docs/configuration.md``), such as ``data={"shuffle": False}``.

    Returns:
        The run: ``run.trainer``, ``run.checkpoint``, ``run.metrics`` (the last values), ``run.summary``, and
        ``run.evaluate()``, which loads the best checkpoint into the model and returns its metrics on all sets.

    Raises:
        ConfigError: an argument is wrong; one line that names it, what was given and what is expected.
        Interrupted: a signal stopped the run. In an interactive session Ctrl-C returns the run instead.
        ProcessRaisedException, ProcessExitedException: (of torch, with ``restarts``) the process that trains has
            failed, or was killed and is not started again.

    Under torchrun or SLURM every process calls it and they train together; in a ``Parallel`` it is called by each rank.
    """
    given = dict(locals())
    try:
        config, task = _settled(given)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"fit(): {error}") from None
    runs: list[Run] = []

    def train(local_rank: int = 0) -> None:
        # a program that has set up its own logging shows these lines by it
        with recipe.logged(config, console=not logging.getLogger().hasHandlers()):
            runs.append(recipe.build_run(config, task))
            if _BUILT_WITH.get() is None:
                runs[0].train()

    if restarts is not None and _BUILT_WITH.get() is None:
        return _restarted(config, task, train, restarts)
    if is_launched() and not dist.is_initialized():
        backend = config.distributed.backend or devices.default_backend()
        with Parallel(backend, heartbeat_timeout=config.distributed.heartbeat_timeout) as parallel:
            parallel.run(train)
    else:
        train()
    return runs[0]


def _settled(given: dict[str, Any]) -> tuple[Config, Task]:
    """The config and the task of the arguments of a call; whatever is wrong with one is a ValueError or TypeError."""
    model, loss_fn, directory, metrics = (given[name] for name in ("model", "loss_fn", "directory", "metrics"))
    check_type("model", model, isinstance(model, nn.Module), "a module")
    check_type("directory", directory, isinstance(directory, str | os.PathLike), "the path of the run's folder")
    if "\0" in str(directory):
        raise ValueError(f"directory must be a path without a NUL character, got {str(directory)!r}.")
    if isinstance(loss_fn, Update | Updates):
        raise TypeError(
            f"loss_fn is an {type(loss_fn).__name__}, and fit() makes its own Update of a loss function: give yours to "
            "Trainer, as examples/gan.py does."
        )
    if metrics is not None and (problem := problem_of_metrics(metrics)) is not None:
        raise ValueError(f"got {problem}")
    if metrics and given["val_set"] is None and given["test_set"] is None:
        raise ValueError("metrics: got some, but no val_set to measure them on.")
    handlers = given["handlers"]
    by_label = handlers if isinstance(handlers, Mapping) else {}
    entries = {label: entry for label, entry in by_label.items() if entry is None or isinstance(entry, Mapping)}
    task = Task(
        model,
        loss_fn,
        _checked_data("train_set", given["train_set"]),
        _named_sets("val", "val_set", given["val_set"]),
        predict=given["predict"] or (_predict_pair if metrics else None),
        metrics=metrics or {},
        test_sets=_named_sets("test", "test_set", given["test_set"]),
        handlers={label: by_label[label] for label in by_label if label not in entries} if by_label else handlers,
        **{name: given[name] for name in ("weight_fn", "collate_fn", "tokens_fn", "sampler", "schedule_per")},
    )
    sections = {name: given[name] for name in ("run", "data", "update", "distributed", "load")}
    values: dict[str, Any] = {name: section for name, section in sections.items() if section is not None}
    values = {"task": IN_PYTHON, **values, "handlers": entries}
    for name in ("optimizer", "schedule"):
        if isinstance(given[name], str | Mapping):
            values[name] = {"name": given[name]} if isinstance(given[name], str) else given[name]
        elif given[name] is not None:
            setattr(task, name, _made_of_model(given[name]) if name == "optimizer" else given[name])
    if task.optimizer is not None and given["lr"] is not None:
        raise ValueError("lr: got a value with an optimizer that has its own; give it to the optimizer.")
    expected = "a name, options, or a function of the optimizer"
    check_type("schedule", task.schedule, task.schedule is None or callable(task.schedule), expected)
    if is_loader(given["train_set"]):
        given |= _of_loader(given["train_set"], given)
    given["restart"] = given["restart"] or None
    source = ConfigSource(_as_in_config(values), name="fit()", arguments={"task": ""})
    arguments = {name: key for name, key in _SETTINGS.items() if given[name] is not None}
    for name, key in arguments.items():
        _refuse_twice(source.values, name, key)
        source.put(key, _as_in_config(given[name]))
    source.arguments = {"task": "", **{key: name for name, key in arguments.items()}}
    source.values["run"].setdefault("name", Path(directory).name or "run")
    if (change := _BUILT_WITH.get()) is not None:
        source.values = dict(change(source.values))
    return validated(source), task


def _refuse_twice(values: Any, argument: str, key: str) -> None:
    """Refuse a setting that its section has, too, or whose section is turned off."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return
        values = values[part]
        if values is None or part == key.rpartition(".")[2]:
            state = "is turned off" if values is None else "is given twice"
            raise ValueError(f"{argument}: {key} {state}, in its section; give one of them.")


def _restarted(config: Config, task: Task, train: Callable[[int], None], restarts: int) -> Run:
    """Train in a forked process, and take what it has come to."""
    if is_launched() or dist.is_initialized():
        raise ConfigError(
            "fit(): restarts: got a number on ranks that are started elsewhere, expected none; give it to that "
            "launcher, Parallel(restarts=...), say."
        )
    recipe.prepare_ranks()
    try:
        with Parallel(restarts=restarts) as parallel:
            parallel.run(train)
    except (ProcessRaisedException, ProcessExitedException) as error:
        recipe.note_failure(config, error)
        raise
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:
            raise Interrupted(end.code - 128) from None
        raise
    run = recipe.build_run(config, task)
    run.take_over()
    return run


def _predict_pair(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]), batch[1]


def _of_loader(loader: Any, given: Values) -> dict[str, int | None]:
    """The batch size and the workers of a loader, which the run's other sets get, too."""
    names = ("batch_size", "num_workers")
    for name in names:
        if given[name] is not None:
            kind = type(loader).__name__
            raise TypeError(f"{name}: got {given[name]} with a {kind} as train_set, which has its own: leave it out.")
    values = {name: getattr(loader, name, None) for name in names}
    return {name: value if is_whole(value) else None for name, value in values.items()}


def _checked_data(name: str, given: Any) -> Any:
    if isinstance(given, Mapping):  # of Hugging Face's load_dataset, without a split
        first = next(iter(given), "train")
        raise TypeError(f"{name} is a {type(given).__name__} of {', '.join(map(str, given))}: give one, [{first!r}].")
    arrays = given if isinstance(given, tuple) else (given,)
    if any(isinstance(array, Tensor | np.ndarray) and not array.ndim for array in arrays):
        raise ValueError(f"{name} must have samples along its first dimension, got {shapes_of(given)}.")
    if isinstance(given, tuple) and given and all(isinstance(column, Tensor | np.ndarray) for column in given):
        columns = [torch.as_tensor(column) for column in given]
        if len({len(column) for column in columns}) > 1:
            lengths = ", ".join(str(len(column)) for column in columns)
            raise ValueError(f"{name} has columns of {lengths} samples: give as many of each.")
        return TensorDataset(*columns)
    return given


def _named_sets(default: str, name: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    named = given if isinstance(given, Mapping) else {default: given}
    return {
        key: _checked_data(f"{name}[{key!r}]" if isinstance(given, Mapping) else name, dataset)
        for key, dataset in named.items()
    }


def _made_of_model(optimizer: Any) -> Callable[[nn.Module], Any]:
    if hasattr(optimizer, "param_groups"):
        return lambda model: optimizer
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        name = optimizer.__name__
        raise TypeError(
            f"optimizer is the class {name}: give its name, {name!r}, or lambda model: {name}(model.parameters(), ...)."
        )
    expected = "a name, options, an optimizer, or a function that makes it of the model"
    check_type("optimizer", optimizer, callable(optimizer), expected)
    return optimizer  # type: ignore[no-any-return]  # the user's


def _as_in_config(value: Any) -> Any:
    """Nested values as a config has them: dicts, lists and text."""
    if isinstance(value, Mapping):
        return {key: _as_in_config(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_as_in_config(element) for element in value]
    if isinstance(value, float):
        return float(value)  # NumPy's cannot be written as YAML
    return str(value) if isinstance(value, os.PathLike) else value
