"""From a config and a task to a run: the only module that knows the core and the handlers."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ignite.engine import CallableEventWithFilter, Events
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ignite_engine import handlers
from ignite_engine.checkpoint.sources import LoadSource
from ignite_engine.data.source import OwnSource
from ignite_engine.errors import CheckpointError, check_type, one_line
from ignite_engine.handlers.model_bank import ModelBank
from ignite_engine.ranks import agreement, attempt, mesh
from ignite_engine.rng import seed_everything
from ignite_engine.runs.components import (
    agreed_task,
    check_configs_agree,
    check_fit,
    make_optimizers,
    make_schedules,
    set_up_torch,
    settings_of,
    steps_per_epoch,
)
from ignite_engine.runs.config import Config, ConfigWarning
from ignite_engine.runs.config.named import Fault, lookup, named, parameters_of, refusal_of
from ignite_engine.runs.config.tables import HANDLERS, arguments_of, event_of, load_source, when_of
from ignite_engine.runs.evaluations import Evaluations
from ignite_engine.runs.loaders import data_loader, say_how_it_resumes, updates_of
from ignite_engine.runs.run import Run
from ignite_engine.runs.run_directory import PhaseTimes, RunDirectory, installed_packages
from ignite_engine.runs.task import Task
from ignite_engine.runs.wrapping import declare_mesh, wrap
from ignite_engine.trainer import Trainer
from ignite_engine.update import Update

logger = logging.getLogger(__name__)


def prepare_ranks() -> None:
    """Import and read what every run needs, once, in a process that forks the ranks."""
    for name in handlers.__all__:
        getattr(handlers, name)
    for module in ("torch.utils.flop_counter", "torch.profiler", "torch.utils.serialization.config", "encodings.idna"):
        importlib.import_module(module)
    installed_packages()


def note_failure(config: Config, error: ProcessRaisedException | ProcessExitedException) -> None:
    """All ranks have ended: write into the run's folder which failed first, and why."""
    reason = str(error).strip().splitlines()[-1]  # of a traceback: the error
    killed = isinstance(error, ProcessExitedException) and error.signal_name is not None
    RunDirectory(config.directory).note_failure(reason, error.error_index, killed=killed)


def build_run(config: Config, task: Task | None = None) -> Run:
    """Build the run; nothing is trained and no file is written. On several ranks a collective.

    Args:
        config: from ``load_config``.
        task: made by the caller; None: the one that the config names, built here under the run's seed, the same on
            every rank. Afterwards each rank is seeded with ``run.seed`` + its data-parallel rank.

    Raises:
        ConfigError: the task cannot be found or built, or it and the config do not fit; raised on all ranks.
    """
    startup = PhaseTimes()
    check_configs_agree(config)
    set_up_torch(config)
    arranged = declare_mesh(config)
    with startup("task"):
        seed_everything(config.run.seed)
        task = task or agreed_task(config)
        check_fit(config, task)
    with startup("model"):
        task = wrap(config, task, arranged)
        model = task.model
        seed_everything(config.run.seed + mesh.data_rank())
    with startup("data"):
        train_loader = data_loader(config, task, task.train_set, training=True)
        total = updates_of(config, train_loader)
    with startup("trainer"):
        optimizers = make_optimizers(config, task, model)
        update = Update(
            model,
            optimizers,
            task.loss_fn,
            precision=config.update.precision,
            clip_norm=config.update.clip_norm,
            weight_fn=task.weight_fn,
            grad_scaler=config.update.grad_scaler if config.update.precision == "fp16" else None,
            log_grad_norm=config.update.log_grad_norm,
            non_finite=config.update.non_finite,
            max_skips=config.update.max_skips,
            accumulate=config.update.accumulate,
            reduce_each_micro_batch=config.distributed.reduce_each_micro_batch,
            loss_parallel=config.distributed.loss_parallel,
        )
        model.train()
        try:
            update.accumulation.check()
        except ValueError as error:
            raise config.error("update.accumulate", str(error)) from None
        trainer = Trainer(
            update,
            accumulation_steps=config.update.accumulation_steps,
            global_micro_batches=config.update.global_micro_batches,
            max_read_errors=config.data.max_read_errors,
        )
        schedules = make_schedules(config, task, optimizers, total)
        run = Run(
            trainer,
            train_loader,
            RunDirectory(config.directory),
            config,
            task,
            total,
            schedules,
            startup,
            settings_of(config, task, optimizers, schedules),
        )
        _attach(run)
    return run


