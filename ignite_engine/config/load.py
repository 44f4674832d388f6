"""``load_config``: a YAML file and overrides become typed sections, or one line that says what to fix."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails

from ignite_engine.config.intervals import Every
from ignite_engine.config.sections import (
    CheckpointSection,
    DataSection,
    DistributedSection,
    EarlyStoppingSection,
    EmaSection,
    EvaluationSection,
    LoggingSection,
    NamedOptimizerSection,
    OptimizerSection,
    ProfilerSection,
    RunSection,
    ScheduleSection,
    Section,
    UpdateSection,
)
from ignite_engine.config.yaml_file import ConfigError, ConfigSource, ConfigWarning, display, read_config_source
from ignite_engine.errors import did_you_mean

__all__ = ["Config", "ConfigError", "ConfigWarning", "Every", "load_config"]


class Config(Section):
    """Everything a run is made from except the code of its task. Frozen; equal configs compare equal."""

    task: Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]  # file.py:function or package.module:function
    task_options: dict[str, Any] = Field(default_factory=dict)  # passed to that function
    run: RunSection
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    optimizers: dict[str, NamedOptimizerSection] = Field(default_factory=dict)  # instead of optimizer: several, by name
    schedule: ScheduleSection = ScheduleSection()
    update: UpdateSection = UpdateSection()
    evaluation: EvaluationSection = EvaluationSection()
    early_stopping: EarlyStoppingSection = EarlyStoppingSection()
    ema: EmaSection = EmaSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    profiler: ProfilerSection = ProfilerSection()
    distributed: DistributedSection = DistributedSection()
    _source: ConfigSource = PrivateAttr(default_factory=lambda: ConfigSource({}))

    @property
    def name(self) -> str:
        """``run.name``, or the config file's name without its suffix."""
        return self.run.name or (self._source.path.stem if self._source.path else "run")

    @property
    def directory(self) -> Path:
        """Where the run writes: ``run.directory``, or ``runs/<name>`` of the working directory."""
        return Path(self.run.directory) if self.run.directory else Path("runs") / self.name

    @property
    def schedules(self) -> dict[str, tuple[str, ScheduleSection]]:
        """The dotted key and the section of each optimizer's schedule, by the optimizer's name."""
        if not self.optimizers:
            return {"optimizer": ("schedule", self.schedule)}
        return {
            name: (f"optimizers.{name}.schedule", section.schedule) if section.schedule else ("schedule", self.schedule)
            for name, section in self.optimizers.items()
        }

    @property
    def intervals(self) -> dict[str, Every]:
        """Every interval that is set, by its dotted key."""
        known = {
            "evaluation.every": self.evaluation.every,
            "checkpoint.every": self.checkpoint.every,
            "checkpoint.reload_every": self.checkpoint.reload_every,
            "logging.every": self.logging.every,
        }
        return {key: interval for key, interval in known.items() if interval is not None}

    def schedule_of(self, optimizer: str) -> tuple[str, ScheduleSection]:
        """The dotted key and the section of an optimizer's schedule, also of one that the config does not name."""
        return self.schedules.get(optimizer, ("schedule", self.schedule))

    @property
    def folder(self) -> Path | None:
        """The folder of the config file, where a relative task path is looked for first."""
        return self._source.path.resolve().parent if self._source.path else None

    def to_dict(self) -> dict[str, Any]:
        """Every setting, defaults filled in, as plain values that ``load_config`` reads back."""
        values = self.model_dump(mode="json")
        values["run"].update(name=self.name, directory=str(self.directory))
        return values

    def error(self, key: str, complaint: str) -> ConfigError:
        """A one-line error about ``key``, for checks made after loading."""
        return ConfigError(self._source.say(key, complaint))

    def warn(self, key: str, complaint: str) -> None:
        """Warn about ``key``, which ``complaint`` names."""
        warnings.warn(self._source.say_of(key, complaint), ConfigWarning, stacklevel=4)

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """The dotted key of each setting that has no effect with the others as they are, and what it would need."""
        data, update, ranks = self.data, self.update, self.distributed
        rules: list[tuple[str, Section, set[str] | None, bool, str]] = [
            ("optimizer", self.optimizer, None, not self.optimizers, "optimizers left out"),
            ("data", data, {"prefetch_factor", "persistent_workers"}, data.num_workers > 0, "data.num_workers"),
            ("update", update, {"grad_scaler"}, update.precision == "fp16", "update.precision=fp16"),
            ("early_stopping", self.early_stopping, None, self.early_stopping.metric is not None, "a metric"),
            ("ema", self.ema, None, self.ema.decay is not None, "ema.decay"),
            ("profiler", self.profiler, None, self.profiler.active is not None, "profiler.active"),
            ("checkpoint", self.checkpoint, {"keep_best", "mode"}, self.checkpoint.best is not None, "checkpoint.best"),
            ("distributed", ranks, {"shard_ranks"}, ranks.strategy == "hsdp", "strategy=hsdp"),
            ("distributed", ranks, {"param_dtype"}, ranks.strategy != "ddp", "strategy=fsdp or hsdp"),
            ("distributed", ranks, {"sync_bn", "ddp_options"}, ranks.strategy == "ddp", "strategy=ddp"),
            ("distributed", ranks, {"loss_parallel"}, ranks.tensor_parallel > 1, "distributed.tensor_parallel"),
        ]
        for key, schedule in dict(self.schedules.values()).items():
            for name, own in _OF_A_SCHEDULE.items():
                rules.append((key, schedule, own, schedule.name == name, f"{key}.name={name}"))
        for key, section, names, has_effect, needs in rules:
            for name in [] if has_effect else _changed(section):
                if names is None or name in names:
                    yield f"{key}.{name}", needs


