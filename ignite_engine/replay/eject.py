"""``eject``: the run of a config, or of a folder, as a program in plain PyTorch that ends with the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ignite_engine import rng
from ignite_engine.config import Config, ConfigError, load_config
from ignite_engine.config.load import validated
from ignite_engine.config.yaml_file import read_config_source
from ignite_engine.data import Windows
from ignite_engine.data.sampler import DrawnSampler, ResumableSampler
from ignite_engine.data.streams import is_sequence
from ignite_engine.replay.eject_batches import data_of
from ignite_engine.replay.eject_code import Code, code_of, code_of_task
from ignite_engine.replay.eject_plain import LOG_EVERY, Optimizing, Plain, Rate, literal
from ignite_engine.replay.eject_rates import rate_names, rate_of, whole
from ignite_engine.replay.eject_text import IMPORTS, OWN_NAMES, definitions_of, text_of
from ignite_engine.replay.rebuild import Build, where_it_was
from ignite_engine.replay.stored import loadable
from ignite_engine.run_directory import RunDirectory, weights_sha256
from ignite_engine.runs import recipe
from ignite_engine.runs.components import steps_per_epoch
from ignite_engine.runs.fit import only_building
from ignite_engine.runs.run import Run
from ignite_engine.sparse import RowwiseAdagrad
from ignite_engine.step.device import to_device
from ignite_engine.task import IN_PYTHON, Task, TaskError, find_task
from ignite_engine.update import Update

_LONGEST_CHECK = 100_000
"""Updates whose rates are compared."""


def eject(path: str | Path, overrides: Sequence[str] = (), build: Build | None = None) -> str:
    """A program in plain PyTorch that ends with the same weights as the run, on one process.

    Args:
        path: a config, or the folder of a run; of one that has completed the program ends where that ended.
        overrides: each ``section.key=value``, as for ``train``.
        build: of a run of ``fit``: ``build(directory)`` calls it, as for a replay.

    Raises:
        ConfigError: one line that names the key of what cannot be expressed; or the file of the task needs more of the
            engine than a task has.
    """
    path = Path(path)
    is_run = path.is_dir()
    config = _stored_config(path, overrides) if is_run else load_config(path, overrides)
    summary = RunDirectory(path).read_summary() if is_run and not overrides else {}
    iterations = summary["iteration"] if summary.get("status") == "completed" else None
    _refuse(config, summary, has_ended=iterations is not None)
    try:
        function = _function(config, build)
        code = code_of_task(function)
        live = _live(config, path, code, function)
        plain = _plain_program(live, code, function.__name__, iterations, path.name)
        _check_names(code)
        text = text_of(plain)
        _check(text, live, plain)
    except TaskError as error:
        raise config.error("task", f"{str(error).rstrip('.')}.") from error.__cause__
    if code.has_handlers:
        config.warn(
            "task", "task has handlers, which are left out: one that changes what is trained makes other weights."
        )
    return text


def _stored_config(directory: Path, overrides: Sequence[str]) -> Config:
    source = read_config_source(directory / "config.yaml", overrides)
    source.values = loadable(source.values)
    if isinstance(task := source.values.get("task"), str):
        source.values["task"] = where_it_was(task, directory)
    return validated(source)


def _refuse(config: Config, summary: Mapping[str, Any], *, has_ended: bool) -> None:
    """Refuse what a plain program of one process does not express, by the key that asks for it."""
    ranks, update, data = config.distributed, config.update, config.data
    several = max(summary.get("world_size", 1), ranks.nproc_per_node or 1)
    given: dict[str, tuple[object, str]] = {
        "distributed.nproc_per_node": (several if several > 1 else None, "several ranks"),
        "distributed.strategy": (ranks.strategy if ranks.strategy != "ddp" else None, "a sharded model"),
        "distributed.tensor_parallel": (ranks.tensor_parallel if ranks.tensor_parallel > 1 else None, "a split model"),
        "update.rank_invariant": (update.rank_invariant or None, "sums in a tree over micro-batches"),
        "update.capture": (update.capture or None, "graphs of torch.compile"),
        "update.non_finite": (update.non_finite, "a policy of values that are not finite"),
        "data.exclude": (data.exclude, "batches without some samples"),
        "data.max_read_errors": (data.max_read_errors or None, "batches that are left out"),
        "run.max_windows": (config.run.max_windows, "a limit of windows"),
        "checkpoint.load": (
            ", ".join(str(source.path) for source in config.checkpoint.sources.values()) or None,
            "loading",
        ),
        "checkpoint.override": (config.checkpoint.override, "a change on a resume"),
        "early_stopping.metric": (None if has_ended else config.early_stopping.metric, "an end that a metric decides"),
    }
    for key, section in config.schedules.values():
        given[f"{key}.name"] = ("plateau" if section.name == "plateau" else None, "a rate that follows a metric")
    for key, (value, what) in given.items():
        if value is None:
            continue
        remedy = "leave it out"
        if key == "early_stopping.metric":
            remedy = "set it to null, or eject the folder of the completed run, which says where it ended"
        raise config.error(key, f"got {value!r}, and an ejected program does not express {what}; {remedy}.")
    if update.precision == "fp16" and len(config.optimizers) > 1:
        raise config.error(
            "update.precision", "got 'fp16' with several optimizers, which an ejected program scales apart."
        )


@dataclass
class _Live:
    """The run as the engine builds it, and its parts as the program makes them."""

    config: Config
    path: Path
    run: Run
    parts: Mapping[str, Any]
    weights: str
    """A digest of the weights before training."""
    batches: DataLoader[Any]
    """Of the training set, or of its first window."""
    result: Any
    """What the loss function returns for the first batch."""

    @property
    def is_fit(self) -> bool:
        return self.config.task == IN_PYTHON

    @property
    def update(self) -> Update:
        update = self.run.trainer.update
        assert isinstance(update, Update)
        return update

    @property
    def steps_per_epoch(self) -> bool:
        """Whether a scheduler of the task's own steps once per epoch."""
        if (schedule := self.own("schedule")) is None:
            return False
        per = self.parts.get("schedule_per", "usual" if self.is_fit else "step")
        task = Task(self.update.model, self.update.loss_fn, (), schedule_per=per)
        return any(steps_per_epoch(task, schedule(optimizer)) for optimizer in self.update.optimizers.values())

    def own(self, name: str) -> Any:
        """An optimizer or a schedule that the task makes; None: it is made from the config."""
        value = self.parts.get(name)
        return None if isinstance(value, str | Mapping) else value


