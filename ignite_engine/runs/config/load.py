"""``load_config``: a YAML file and overrides become a ``Config``, or one line that says what to fix."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ignite_engine.errors import did_you_mean
from ignite_engine.runs.config.named import Fault, fitting, for_each, section
from ignite_engine.runs.config.sections import DataSection, DistributedSection, RunSection, UpdateSection
from ignite_engine.runs.config.tables import (
    HANDLERS,
    handler_entries,
    load_entries,
    optimizer_entries,
    optimizer_entry,
    schedule_entry,
)
from ignite_engine.runs.config.yaml_file import ConfigError, ConfigSource, ConfigWarning, display, read_config_source
from ignite_engine.text import flat

__all__ = ["Config", "ConfigError", "ConfigWarning", "config_from_dict", "load_config", "validated"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run is made from except the code of its task. Frozen; equal configs compare equal."""

    task: str  # file.py:function or package.module:function
    task_options: dict[str, Any]  # passed to that function
    run: RunSection
    data: DataSection
    optimizer: dict[str, Any]  # by name, with its own options
    optimizers: dict[str, dict[str, Any]]  # instead of optimizer: several, by name
    schedule: dict[str, Any]  # of the learning rate, by name, with its own options
    update: UpdateSection
    load: list[dict[str, Any]]  # what a run without a checkpoint of its own begins from
    handlers: dict[str, Any]  # by label: settings and event; null: not this one
    distributed: DistributedSection
    source: ConfigSource = field(default_factory=lambda: ConfigSource({}), init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """``run.name``, by default the config file's name without its suffix."""
        return str(self.run.name)

    @property
    def directory(self) -> Path:
        """Where the run writes: ``run.directory``, by default ``runs/<name>`` of the working directory."""
        return Path(str(self.run.directory))

    @property
    def folder(self) -> Path | None:
        """The folder of the config file, where a relative path of a task or handler is looked for first."""
        return self.source.path.resolve().parent if self.source.path else None

    def schedule_of(self, optimizer: str) -> tuple[str, dict[str, Any]]:
        """The dotted key and the entry of an optimizer's schedule, also of one that the config does not name."""
        own = self.optimizers.get(optimizer, {}).get("schedule")
        return ("schedule", self.schedule) if own is None else (f"optimizers.{optimizer}.schedule", own)

    def handler(self, label: str) -> Mapping[str, Any]:
        """The entry of a handler; empty where it is turned off."""
        return self.handlers.get(label) or {}

    def to_dict(self) -> dict[str, Any]:
        """All settings, defaults of the sections filled in, as plain values that ``load_config`` reads back.

        A function that a call has given is its name.
        """
        return {name: _named(value) for name, value in asdict(self).items() if name != "source"}

    def changed(self, **sections: Any) -> Config:
        """With other sections."""
        config = replace(self, **sections)
        object.__setattr__(config, "source", self.source)
        return config

    def error(self, key: str, complaint: str) -> ConfigError:
        """A one-line error about ``key``, for checks made after loading."""
        return ConfigError(self.source.say(key, complaint))

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Within it a mistake in the entry at ``key`` is an error that says where it is written."""
        try:
            yield
        except Fault as fault:
            lines = [self.source.say(found, complaint) for found, complaint in fault.inside(key).mistakes]
            raise ConfigError("\n".join(lines)) from fault.__cause__

    def warn(self, key: str, complaint: str) -> None:
        """Warn about ``key``."""
        warnings.warn(self.source.say(key, complaint), ConfigWarning, stacklevel=4)

    def warn_of_unused(self) -> None:
        """Warn about each setting that has no effect with the others as they are."""
        workers, is_ddp = self.data.num_workers > 0, self.distributed.strategy == "ddp"
        best = self.handler("Checkpoint").get("best") is not None
        rules = {
            "data.prefetch_factor": (workers, "data.num_workers"),
            "data.persistent_workers": (workers, "data.num_workers"),
            "update.grad_scaler": (self.update.precision == "fp16", "update.precision=fp16"),
            "distributed.shard_ranks": (self.distributed.strategy == "hsdp", "strategy=hsdp"),
            "distributed.param_dtype": (not is_ddp, "strategy=fsdp or hsdp"),
            "distributed.sync_bn": (is_ddp, "strategy=ddp"),
            "distributed.ddp_options": (is_ddp, "strategy=ddp"),
            "distributed.loss_parallel": (self.distributed.tensor_parallel > 1, "distributed.tensor_parallel"),
            "handlers.Checkpoint.mode": (best, "handlers.Checkpoint.best"),
            "handlers.Checkpoint.keep_best": (best, "handlers.Checkpoint.best"),
            "optimizer": (not self.optimizers, "optimizers left out"),
        }
        sections = {name: asdict(kind()) for name, kind in _SECTIONS.items() if name != "run"}
        now, usual = flat(self.to_dict()), flat({**sections, "optimizer": optimizer_entry({})})
        for rule, (has_effect, needs) in rules.items():
            # in a resolved config every key is given
            given = [key for key in now if f"{key}.".startswith(f"{rule}.") and now[key] != usual.get(key)]
            if given and not has_effect:
                self.warn(rule, f"it has no effect without {needs}.")


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_named(element) for element in value]
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else value


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge and validate.

    Args:
        path: a YAML file.
        overrides: each ``section.key=value``, the value read as YAML; they override the file, and the last one counts.

    Raises:
        ConfigError: for each mistake one line with the file and line (or "command line"), the dotted key, what was
            given, what is expected, and what was possibly meant.

    Warns:
        ConfigWarning: a setting has no effect.
    """
    return validated(read_config_source(Path(path), overrides))


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """The config of nested plain values, as ``to_dict`` returns them.

    Raises:
        ConfigError: as ``load_config``.
    """
    return validated(ConfigSource(dict(values)))


def validated(source: ConfigSource) -> Config:
    """The config of a source's values.

    Raises:
        ConfigError: one line for each mistake, with the place that the source names.
    """
    # an empty section is the default
    given = {key: value for key, value in source.values.items() if value is not None}
    defaults: dict[str, Any] = {key: [] if key == "load" else {} for key in _FIELDS if key != "task"}
    try:
        needed = {"task": None} if given.keys() <= _FIELDS.keys() else {}  # else one is misspelt, perhaps this
        settings = for_each({**needed, **defaults, **given}.items(), _field)
    except Fault as fault:
        mistakes = sorted(fault.mistakes, key=lambda mistake: source.lines.get(mistake[0], 0))
        raise ConfigError("\n".join(source.say(*mistake) for mistake in mistakes)) from None
    name = settings["run"].name or (source.path.stem if source.path else "run")
    directory = settings["run"].directory or str(Path("runs") / name)
    settings["run"] = replace(settings["run"], name=name, directory=directory)
    config = Config(**settings)
    object.__setattr__(config, "source", source)
    config.warn_of_unused()
    return config


def _field(key: str, value: Any) -> Any:
    if key in _FIELDS:
        return _FIELDS[key](value)
    inner = [f"{name}.{setting.name}" for name, kind in _SECTIONS.items() for setting in fields(kind)]
    meant = [*_FIELDS, *inner, "optimizer.lr", *(f"handlers.{label}" for label in HANDLERS)]
    raise Fault(("", f"got {display(value)}, which is not a section{did_you_mean(key, meant, limit=len(_FIELDS))}"))


def _task(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r".+:[^\W\d]\w*", value):
        raise Fault(("", f"got {display(value)}, expected file.py:function or package.module:function."))
    return value


_SECTIONS = {"run": RunSection, "data": DataSection, "update": UpdateSection, "distributed": DistributedSection}
_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "task": _task,
    "task_options": lambda value: dict(fitting(value, Mapping)),
    **{name: partial(section, kind) for name, kind in _SECTIONS.items()},
    "optimizer": optimizer_entry,
    "optimizers": optimizer_entries,
    "schedule": schedule_entry,
    "load": load_entries,
    "handlers": handler_entries,
}
