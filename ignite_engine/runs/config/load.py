"""``load_config``: a YAML file and overrides become a ``Config``, or one line that says what to fix."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ignite_engine.runs.config.named import Fault, checked, only, parameters_of
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

__all__ = ["Config", "ConfigError", "ConfigWarning", "config_from_dict", "load_config", "validated"]


NamedOptimizer = Annotated[dict[str, Any], named_optimizer]
TaskName = Annotated[
    str,
    only(re.compile(r".+:[^\W\d]\w*").fullmatch, "file.py:function or package.module:function"),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run is made from except the code of its task. Frozen; equal configs compare equal."""

    task: TaskName  # file.py:function or package.module:function
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
        return {name: value for name, value in asdict(self).items() if name != "source"}

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
        ranks, best = self.distributed, self.handler("Checkpoint").get("best")
        workers, is_ddp = self.data.num_workers > 0, ranks.strategy == "ddp"
        rules: dict[str, tuple[bool, str]] = {
            "data.prefetch_factor": (workers, "data.num_workers"),
            "data.persistent_workers": (workers, "data.num_workers"),
            "update.grad_scaler": (self.update.precision == "fp16", "update.precision=fp16"),
            "distributed.shard_ranks": (ranks.strategy == "hsdp", "strategy=hsdp"),
            "distributed.param_dtype": (not is_ddp, "strategy=fsdp or hsdp"),
            "distributed.sync_bn": (is_ddp, "strategy=ddp"),
            "distributed.ddp_options": (is_ddp, "strategy=ddp"),
            "distributed.loss_parallel": (ranks.tensor_parallel > 1, "distributed.tensor_parallel"),
            "handlers.Checkpoint.mode": (best is not None, "handlers.Checkpoint.best"),
            "handlers.Checkpoint.keep_best": (best is not None, "handlers.Checkpoint.best"),
            "optimizer": (not self.optimizers, "optimizers left out"),
        }
        usual = {
            **{name: asdict(section) for name, section in _DEFAULTS.items()},
            "optimizer": optimizer_entry({}),
        }
        for key, (has_effect, needs) in rules.items():
            # in a resolved config every key is given
            if not has_effect and _value_at(self.to_dict(), key) != _value_at(usual, key):
                self.warn(key, f"it has no effect without {needs}.")


_DEFAULTS: Mapping[str, Any] = {
    "data": DataSection(),
    "update": UpdateSection(),
    "distributed": DistributedSection(),
}


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = (values or {}).get(part)  # type: ignore[assignment]  # the last is a value
    return values


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
    defaults: dict[str, Any] = {
        name: [] if name == "load" else {} for name in Config.__annotations__ if name not in ("task", "source")
    }
    # an empty section is the default
    given = {key: value for key, value in source.values.items() if value is not None or key not in defaults}
    sections = {"run": RunSection, "data": DataSection, "update": UpdateSection, "distributed": DistributedSection}
    inner = [f"{section}.{name}" for section, kind in sections.items() for name in parameters_of(kind)[0]]
    meant = [*inner, "optimizer.lr", *(f"handlers.{label}" for label in HANDLERS)]
    try:
        arguments = checked(Config, {**defaults, **given}, beside=meant)
    except Fault as fault:
        mistakes = sorted(fault.mistakes, key=lambda mistake: source.lines.get(mistake[0], 0))
        raise ConfigError("\n".join(source.say(*mistake) for mistake in mistakes)) from None
    run = arguments["run"]
    name = run.name or (source.path.stem if source.path else "run")
    arguments["run"] = replace(run, name=name, directory=run.directory or str(Path("runs") / name))
    config = Config(**arguments)
    object.__setattr__(config, "source", source)
    config.warn_of_unused()
    return config