def _function(config: Config, build: Build | None) -> Callable[..., Any]:
    if config.task == IN_PYTHON and build is None:
        raise TaskError("the run was made by fit() in Python: give the function that calls it (build, --build)")
    if config.task != IN_PYTHON and build is not None:
        raise TaskError(f"got {config.task!r}, which builds the run: leave build out, it is for runs of fit()")
    return find_task(config.task, config.folder) if build is None else build


def _live(config: Config, path: Path, code: Code, function: Callable[..., Any]) -> _Live:
    is_fit = config.task == IN_PYTHON
    with rng.isolated():
        if is_fit:
            with only_building():
                run = function(path)
            if not isinstance(run, Run):
                raise TaskError(f"build(directory) must return what fit() returns, got a {type(run).__name__}")
        else:
            run = recipe.build_run(config)
        model, loss_fn = run.trainer.update.model, run.trainer.update.loss_fn  # type: ignore[attr-defined]  # an Update
        weights = weights_sha256(model)
        batches = _batches(run.loader)
        keys = list(islice(iter(batches.sampler), batches.batch_size))
        result = _loss(config, model, loss_fn, batches.dataset.__getitems__(keys))  # type: ignore[attr-defined]  # our dataset
        with _executed(definitions_of(code), code) as module:
            parts = _parts_from(module, function.__name__, config, path)
    live = _Live(config, path, run, parts, weights, batches, result)
    _check_optimizers(live)
    return live


def _parts_from(module: Any, function: str, config: Config, path: Path) -> Mapping[str, Any]:
    is_fit = config.task == IN_PYTHON
    # a function of the user's own seeds torch itself
    rng.seed_everything(config.run.seed + int(is_fit))
    parts = vars(module)[function](str(path) if is_fit else config.task_options)
    if not isinstance(parts, Mapping) or not {"model", "loss_fn", "train_set"} <= parts.keys():
        raise TaskError(f"{function} does not return its task, or what fit() returns, as eject needs it")
    return {name: value for name, value in parts.items() if value is not None}


def _is_columns(data: Any) -> bool:
    return isinstance(data, tuple) and all(isinstance(column, Tensor | np.ndarray) for column in data)


def _batches(loader: Any) -> DataLoader[Any]:
    """The loader of the training set, or of its first window, whose order is a function of the seed.

    Raises:
        TaskError: it is not.
    """
    if isinstance(loader, Windows):
        stream: Any = loader.stream
        if not is_sequence(stream) or loader.per_epoch or loader.limit or not stream:
            raise TaskError("its Windows are not a sequence that is an epoch, as an ejected program needs them")
        loader = loader.loader_of(stream[0])
    sampler = getattr(loader, "sampler", None)
    if type(sampler) is not ResumableSampler:
        kind = type(sampler.drawn if isinstance(sampler, DrawnSampler) else loader).__name__
        raise TaskError(
            f"the order of its train_set is that of a {kind}, and no function of the seed, as eject needs it"
        )
    return loader  # type: ignore[no-any-return]  # it has our sampler


