"""``fit``: a run in one call, made of the parts that a config's run is made of."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from ignite.metrics import Metric
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from ignite_engine import devices
from ignite_engine.errors import Interrupted, check_type, did_you_mean, shapes_of
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.launch import Parallel
from ignite_engine.runs import recipe
from ignite_engine.runs.config import Config, ConfigError
from ignite_engine.runs.config.load import validated
from ignite_engine.runs.config.tables import HANDLERS
from ignite_engine.runs.config.yaml_file import ConfigSource
from ignite_engine.runs.loaders import is_loader
from ignite_engine.runs.run import Run
from ignite_engine.runs.task import IN_PYTHON, Task, problem_of_metrics
from ignite_engine.text import flat
from ignite_engine.update.losses import LossFn

Data = Dataset[Any] | Sequence[Any] | Iterable[Any]
"""Map-style data, a list of samples, a tuple of tensors or arrays of equal length, a loader, a stream, or windows."""

Values = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

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
        known = [*inspect.signature(function).parameters, *(f"handlers.{label}" for label in HANDLERS)]
        try:
            for name in kwargs.keys() - {*known}:
                near = did_you_mean(name, known, limit=len(known))
                raise ConfigError(f"fit(): got {name}, which it does not take{near}")
            return function(*args, **kwargs)
        except (*recipe.USER_ERRORS, *recipe.RUN_ERRORS) as error:
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
        with recipe.logged(config, console=not logging.getLogger().hasHandlers()), ExitStack() as held:
            held.enter_context(devices.torch_kept())
            runs.append(recipe.build_run(config, task))
            if _BUILT_WITH.get() is None:
                runs[0].train()
            else:
                held.pop_all()  # who trains it puts torch back

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
    train_set, metrics, handlers = given["train_set"], given["metrics"], given["handlers"]
    check_type("model", given["model"], isinstance(given["model"], nn.Module), "a module")
    check_type(
        "directory", given["directory"], isinstance(given["directory"], str | os.PathLike), "the path of a folder"
    )
    if metrics is not None and (problem := problem_of_metrics(metrics)) is not None:
        raise ValueError(f"got {problem}")
    entries = {}
    if isinstance(handlers, Mapping):
        entries = {label: each for label, each in handlers.items() if each is None or isinstance(each, Mapping)}
        handlers = {label: each for label, each in handlers.items() if label not in entries}
    task = Task(
        given["model"],
        given["loss_fn"],
        _data("train_set", train_set),
        _named_sets("val", given["val_set"]),
        predict=given["predict"] or (_predict_pair if metrics else None),
        metrics=metrics or {},
        test_sets=_named_sets("test", given["test_set"]),
        handlers=handlers,
        **{name: given[name] for name in ("weight_fn", "collate_fn", "tokens_fn", "sampler", "schedule_per")},
    )
    sections = {name: given[name] for name in ("run", "data", "update", "distributed", "load")}
    sections |= {"task": IN_PYTHON, "handlers": entries}
    for name in ("optimizer", "schedule"):
        if isinstance(given[name], str | Mapping):
            sections[name] = {"name": given[name]} if isinstance(given[name], str) else given[name]
    if "optimizer" not in sections and given["optimizer"] is not None:
        task.optimizer = _made_of_model(given["optimizer"])
    if "schedule" not in sections:
        task.schedule = given["schedule"]
    if is_loader(train_set):
        for name in ("batch_size", "num_workers"):
            if given[name] is not None:
                raise TypeError(f"{name}: got {given[name]} with a loader, which has its own: leave it out.")
            given[name] = getattr(train_set, name, None)
    directory, given["restart"] = Path(given["directory"]), given["restart"] or None
    source = ConfigSource(
        _as_in_config({name: each for name, each in sections.items() if each is not None}), name="fit()"
    )
    written = flat(source.values)
    for name, key in _SETTINGS.items():
        if given[name] is None:
            continue
        if twice := [each for each in written if key == each or (key.startswith(f"{each}.") and written[each] is None)]:
            raise ValueError(f"{name}: it is given, and so is {twice[0]}, or that is off; give one of them.")
        source.put(key, _as_in_config(given[name]))
    source.arguments = {"task": "", **{key: name for name, key in _SETTINGS.items() if given[name] is not None}}
    source.values["run"].setdefault("name", directory.name or "run")
    if (change := _BUILT_WITH.get()) is not None:
        source.values = dict(change(source.values))
    return validated(source), task


def _restarted(config: Config, task: Task, train: Callable[[int], None], restarts: int) -> Run:
    """Train in a forked process, and take what it has come to."""
    if is_launched() or dist.is_initialized():
        raise ConfigError("fit(): restarts: these ranks were started elsewhere; give it to their launcher.")
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


def _data(name: str, given: Any) -> Any:
    """Tensors or arrays of as many samples are a dataset; other data stays as it is."""
    columns = given if isinstance(given, tuple) else ()
    if not columns or not all(hasattr(column, "shape") for column in columns):
        return given
    if len({len(column) if column.shape else None for column in columns}) > 1:
        raise ValueError(f"{name} must have as many samples in each column, got {shapes_of(given)}.")
    return TensorDataset(*map(torch.as_tensor, columns))


def _named_sets(default: str, given: Any) -> dict[str, Any]:
    named = given if isinstance(given, Mapping) else {} if given is None else {default: given}
    return {name: _data(name, data) for name, data in named.items()}


def _made_of_model(optimizer: Any) -> Callable[[nn.Module], Any]:
    if isinstance(optimizer, Optimizer):
        return lambda model: optimizer
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(
            f"optimizer is the class {name}: give its name, {name!r}, or lambda model: {name}(model.parameters(), ...)."
        )
    made: Callable[[nn.Module], Any] = optimizer
    return made


def _as_in_config(value: Any) -> Any:
    """Nested values as a config has them: dicts, lists and text."""
    if isinstance(value, Mapping):
        return {key: _as_in_config(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_as_in_config(element) for element in value]
    if isinstance(value, float):
        return float(value)  # NumPy's cannot be written as YAML
    return str(value) if isinstance(value, os.PathLike) else value