_STARTED_AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Counts of launchers that start a rank that has died, or a job that was taken off its machine, again."""


def _is_started_again() -> bool:
    # torchrun's agents count apart: one that joined later has counted none
    return any(agreement.gather_objects(any(int(os.environ.get(count) or 0) for count in _STARTED_AGAIN)))


@contextmanager
def logged(config: Config, *, console: bool = True) -> Iterator[None]:
    """Write what is logged within it into the run's folder, and with ``console`` to stderr.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    above = next(folder for folder in (config.directory, *config.directory.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        problem = "may not be written to" if above.is_dir() else "is not a folder"
        raise config.error("run.directory", f"got '{config.directory}', but {above} {problem}.")
    again = _is_started_again()
    aside = agreement.on_rank_0(lambda: _move_aside(config) if config.run.restart and not again else None)
    must_be_new = config.run.must_be_new and not again
    held = agreement.on_rank_0(RunDirectory(config.directory).files_of_a_run) if must_be_new else []
    if held:
        raise config.error(
            "run.must_be_new",
            f"got true, but {config.directory} holds a run ({', '.join(held)}); give another run.directory, or set it "
            "to false to resume.",
        )
    directory = RunDirectory(config.directory)
    try:
        with directory.logging_to(agreement.rank(), console=console):
            if aside is not None and agreement.rank() == 0:
                logger.info("The run that was in %s is now in %s.", config.directory, aside)
            if attempt.current.reason is not None:
                logger.warning("%s", attempt.current.reason, extra={"console": False})  # the parent has shown it
            if attempt.current.is_known:
                warnings.simplefilter("ignore", ConfigWarning)
            yield
    except BaseException as error:
        named = error.filename if isinstance(error, OSError) and not directory.path.exists() else None
        if named is not None and directory.path.absolute().is_relative_to(Path(named).absolute()):
            problem = f"got '{config.directory}', but it cannot be made: {one_line(error)}."  # as in /proc
            raise config.error("run.directory", problem) from None
        if aside is not None and agreement.rank() == 0 and not directory.files_of_a_run():  # it was refused
            directory.put_back(aside)
            logger.warning("The run that was moved aside to %s is in %s again.", aside, config.directory)
        raise


def _move_aside(config: Config) -> Path | None:
    try:
        return RunDirectory(config.directory).move_aside()
    except (OSError, ValueError) as error:
        problem = str(error) if isinstance(error, ValueError) else one_line(error)
        raise config.error("run.restart", f"got true, but {problem}.") from None


_AT_LOG_POINTS = ("MemoryLogger", "Throughput", "StepTimes", "MetricLogger")
"""Handlers that write values; their event is the logger's where none is given."""