_OF_A_SCHEDULE = {
    "wsd": {"decay", "decay_shape"},
    "polynomial": {"power"},
    "plateau": {"metric", "mode", "factor", "patience", "min_delta"},
}
"""Settings that one schedule alone has."""


def _changed(section: Section) -> list[str]:
    """The keys whose value is not the default (``model_fields_set`` has every key of a resolved config)."""
    return [
        key
        for key, field in type(section).model_fields.items()
        if getattr(section, key) != field.get_default(call_default_factory=True)
    ]


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


def validated(source: ConfigSource) -> Config:
    """The config of a source's values.

    Raises:
        ConfigError: one line for each mistake, with the place that the source names.
    """
    try:
        config = Config.model_validate(source.values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        misspelt = {tuple(_key_parts(fault)[:-1]) for fault in faults if fault["type"] == "extra_forbidden"}
        of_keys: dict[tuple[str, ...], list[ErrorDetails]] = {}
        for fault in faults:
            parts = tuple(_key_parts(fault))
            if fault["type"] != "missing" or parts[:-1] not in misspelt:  # a misspelt key is why another is missing
                of_keys.setdefault(parts, []).append(fault)
        keys = sorted(of_keys, key=lambda parts: source.lines.get(".".join(parts), 0))
        raise ConfigError("\n".join(_one_line(of_keys[key], source) for key in keys)) from None
    config._source = source
    for key, needs in config.without_effect():
        config.warn(key, f"{key} has no effect without {needs}.")
    return config


_FORMS = re.compile(r"<.*|constrained-\w+|(literal|list|dict|tuple|function-\w+)\[.*|int|float|bool|str")
"""Parts of pydantic's locations that say which form of a value was tried."""


def _key_parts(fault: ErrorDetails) -> list[str]:
    """The parts of the key that a fault is about."""
    section, *rest = map(str, fault["loc"]) if fault["loc"] else ("",)
    parts = [part for part in (section, *rest) if part and not _FORMS.fullmatch(part)]
    key = fault.get("ctx", {}).get("key")  # a section's own validator names the key in it
    return [*parts, key] if key else parts


def _one_line(faults: Sequence[ErrorDetails], source: ConfigSource) -> str:
    """``file:line: section.key: what was given, what is expected, did you mean``.

    Args:
        faults: of one key, one for each form that it may have.
    """
    parts, complaint = _key_parts(faults[0]), _complaint(faults[0], _key_parts(faults[0]))
    of_no_value = ("extra_forbidden", "missing", "setting", "value_error")
    if len(faults) > 1 and all(fault["type"] not in of_no_value for fault in faults):
        forms = [_expectation(fault["type"], fault.get("ctx", {})) for fault in faults]
        complaint = f"got {display(faults[0]['input'])}, expected {' or '.join(dict.fromkeys(forms))}."
    return source.say(".".join(parts), complaint)


def _complaint(fault: ErrorDetails, parts: list[str]) -> str:
    kind, given, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        near = _elsewhere(parts[-1]) or did_you_mean(parts[-1], _known_keys(parts[:-1]))
        return f"got {display(given)} for a key that is not known{near}"
    if kind == "missing":
        return f"this is missing, expected {_expected_of(parts)}"
    if kind == "setting":
        return str(context["complaint"])
    if kind == "value_error":
        complaint = str(context["error"])
        return complaint if complaint.endswith("?") else f"{complaint}."
    if kind == "literal_error":
        allowed = [choice.strip("'\" ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        near = did_you_mean(given, allowed) if isinstance(given, str) else "."
        near = "." if near.startswith("; known") else near
        return f"got {display(given)}, expected {context['expected']}{near}"
    return f"got {display(given)}, expected {_expectation(kind, context)}."


def _expectation(kind: str, context: Mapping[str, Any]) -> str:
    """The expected value in words, for pydantic's kinds of error."""
    fixed = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text",
        "dict_type": "a mapping",
        "list_type": "a list",
        "model_type": "a mapping of settings",
        "model_attributes_type": "a mapping of settings",
        "string_too_short": "some text",
        "string_pattern_mismatch": "file.py:function or package.module:function",
    }
    if kind in fixed:
        return fixed[kind]
    if kind == "literal_error":
        return str(context["expected"])
    bounds = {"greater_than": "more than {gt}", "greater_than_equal": "at least {ge}"}
    bounds |= {"less_than": "less than {lt}", "less_than_equal": "at most {le}"}
    return bounds[kind].format(**context) if kind in bounds else kind.replace("_", " ")


def _known_keys(section: Sequence[str]) -> list[str]:
    """The keys of the section that a dotted name leads to."""
    model: type[BaseModel] = Config
    is_name = False
    for part in section:
        if is_name or part.isdecimal():  # of several
            is_name = False
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        inner, is_name = _section_in(annotation), get_origin(annotation) is dict
        if inner is None:
            return []
        model = inner
    return [] if is_name else list(model.model_fields)


def _elsewhere(name: str) -> str | None:
    """The end of a sentence about a key that other sections have; None: there is none."""
    having = [f"'{key}'" for key in keys_named(name)]
    return f"; did you mean {' or '.join(having)}?" if having else None


def keys_named(name: str) -> list[str]:
    """Keys ``section.name``."""
    sections = [key for key, field in Config.model_fields.items() if isinstance(field.annotation, type)]
    return [f"{key}.{name}" for key in sections if name in _known_keys([key])]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a key is, or each of a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _section_in(argument))), None)


def _expected_of(parts: Sequence[str]) -> str:
    if parts == ["task"]:
        return "file.py:function or package.module:function."
    if parts == ["run"]:
        return "a section with max_iterations or max_epochs."
    return "a value."