def _check_optimizers(live: _Live) -> None:
    config, update = live.config, live.update
    is_sparse = any(getattr(module, "sparse", False) is True for module in update.model.modules())
    if is_sparse and update.clip_norm is not None:
        raise config.error(
            "update.clip_norm", f"got {update.clip_norm} with sparse gradients, which torch cannot clip."
        )
    if (schedule := live.own("schedule")) is None:
        return
    if any(not isinstance(schedule(optimizer), LRScheduler) for optimizer in update.optimizers.values()):
        raise TaskError("its schedule makes something other than a scheduler of torch, as an ejected program needs it")
    if update.weight_fn is not None and live.steps_per_epoch:
        raise TaskError(
            "its scheduler steps once per epoch beside a weight_fn, which an ejected program cannot express"
        )


def _loss(config: Config, model: nn.Module, loss_fn: Callable[..., Any], batch: Any) -> Any:
    rng.seed_everything(config.run.seed)
    device = next(model.parameters()).device
    return loss_fn(model.train(), next(iter(to_device([batch], device, 0))) if device.type != "cpu" else batch)


def _plain_program(live: _Live, code: Code, function: str, iterations: int | None, source: str) -> Plain:
    config, parts, batches, update = live.config, live.parts, live.batches, live.update
    is_pair = isinstance(live.result, tuple) and not hasattr(live.result, "_fields")
    loss = live.result[0] if is_pair else live.result
    data: Literal["samples", "tensors", "loader", "windows"] = "samples"
    if isinstance(live.run.loader, Windows):
        data = "windows"
    elif isinstance(parts["train_set"], DataLoader):
        data = "loader"
    elif live.is_fit and _is_columns(parts["train_set"]):
        data = "tensors"
    optimizer, schedule, per_epoch = live.own("optimizer"), live.own("schedule"), live.steps_per_epoch
    steps = config.update.accumulation_steps or config.update.global_micro_batches
    end = iterations or (config.run.max_iterations if data == "windows" else live.run.total)
    held = {one for made in update.optimizers.values() for group in made.param_groups for one in group["params"]}
    if config.update.clip_norm is not None and not held <= {*update.model.parameters()}:
        raise config.error("update.clip_norm", "got a limit for parameters that are not the model's; set it to null.")
    is_ours = any(type(one) is RowwiseAdagrad for one in update.optimizers.values())
    left_out = {"the average of the weights": config.ema.decay is not None, "the task's handlers": code.has_handlers}
    sampler: Any = batches.sampler
    collate = 'parts["collate_fn"]' if "collate_fn" in parts else None
    return Plain(
        title=f"The run {config.name} ({source})",
        task=code,
        parts=f"{function}({literal(str(live.path))})" if live.is_fit else f"{function}(TASK_OPTIONS)",
        is_weighed="weight_fn" in parts,
        options=None if live.is_fit else config.task_options,
        seed=config.run.seed,
        order_seed=sampler.seed,
        model_is_made_first=not live.is_fit,
        iterations=end,
        epochs=config.run.max_epochs,
        per_epoch=-(-len(batches) // (steps or 1)) if per_epoch else None,
        batch_size=batches.batch_size or 1,
        drop_last=batches.drop_last,
        shuffle=sampler.shuffle,
        workers=batches.num_workers,
        data=data,
        reads_batches=batches.dataset.reads_batches,  # type: ignore[attr-defined]  # our dataset
        steps=steps,
        collate='parts["train_set"].collate_fn' if data == "loader" else collate,
        losses="one" if isinstance(loss, Tensor) else "mapping" if isinstance(loss, Mapping) else "tuple",
        has_extras=is_pair,
        optimizers=[_optimizing(live, name) for name in update.optimizers],
        own_optimizer=None if optimizer is None else 'parts["optimizer"]' + ("(model)" * callable(optimizer)),
        has_several=len(update.optimizers) > 1,
        scheduler_steps=None if schedule is None else "epoch" if per_epoch else "step",
        clip_norm=config.update.clip_norm,
        trains_all=held >= {parameter for parameter in update.model.parameters() if parameter.requires_grad},
        precision=config.update.precision,
        scaler=config.update.grad_scaler or {},
        device=update.device.type,
        deterministic=config.run.deterministic,
        matmul_precision=config.run.matmul_precision,
        threads=config.run.threads,
        log_every=_log_every(config),
        left_out=["evaluation", "checkpoints", "logging", *(what for what, is_so in left_out.items() if is_so)],
        copied=[code_of(RowwiseAdagrad)] if is_ours and optimizer is None else [],
    )


def _optimizing(live: _Live, name: str) -> Optimizing:
    if live.own("optimizer") is not None:
        return Optimizing(None, _rate(live, name))
    config, groups = live.config, live.parts.get("parameter_groups")
    section = config.optimizers[name] if config.optimizers else config.optimizer
    if isinstance(groups, Mapping):
        parameters = f'parts["parameter_groups"][{literal(name)}]'
    elif groups is not None:
        parameters = 'parts["parameter_groups"]'
    elif all(parameter.requires_grad for parameter in live.update.model.parameters()):
        parameters = "model.parameters()"
    else:
        parameters = "[parameter for parameter in model.parameters() if parameter.requires_grad]"
    of_torch = section.type.__module__.startswith("torch.optim")
    kind = f"torch.optim.{section.type.__name__}" if of_torch else section.type.__name__
    options = "".join(f", {key}={literal(value)}" for key, value in section.options.items())
    return Optimizing(f"{kind}({parameters}{options})", _rate(live, name))


def _log_every(config: Config) -> int:
    """Updates from one log point of the run to the next, as far as they are counted so."""
    unit, number = config.logging.every.given if config.logging.every is not None else ("", 0)
    return int(number) if unit == "iterations" else LOG_EVERY


def _rate(live: _Live, name: str) -> Rate | None:
    section = live.config.schedule_of(name)[1]
    if live.own("schedule") is not None or name not in live.run.schedules:
        return None
    total = section.total or live.run.total or 0
    options = {"min_ratio": section.min_ratio, "power": section.power, "decay_shape": section.decay_shape}
    options["decay"] = whole(0.1 if section.decay is None else section.decay, total)
    return rate_of(section.name, options, whole(section.warmup, total), total)


# -- compared with the run ------------------------------------------------------------------------------------------


def _check_names(code: Code) -> None:
    for name in sorted(code.names & OWN_NAMES):
        if IMPORTS.get(name) not in code.imports:
            raise TaskError(f"its file defines {name!r}, a name that the ejected program needs: rename it")


def _check(text: str, live: _Live, plain: Plain) -> None:
    """Compare initial weights, the first loss and all rates with those of the run.

    Raises:
        TaskError: the code that was taken out of the task's file does not do the same.
    """
    with rng.isolated(), _executed(text, plain.task) as module:
        parts = _parts_from(module, plain.parts.partition("(")[0], live.config, live.path)
        model = parts["model"].to(plain.device)
        weights = module.weights_sha256(model)
        names: dict[str, Any] = {**vars(module), "parts": parts}
        data = eval(data_of(plain), names)
        if plain.data == "windows":
            data = data.open(data.stream[0])
        collate = [] if plain.collate is None else [eval(plain.collate, names)]
        loss = _loss(live.config, model, parts["loss_fn"], module.Epoch(data, 0, *collate)[0])
    if weights != live.weights:
        unseeded = "its function makes another model each time: seed torch in it"
        raise TaskError(unseeded if live.is_fit else "the ejected code makes another model")
    if not _is_equal(loss, live.result):
        raise TaskError("the ejected code has another first loss than the run")
    for name, schedule in live.run.schedules.items():
        rate = _rate(live, name)
        function = (lambda update: 1.0) if rate is None else vars(module)[rate_names(plain)[rate]]
        updates = range(min(plain.iterations or 1, _LONGEST_CHECK))
        assert all(function(update) == schedule.factor_at(update) for update in updates), schedule


@contextmanager
def _executed(text: str, code: Code) -> Iterator[Any]:
    """A program as a module, whose ``main`` is not called.

    Raises:
        TaskError: it needs more of the engine than was taken out, then or within.
    """
    module, path = ModuleType("ejected_program"), list(sys.path)
    sys.modules[module.__name__] = module  # data classes look their module up
    try:
        exec(compile(text, "train.py", "exec"), vars(module))
        yield module
    except (ConfigError, TaskError):
        raise
    except Exception as error:
        without = f" without {', '.join(code.unused)}" if code.unused else ""
        raise TaskError(f"the code that training needs fails{without}: {type(error).__name__}: {error}") from error
    finally:
        sys.path[:] = path
        del sys.modules[module.__name__]


def _is_equal(value: Any, other: Any) -> bool:
    """Whether two results of a loss function have the same bits."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value.detach(), other.detach())
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(_is_equal(value[key], other[key]) for key in value)
    if isinstance(value, tuple):
        return all(map(_is_equal, value, other))
    return bool(value == other)