def _attach(run: Run) -> None:
    """Attach all handlers in the order of the table, then those of the user."""
    config, trainer = run.settings, run.trainer
    trainer.add_event_handler(Events.STARTED, run.log_length)
    trainer.add_event_handler(Events.STARTED, run.keep_record)
    say_how_it_resumes(run.loader)
    _attach_schedules(run)
    sources = [load_source(entry) for entry in config.load]
    entries = {label: entry for label, entry in config.handlers.items() if entry is not None}
    if sources and ("Checkpoint" not in entries or any(load_source.dynamic for load_source in sources)):
        entries.setdefault("ModelBank", {})
    # or as often as gives a short run ten points
    usual = {"every": 50 if run.total is None else max(1, min(50, run.total // 10))}
    log_point = _event_given(entries.get("MetricLogger", {})) or usual
    supplied = _supplied(run, sources)
    events: dict[str, Any] = {}
    made: dict[str, Any] = {}
    order = {kind: place for place, kind in enumerate(HANDLERS)}
    for label, entry in sorted(entries.items(), key=lambda item: order.get(item[1].get("use", item[0]), len(order))):
        if entry.get("use", label) in _AT_LOG_POINTS and not _event_given(entry):
            entry = {**entry, **log_point}
        with config.at(f"handlers.{label}"):
            made[label] = _attach_handler(run, label, entry, supplied, events)
    run.checkpoint = made.get("Checkpoint")
    if run.checkpoint is not None:
        run.resume = entries["Checkpoint"].get("resume") or {}
        run.checkpoint.announces_best = False  # the run's last line does
        run.checkpoint.asks_tiers = not config.run.restart or _is_started_again()
    if sources:
        run.load = _loading(run, sources, made.get("ModelBank"))
    _attach_own(trainer, run.task.handlers)


def _event_given(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("every", "at") if entry.get(key) is not None}


def _supplied(run: Run, sources: Sequence[LoadSource]) -> dict[str, Callable[[], Any]]:
    """What a handler gets for arguments of these names."""
    config, task = run.settings, run.task
    evaluations = partial(Evaluations, run)
    return {
        "directory": lambda: run.directory.path,
        "config": lambda: run.config,
        "evaluator": lambda: evaluations().evaluator(task),
        "data": lambda: data_loader(config, task, next(iter(task.val_sets.values()), task.train_set), training=False),
        "run": lambda: run,
        "since": lambda: time.monotonic() - (time.perf_counter() - run.startup.began),  # the start-up counts as well
        "sources": lambda: sources,
        "tokens_fn": lambda: task.tokens_fn,
        "must_be_new": lambda: config.run.must_be_new and not _is_started_again(),
    }


def _attach_handler(
    run: Run, label: str, entry: Mapping[str, Any], supplied: Mapping[str, Callable[[], Any]], events: dict[str, Any]
) -> Any:
    """Make and attach the handler of an entry.

    Args:
        events: those of the entries before; handlers of one clock share it and act together.

    Raises:
        Fault: a setting does not fit.
    """
    config, task, trainer = run.settings, run.task, run.trainer
    kind = entry.get("use", label)
    make = lookup(kind, HANDLERS, key="use", folder=config.folder)
    known, _ = parameters_of(make)
    supplied = dict(supplied)
    if kind == "Evaluation":
        del supplied["data"]  # it takes names
    elif "data" in known and isinstance(name := entry.get("data"), str):
        supplied["data"] = partial(data_loader, config, task, Evaluations(run, name).sets[name], training=False)
        entry = {key: value for key, value in entry.items() if key != "data"}
    if kind == "Checkpoint":
        supplied["directory"] = lambda: run.directory.checkpoints
    if kind != label and "name" in known:
        supplied["name"] = lambda: label
    arguments, _ = arguments_of(make, entry)
    if not isinstance(make, type):
        handler = partial(make, **arguments)
    else:
        handler = named({**arguments, "use": kind}, {kind: make}, key="use", given=supplied)
    when = when_of(make, entry)
    has_length = not isinstance(task.train_set, OwnSource) and hasattr(task.train_set, "__len__")
    key = repr(when)
    if key not in events:
        events[key] = event_of(when, count=task.tokens_fn or task.weight_fn, has_length=has_length)
    try:
        _attach_one(trainer, handler, *filter(None, [events[key]]))
    except (TypeError, ValueError) as error:
        raise refusal_of(error, label, entry) from error
    if kind not in HANDLERS:
        _register(trainer, label, handler)
    return handler


def _attach_one(trainer: Trainer, handler: Any, *events: Any) -> None:
    """Attach an object with ``attach``, or a function, at its event if it has one.

    Raises:
        Fault: it is neither, or takes no event, or needs one.
    """
    name = getattr(handler, "__name__", type(handler).__name__)
    if isinstance(handler, type):
        raise Fault(("", f"is the class {name}: give an object of it, {name}(...)."))
    if hasattr(handler, "attach"):
        if not _takes(handler.attach, trainer, *events):
            remedy = "has events of its own: leave it out" if events else "takes an event: give the pair of them"
            raise Fault(("", f"is a {name}, whose attach {remedy}."))
        handler.attach(trainer, *events)
    elif not callable(handler) or not events or isinstance(handler, CallableEventWithFilter):
        expected = "an object with attach(trainer), or one or a function with its event, in this order"
        raise Fault(("", f"must be {expected}, got {handler!r} and {', '.join(map(str, events)) or 'no event'}."))
    else:
        try:
            trainer.add_event_handler(*events, handler)
        except ValueError:
            if _takes(handler, trainer) or _takes(handler):
                raise
            shown = f"{name}{inspect.signature(handler)}: trainer.state has what else it needs."
            raise Fault(("", f"must be a function of the trainer, or of nothing, got {shown}")) from None


def _register(trainer: Trainer, label: str, handler: Any) -> None:
    """A handler's state is in checkpoints, under its label unless it has named itself."""
    has_state = hasattr(handler, "state_dict") and hasattr(handler, "load_state_dict")
    names = [name for name, known in trainer.registry.objects.items() if known is handler]
    # one that was attached without a name is known by its class
    if has_state and all(name.endswith(type(handler).__name__) for name in names):
        trainer.register(label, handler)


def _attach_schedules(run: Run) -> None:
    config, task = run.settings, run.task
    for name, schedule in run.schedules.items():
        _, entry = config.schedule_of(name)
        metric = entry.get("metric") if task.schedule is None and isinstance(schedule, ReduceLROnPlateau) else None
        per_epoch = task.schedule is not None and steps_per_epoch(task, schedule)
        handler = handlers.LRSchedule(schedule, metric=metric, name=run.schedule_name(name))
        handler.attach(run.trainer, *[Events.EPOCH_COMPLETED][: int(per_epoch)])


def _attach_own(trainer: Trainer, given: Any) -> None:
    """Attach what the task, or the call of ``fit``, has made: a list, or a mapping by label."""
    is_right = isinstance(given, list | tuple | Mapping)
    check_type("handlers", given, is_right, "a list of handlers, or a mapping of them by label")
    labelled = given.items() if isinstance(given, Mapping) else enumerate(given)
    for label, users_own in labelled:
        handler, *events = users_own if isinstance(users_own, tuple) else (users_own,)
        try:
            _attach_one(trainer, handler, *events)
        except Fault as fault:
            raise TypeError(f"handlers[{label!r}] {fault}") from None
        if isinstance(label, str):
            _register(trainer, label, handler)


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # one of C, which says nothing of itself
        return True
    return True


def _loading(run: Run, sources: Sequence[LoadSource], bank: ModelBank | None) -> Callable[[], object]:
    """Loads what a run begins from; errors say where the sources are written."""

    def load() -> object:
        assert bank is not None or run.checkpoint is not None
        try:
            return bank.load() if bank is not None else run.checkpoint.load(sources)  # type: ignore[union-attr]
        except (CheckpointError, ValueError) as error:
            raise run.settings.error("load", str(error)) from error

    return load
