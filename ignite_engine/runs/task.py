"""What a user's task is made of, and how a config's ``task: file.py:function`` is found."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ignite.metrics import Metric
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ignite_engine.errors import did_you_mean
from ignite_engine.update.losses import LossFn

IN_PYTHON = "python:fit"
"""The task of a run whose parts were given to ``fit``: no config can build it again."""


Data = Dataset[Any] | Iterable[Any]
"""Map-style data, a loader of batches, a stream of samples, or windows."""


class TaskError(ValueError):
    """A task that cannot be found or built; one line."""


@dataclass
class Task:
    """The code of a run: everything that its config does not hold.

    Attributes:
        model: on any device; the run moves and wraps it.
        loss_fn: ``loss_fn(model, batch)``, a scalar: the mean over the micro-batch; or ``(scalar, {name: scalar})``; or
            several losses by name, which are summed, in the place of the scalar.
        train_set: map-style; a ``DataLoader``, or another loader of batches; an ``IterableDataset`` of samples; or
            :class:`~ignite_engine.Windows` whose ``open`` returns map-style data, or loaders.
        val_sets: by name, of the same kinds; a metric ``loss`` of the set ``val`` is logged as ``val/loss``.
        predict: ``predict(model, batch)`` gives what ``metrics`` take. None: the loss alone is evaluated.
        metrics: Ignite's, by name, used for each of the sets in turn.
        parameter_groups: as a torch optimizer takes them; the LR of one with a ``name`` is logged under it. Where the
            config has several ``optimizers``, these for each of them by its name. None: one group of all parameters.
        weight_fn: ``weight_fn(batch)``, the weight of the micro-batch in the mean over a group and over ranks, from
            the host batch. None: all weigh the same.
        collate_fn: samples to a batch, as ``DataLoader`` takes it.
        tokens_fn: ``tokens_fn(batch)``, the tokens of a micro-batch, for tokens per second.
        test_sets: evaluated by the ``evaluate`` command only.
        handlers: objects with ``attach(trainer)``, or pairs of one, or of a function, with its event, in a list or by
            label; attached last.
        optimizer: ``optimizer(model)`` makes the optimizer, or several by name, of the model as it is trained, instead
            of the config's sections.
        schedule: ``schedule(optimizer)`` makes a scheduler for each optimizer, instead of the config's sections.
        schedule_per: whether it steps with the optimizer (``step``) or once per ``epoch``. Default: those of torch
            once per epoch, but for OneCycleLR and CyclicLR; others by step.
        sampler: the order of a map-style ``train_set``, instead of ``data.shuffle``; see
            :func:`~ignite_engine.loader`.
        parallelize: ``parallelize(model, mesh)`` splits the model over the ranks of a one-dimensional mesh, in place,
            as torch's ``parallelize_module`` does; called with ``distributed.tensor_parallel`` above 1.
    """

    model: nn.Module
    loss_fn: LossFn
    train_set: Data
    val_sets: Mapping[str, Data] = field(default_factory=dict)
    predict: Callable[[Any, Any], Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    parameter_groups: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None
    weight_fn: Callable[[Any], int | float] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    tokens_fn: Callable[[Any], int] | None = None
    test_sets: Mapping[str, Data] = field(default_factory=dict)
    handlers: Sequence[Any] | Mapping[str, Any] = ()
    parallelize: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Optimizer | Mapping[str, Optimizer]] | None = None
    schedule: Callable[[Optimizer], Any] | None = None
    schedule_per: Literal["step", "epoch"] | None = None
    sampler: Any = None


def find_task(name: str, folder: Path | None = None) -> Callable[[Mapping[str, Any]], Task]:
    """The function that ``name`` names, see :func:`find_object`; its file or module is executed.

    Raises:
        TaskError: no such file, module or function, or an error while it was executed.
    """
    if name == IN_PYTHON:
        raise TaskError("the run was made by fit() in Python, and only that program has its model and data")
    return find_object(name, folder)  # type: ignore[no-any-return]  # the user's; build_task checks what it returns


def find_object(name: str, folder: Path | None = None) -> Any:
    """The function or class that ``name`` names.

    Args:
        name: ``file.py:function`` or ``package.module:function``. A relative file is looked for in ``folder``, in the
            folders above it and in the working directory; like a script it can import its neighbours.
        folder: that of the config.

    Raises:
        TaskError: no such file, module or function, or an error while it was executed.
    """
    where, _, attribute = name.rpartition(":")
    path = _find_file(where, folder) if where.endswith(".py") else None
    try:
        module = importlib.import_module(where) if path is None else _module_from_file(path)
    except Exception as error:
        hint = "; a file's name ends in .py" if isinstance(error, ModuleNotFoundError) else ""
        raise TaskError(f"got {name!r}, which could not be imported: {_error_with_line(error)}{hint}.") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        kind = "" if found is None else f", but a {type(found).__name__}"
        near = did_you_mean(attribute, [key for key in own if not key.startswith("_")])
        raise TaskError(f"got {name!r}, but {where} has no function '{attribute}'{kind}{near}")
    return found


def build_task(build: Callable[[Mapping[str, Any]], Any], options: Mapping[str, Any]) -> Task:
    """Call the user's function.

    Raises:
        TaskError: it raised, or returned something other than a ``Task``; its own error is the ``__cause__``.
    """
    name = getattr(build, "__name__", type(build).__name__)
    try:
        task = build(options)
    except Exception as error:
        raise TaskError(f"{name}() raised {_error_with_line(error)}.") from error
    if not isinstance(task, Task):
        raise TaskError(f"{name}() returned {type(task).__name__}, expected an ignite_engine.Task.")
    if (problem := problem_of_metrics(task.metrics)) is not None:
        raise TaskError(f"{name}() gave {problem}")
    if task.metrics and task.predict is None:
        raise TaskError(f"{name}() gave metrics ({', '.join(task.metrics)}) but no predict, whose values they take.")
    return task


def problem_of_metrics(metrics: Any) -> str | None:
    """What is wrong with the metrics of a task, as the end of a sentence; None: they are metrics by name."""
    if not isinstance(metrics, Mapping):  # one metric can be indexed without an end
        return f"metrics that are a {type(metrics).__name__}: give them by name, such as {{'accuracy': Accuracy()}}."
    for key, metric in metrics.items():
        if not isinstance(metric, Metric):
            shown = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            return f"metrics with {key!r}: {shown}, expected a metric of Ignite's, such as Accuracy()."
    return None


def _find_file(where: str, folder: Path | None) -> Path:
    folders = [*([folder, *folder.parents] if folder else []), Path.cwd()]
    tried = [folder / where for folder in folders]  # an absolute path stays itself
    for path in tried:
        if path.is_file():
            return path.resolve()
    names = sorted({file.name for path in tried for file in path.parent.glob("*.py")})
    near = did_you_mean(Path(where).name, names)
    raise TaskError(f"got {where!r}, but there is no such file in {folders[0]}, above it or in {Path.cwd()}{near}")


def _module_from_file(path: Path) -> ModuleType:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    folder, name = str(path.parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)  # loader workers, too, must find the module by its name
    if name in sys.modules or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"task_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _error_with_line(error: Exception) -> str:
    """``KeyError: 'width' (at model.py:31)``: the line is the innermost one in the user's code."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (at {error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    users = [each for each in frames if "site-packages" not in each.filename and not _is_python_or_here(each.filename)]
    place = f" (at {users[-1].filename}:{users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}{place}"


def _is_python_or_here(filename: str) -> bool:
    return filename.startswith("<") or Path(filename) in (Path(__file__), Path(importlib.__file__ or ""))
