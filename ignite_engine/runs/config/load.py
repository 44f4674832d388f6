"""``load_config``: a YAML file and overrides become a ``Config``, or one line that says what to fix."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from ignite_engine.errors import did_you_mean
from ignite_engine.runs.config.named import Fault, checked, parameters_of
from ignite_engine.runs.config.sections import DataSection, DistributedSection, RunSection, UpdateSection
from ignite_engine.runs.config.tables import (
    HANDLERS,
    handler_entries,
    load_entries,
    named_optimizer,
    optimizer_entry,
    schedule_entry,
)
from ignite_engine.runs.config.yaml_file import ConfigError, ConfigSource, ConfigWarning, read_config_source

__all__ = ["Config", "ConfigError", "ConfigWarning", "config_from_dict", "default_values", "load_config", "validated"]


NamedOptimizer = Annotated[dict[str, Any], named_optimizer]


def _file_and_function(value: str) -> str:
    where, _, function = value.rpartition(":")
    if not where or not function.isidentifier():
        raise Fault(("", f"got {value!r}, expected file.py:function or package.module:function."))
    return value


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run is made from except the code of its task. Frozen; equal configs compare equal."""

    task: Annotated[str, _file_and_function]  # file.py:function or package.module:function
    task_options: dict[str, Any]  # passed to that function
    run: RunSection
    data: DataSection
    optimizer: Annotated[dict[str, Any], optimizer_entry]  # by name, with its own options
    optimizers: dict[str, NamedOptimizer]  # instead of optimizer: several, by name
    schedule: Annotated[dict[str, Any], schedule_entry]  # of the learning rate, by name, with its own options
    update: UpdateSection
    load: Annotated[list[dict[str, Any]], load_entries]  # what a run without a checkpoint of its own begins from
    handlers: Annotated[dict[str, Any], handler_entries]  # by label: settings and event; null: not this one
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
        """All settings, defaults of the sections filled in, as plain values that ``load_config`` reads back."""
        return {entry.name: value for entry, value in zip(fields(self), asdict(self).values()) if entry.init}

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
        """Warn about ``key``, which ``complaint`` names."""
        warnings.warn(self.source.say_of(key, complaint), ConfigWarning, stacklevel=4)

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """The dotted key of each setting that has no effect with the others as they are, and what it would need."""
        ranks = self.distributed
        rules: dict[str, tuple[bool, str]] = {
            "data.prefetch_factor": (self.data.num_workers > 0, "data.num_workers"),
            "data.persistent_workers": (self.data.num_workers > 0, "data.num_workers"),
            "update.grad_scaler": (self.update.precision == "fp16", "update.precision=fp16"),
            "distributed.shard_ranks": (ranks.strategy == "hsdp", "strategy=hsdp"),
            "distributed.param_dtype": (ranks.strategy != "ddp", "strategy=fsdp or hsdp"),
            "distributed.sync_bn": (ranks.strategy == "ddp", "strategy=ddp"),
            "distributed.ddp_options": (ranks.strategy == "ddp", "strategy=ddp"),
            "distributed.loss_parallel": (ranks.tensor_parallel > 1, "distributed.tensor_parallel"),
        }
        for dotted, (has_effect, needs) in rules.items():
            section, _, key = dotted.partition(".")
            given = getattr(self, section)
            # in a resolved config every key is given
            if not has_effect and getattr(given, key) != getattr(type(given)(), key):
                yield dotted, needs
        if self.optimizers and self.optimizer != optimizer_entry({}):
            yield "optimizer", "optimizers left out"
        checkpoint = self.handler("Checkpoint")
        for key in ("mode", "keep_best"):
            if checkpoint.get("best") is None and checkpoint.get(key) is not None:
                yield f"handlers.Checkpoint.{key}", "handlers.Checkpoint.best"


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


def default_values() -> dict[str, Any]:
    """The default of every setting that has one, by section, as ``Config.to_dict`` writes them."""
    values = config_from_dict({"task": "task.py:build", "run": {"max_epochs": 1}}).to_dict()
    for key in ("max_epochs", "name", "directory"):
        del values["run"][key]
    return {key: value for key, value in values.items() if key != "task"}


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with others in their place; a handler that is turned off stays so, and others of a kind change."""
    merged = _merged(values, changes)
    kinds = changes.get("handlers", {})
    entries = merged.get("handlers", {})
    for label, entry in entries.items():
        if entry and (kind := entry.get("use")) in kinds:
            entries[label] = _merged({label: entry}, {label: kinds[kind]})[label]
    return merged


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, change in changes.items():
        if not isinstance(change, Mapping):
            merged[key] = change
        elif merged.get(key, {}) is not None:
            merged[key] = _merged(merged.get(key, {}), change)
    return merged


def validated(source: ConfigSource) -> Config:
    """The config of a source's values.

    Raises:
        ConfigError: one line for each mistake, with the place that the source names.
    """
    known = [entry.name for entry in fields(Config) if entry.init]
    defaults: dict[str, Any] = {name: [] if name == "load" else {} for name in known if name != "task"}
    # an empty section is the default
    given = {key: value for key, value in source.values.items() if value is not None or key not in defaults}
    mistakes = [(key, f"got a section that is not known{_near(key)}") for key in given if key not in known]
    values = {**defaults, **{key: value for key, value in given.items() if key in known}}
    arguments: dict[str, Any] = {}
    try:
        arguments = checked(Config, values, given=("task",) if mistakes else ())
    except Fault as fault:
        mistakes += fault.mistakes
    if mistakes:
        mistakes.sort(key=lambda mistake: source.lines.get(mistake[0], 0))
        raise ConfigError("\n".join(source.say(*mistake) for mistake in mistakes))
    run = arguments["run"]
    name = run.name or (source.path.stem if source.path else "run")
    arguments["run"] = replace(run, name=name, directory=run.directory or str(Path("runs") / name))
    config = Config(**arguments)
    object.__setattr__(config, "source", source)
    for key, needs in config.without_effect():
        config.warn(key, f"{key} has no effect without {needs}.")
    return config


def _near(key: str) -> str:
    """The end of a sentence about a key that no config has: a section, or a key or a handler of that name in one."""
    sections = {"run": RunSection, "data": DataSection, "update": UpdateSection, "distributed": DistributedSection}
    keys = [f"{section}.{name}" for section, kind in sections.items() for name in parameters_of(kind)[0]]
    top = [entry.name for entry in fields(Config) if entry.init]
    return did_you_mean(
        key, [*top, *keys, "optimizer.lr", *(f"handlers.{label}" for label in HANDLERS)], limit=len(top)
    )
