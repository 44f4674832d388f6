"""The typed sections of a config; the comment beside a field is its unit and meaning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ignite_engine.checkpointing.retention import usual_mode
from ignite_engine.config.intervals import Every, EveryOrMinutes, TimeLimit
from ignite_engine.config.yaml_file import SCIENTIFIC, display
from ignite_engine.errors import did_you_mean
from ignite_engine.ext.mirror.remote import check_url
from ignite_engine.ext.sparse.rowwise_adagrad import RowwiseAdagrad


def _as_number(value: object) -> object:
    """Text such as ``1e-3``, which YAML 1.1 reads as text, as a number; NumPy's float64 as one that YAML can write."""
    if isinstance(value, str):
        return float(value) if SCIENTIFIC.fullmatch(value) else value
    return float(value) if isinstance(value, float) else value


def _as_steps_or_fraction(value: object) -> object:
    value = _as_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"got {display(value)}, expected steps (a whole number) or a fraction of the run (from 0.0 to 1.0)"
        )
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ValueError(f"got {value}, expected a fraction from 0.0 to 1.0; write steps as a whole number")
    if value < 0:
        raise ValueError(f"got {value}, expected at least 0")
    return value


def _as_switch_or_keys(value: object) -> object:
    is_list = isinstance(value, list) and value and all(isinstance(name, str) and name for name in value)
    if not isinstance(value, bool) and not is_list:
        raise ValueError(f"got {display(value)}, expected true, false or a list of metrics' keys")
    return value


def _as_mirror(value: object) -> object:
    try:
        if isinstance(value, str):
            check_url(value)
    except ValueError as error:  # without what was given: it may hold a password
        raise PydanticCustomError("setting", "{complaint}", {"key": "", "complaint": str(error)}) from None
    return value


Number = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Mirror = Annotated[str, BeforeValidator(_as_mirror)]
StepsOrFraction = Annotated[int | float, BeforeValidator(_as_steps_or_fraction)]
SwitchOrKeys = Annotated[bool | list[str], BeforeValidator(_as_switch_or_keys)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are not coerced to another type, instances are frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _an_empty_section_is_the_default(cls, values: object) -> object:
        return {} if values is None else values


class RunSection(Section):
    """Which run this is and how long."""

    name: Annotated[str, Field(min_length=1)] | None = None  # default: the config file's name
    directory: Annotated[str, Field(min_length=1)] | None = None  # default: runs/<name>
    must_be_new: bool = False  # refuse a folder that holds a run, which would be resumed
    restart: bool = False  # move a run that the folder holds aside, to <directory>.1, and begin anew
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # rank r uses seed + r after the model was made
    max_iterations: Count | None = None  # updates; of this and max_epochs what is reached first
    max_epochs: Count | None = None
    deterministic: bool = False  # torch.use_deterministic_algorithms
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of fp32 products
    threads: Count | None = None  # CPU threads of each rank; default: torch's own
    time_limit: TimeLimit | None = None  # wall clock; the run stops so that it is saved before it
    stop_file: Annotated[str, Field(min_length=1)] | None = "stop"  # stops when it appears; in the run's folder

    @model_validator(mode="after")
    def _has_a_length(self) -> RunSection:
        if self.restart and self.must_be_new:
            raise _fault("restart", "got true with run.must_be_new, which refuses what it would move; set one of them.")
        if self.max_iterations is None and self.max_epochs is None:
            raise ValueError("expected one of max_iterations and max_epochs, or both, got neither")
        return self


class DataSection(Section):
    """How the loaders are made. Sizes are per rank."""

    batch_size: Count = 32  # samples of one micro-batch on one rank
    eval_batch_size: Count | None = None  # default: batch_size
    shuffle: bool = True  # the training set, in a new order each epoch
    drop_last: bool = False  # leave out an epoch's last, smaller batch
    max_read_errors: Annotated[int, Field(ge=0)] = 0  # batches that a run leaves out because they cannot be read
    num_workers: Annotated[int, Field(ge=0)] = 0  # loader processes per rank; 0 loads in this one
    prefetch_factor: Count | None = None  # batches ahead per worker
    persistent_workers: bool = False  # keep the workers between epochs
    pin_memory: bool | None = None  # default: on a device that copies from it beside computing


class OptimizerSection(Section):
    """An optimizer of ``torch.optim`` or ``RowwiseAdagrad``, by name in any case; other keys are its own options."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: str = "AdamW"
    lr: NotNegative = 1e-3
    fused: bool | None = None  # one kernel for all parameters

    @property
    def type(self) -> type[torch.optim.Optimizer]:
        """The class that ``name`` names."""
        return optimizer_types()[self.name.lower()]

    @property
    def options(self) -> dict[str, Any]:
        """Everything that the optimizer's constructor takes from this config, ``lr`` included."""
        options: dict[str, Any] = {"lr": self.lr, **(self.model_extra or {})}
        if self.fused is not None:
            options["fused"] = self.fused
        lists = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}  # betas
        return {key: _as_number(value) for key, value in {**options, **lists}.items()}

    @model_validator(mode="after")
    def _the_optimizer_takes_the_options(self) -> OptimizerSection:
        types = optimizer_types()
        if self.name.lower() == "lbfgs":
            raise _fault(
                "name",
                "got 'LBFGS', which needs a closure; expected an optimizer that steps without one, or for LBFGS: give "
                "Trainer an update of your own, as examples/own_update.py does.",
            )
        if self.name.lower() not in types:
            near = did_you_mean(self.name, [kind.__name__ for kind in types.values()])
            raise _fault("name", f"got {self.name!r}, expected an optimizer of torch.optim or RowwiseAdagrad{near}")
        kind, options = self.type.__name__, self.options
        known = {
            name: parameter.default
            for name, parameter in inspect.signature(self.type).parameters.items()
            if name != "params"
        }
        for key, value in options.items():
            if key not in known:
                raise _fault(key, f"got {display(value)}, but {kind} has no option '{key}'{did_you_mean(key, known)}")
            if type(known[key]) in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise _fault(key, f"got {display(value)}, expected a number.")
            if type(known[key]) is bool and not isinstance(value, bool):
                raise _fault(key, f"got {display(value)}, expected true or false.")
        if options.keys() == {"lr"} and self.lr > 0:
            return self  # any takes it; to make an optimizer imports torch._dynamo: as default a fifth of each command
        try:  # the optimizer itself validates the values
            self.type([torch.zeros(1, 1, requires_grad=True)], **options)  # 2-d: Muon takes nothing else
        except Exception as error:
            complaint = " ".join(str(error).split()).rstrip(".")
            key = next(
                (key for key in options if key != "lr" and key.rstrip("s") in complaint), ""
            )  # "Invalid beta ..."
            value_given = f"got {display(options[key])}, but " if key else ""
            raise _fault(key, f"{value_given}{kind} says: {complaint}.") from None
        return self


def optimizer_types() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimizers of torch that step without a closure, and our own, by lower-case name."""
    types = [
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    ]
    types = [kind for kind in types if kind not in (torch.optim.Optimizer, torch.optim.LBFGS)]
    return {kind.__name__.lower(): kind for kind in (*types, RowwiseAdagrad)}


def _fault(key: str, complaint: str) -> PydanticCustomError:
    """An error about ``key`` inside the section whose validator raises it."""
    return PydanticCustomError("setting", "{complaint}", {"key": key, "complaint": complaint})


def _with_usual_mode(values: object, key: str) -> object:
    """With the mode that the name of the metric under ``key`` tells, if none is given."""
    if not isinstance(values, Mapping) or "mode" in values or not isinstance(metric := values.get(key), str):
        return values
    return {**values, "mode": usual_mode(metric) or "min"}


class ScheduleSection(Section):
    """The learning rate over the run, in updates: a warm-up from 0 to ``optimizer.lr``, then the named shape.

    With ``none`` nothing sets it but what the task or a handler attaches.
    """

    name: Literal["none", "constant", "linear", "cosine", "wsd", "inverse_sqrt", "polynomial", "plateau"] = "constant"
    warmup: StepsOrFraction = 0  # updates, or a fraction of the total
    total: Count | None = None  # updates; default: the length of the run
    min_ratio: Annotated[NotNegative, Field(le=1)] | None = None  # the last rate over the peak rate; default 0
    decay: StepsOrFraction | None = None  # wsd: the length of the decay at the end; default 0.1
    decay_shape: Literal["linear", "cosine", "1-sqrt", "exponential"] | None = None  # wsd; default linear
    power: Positive | None = None  # polynomial; default 2
    metric: str | None = None  # plateau: a metric's key, such as val/loss; the rate is lowered when it stops improving
    mode: Literal["min", "max"] | None = None  # plateau: whether a smaller or a larger value is better; default min
    factor: Annotated[Positive, Field(lt=1)] | None = None  # plateau: what the rate is multiplied by; default 0.1
    patience: Count | None = None  # plateau: new values in a row without improvement; default 5
    min_delta: NotNegative | None = None  # plateau: an improvement is larger than this; default 0

    @model_validator(mode="after")
    def _a_plateau_is_of_a_metric(self) -> ScheduleSection:
        if self.name == "plateau" and self.metric is None:
            raise _fault("name", "got 'plateau', but no schedule.metric; expected a metric's key, such as val/loss.")
        return self


class NamedOptimizerSection(OptimizerSection):
    """One of several optimizers, over the parameters that the task has put under its name."""

    schedule: ScheduleSection | None = None  # default: the config's schedule


class UpdateSection(Section):
    """One optimizer step."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of autocast; weights stay fp32
    accumulation_steps: Count | None = None  # micro-batches per update on each rank; default: one, ungrouped
    global_micro_batches: Count | None = None  # instead: per update over all ranks, which share them
    accumulate: Literal["rank_invariant", "capture"] | None = None  # another way to make the gradients of an update
    clip_norm: Positive | None = None  # largest joint L2 norm of the gradients
    log_grad_norm: bool = False  # also without clipping
    grad_scaler: dict[str, Any] | None = None  # options of torch.amp.GradScaler, for fp16
    non_finite: Literal["skip", "stop", "rollback"] | None = None  # where a loss or gradient is not; default: a warning
    max_skips: Count = 10  # iterations that non_finite leaves out at most

    @model_validator(mode="after")
    def _one_size_of_an_update(self) -> UpdateSection:
        if self.global_micro_batches is not None and self.accumulation_steps is not None:
            raise _fault(
                "global_micro_batches",
                f"got {self.global_micro_batches} with update.accumulation_steps {self.accumulation_steps}; "
                "set one of them, for all ranks or for each.",
            )
        if self.accumulate == "rank_invariant" and self.global_micro_batches is None:
            raise _fault(
                "accumulate",
                "got 'rank_invariant' without update.global_micro_batches; set how many an update has in all.",
            )
        return self

    @model_validator(mode="after")
    def _the_scaler_takes_the_options(self) -> UpdateSection:
        known = [
            name for name in inspect.signature(torch.amp.GradScaler).parameters if name not in ("device", "enabled")
        ]
        for key, value in (self.grad_scaler or {}).items():
            if key not in known:
                raise _fault(
                    f"grad_scaler.{key}", f"got {display(value)} for a key that is not known{did_you_mean(key, known)}"
                )
            if isinstance(value, bool) or not isinstance(_as_number(value), int | float) or float(value) <= 0:
                raise _fault(f"grad_scaler.{key}", f"got {display(value)}, expected a number above 0.")
        return self


class EvaluationSection(Section):
    """When each validation set of the task is evaluated."""

    every: Every | None = Every(epochs=1)  # null: only at the start and end, see below
    at_start: bool = False
    at_end: bool = True
    sanity_batches: Annotated[int, Field(ge=0)] = 2  # of each set, evaluated before a fresh run trains; 0: none
    progressive: bool = False  # each window, before it is trained on, as the set "progressive"
    limit: Count | None = None  # batches per set and rank; default: all
    resumes: bool = False  # one that was stopped goes on where it was
    precision: Literal["fp32", "bf16", "fp16"] | None = None  # default: as in training


class EarlyStoppingSection(Section):
    """Completing the run when a metric stops improving."""

    metric: str | None = None  # a metric's key, such as val/loss; null: no early stopping
    mode: Literal["min", "max"] = "min"  # which value is better, the smaller; default: as the metric's name says
    patience: Count = 5  # new values in a row without improvement
    min_delta: NotNegative = 0.0  # an improvement is larger than this
    stopping_threshold: Number | None = None  # a value as good as this ends the run
    divergence_threshold: Number | None = None  # so does one worse than this, or one that is not finite

    @model_validator(mode="before")
    @classmethod
    def _the_name_says_what_is_better(cls, values: object) -> object:
        return _with_usual_mode(values, "metric")


class EmaSection(Section):
    """A moving average of the weights."""

    decay: Annotated[Number, Field(ge=0, lt=1)] | None = None  # per update, such as 0.999; null: no average
    warmup: bool = True  # the first updates' decay is smaller
    evaluate: list[str] | None = None  # sets that are evaluated with the average; default: all


class LoadSection(Section):
    """What a run starts from if its own folder has no checkpoint to resume."""

    path: Annotated[str, Field(min_length=1)] | None = None  # a run's folder, RUN/best, a checkpoint, or a file
    which: Literal["last", "best", "newest"] = "last"  # valid checkpoint of a folder; newest is the last
    metric: Annotated[str, Field(min_length=1)] | None = None  # of the best; default: as the run that saved it says
    mode: Literal["min", "max"] | None = None  # with metric: whether a smaller or a larger value is better
    required: bool = True  # false: it may be missing; one that is there must be valid
    dynamic: bool = False  # loaded again while training, when there is a newer one
    parts: list[str] = ["model"]  # model, optimizer, schedule, counters, ...; model:backbone.*; "*" is everything
    ignore: list[str] = []  # parts and names that are not loaded
    rename: dict[str, str] | None = None  # prefix of a name there: prefix here
    weights: Annotated[str, Field(min_length=1)] = "raw"  # or the part of an average, such as ema
    strict: bool = True  # a name missing on either side is an error


class ResumeSection(Section):
    """What a resume changes."""

    lr: NotNegative | dict[str, NotNegative] | None = None  # base of the schedules; or by optimizer or group


class CheckpointSection(Section):
    """When checkpoints are saved (on a stop as well) and which are kept."""

    every: EveryOrMinutes | None = EveryOrMinutes(epochs=1)
    keep_last: Count = 2
    best: str | None = None  # a metric's key, such as val/loss
    mode: Literal["min", "max"] = "min"  # which score is better, the smaller; default: as the metric's name says
    keep_best: Count = 1
    keep_every: Count | None = None  # those whose iteration is a multiple of it are never deleted
    save_at_end: bool = True  # also where the run completes
    background: bool = False  # written while training continues; holds a second copy of the state in host memory
    writers: Count = 1  # threads and files of a rank's save
    on_exception: bool = False  # also when the update or a handler raises; one process only
    strict: bool = False  # refuse to start, or to resume, what cannot be resumed bit for bit
    memory: Count | Literal["auto"] | None = None  # iterations between copies in shared memory
    labels: list[str] | None = None  # labels of every checkpoint
    exclude: list[str] | None = None  # what is not saved: parts, or names in them, such as model:backbone.*
    ignore: list[str] | None = None  # parts of the run's own newest checkpoint that a resume leaves out
    resume: ResumeSection = ResumeSection()
    load: Annotated[  # what a run starts from; if several sources contain a name, the last one wins
        Annotated[LoadSection, Tag("<one>")] | Annotated[list[LoadSection], Tag("<several>")],
        Discriminator(lambda value: "<several>" if isinstance(value, list) else "<one>"),
    ] = LoadSection()
    mirror: Mirror | None = None  # second place of all: a directory or an fsspec URL
    reload_every: Every = Every(epochs=1)  # when to look whether a dynamic source has a newer state

    @property
    def sources(self) -> dict[str, LoadSection]:
        """What is to be loaded, by its key in the config."""
        if isinstance(self.load, LoadSection):
            return {} if self.load.path is None else {"checkpoint.load": self.load}
        return {f"checkpoint.load.{index}": section for index, section in enumerate(self.load)}

    @model_validator(mode="before")
    @classmethod
    def _the_name_says_what_is_better(cls, values: object) -> object:
        return _with_usual_mode(values, "best")

    @model_validator(mode="after")
    def _each_of_several_has_a_path(self) -> CheckpointSection:
        if missing := next((key for key, section in self.sources.items() if section.path is None), None):
            raise _fault(f"{missing.removeprefix('checkpoint.')}.path", "this is missing, expected what to load.")
        return self

    @model_validator(mode="after")
    def _an_exception_is_not_exact(self) -> CheckpointSection:
        if self.strict and self.on_exception:
            raise _fault(
                "on_exception",
                "got true with checkpoint.strict, which refuses to resume what it saves; use one of them.",
            )
        return self


class LoggingSection(Section):
    """What is logged while training."""

    every: EveryOrMinutes | None = None  # of loss, LR, throughput and memory; default: 50, in a short run less
    console: SwitchOrKeys = True  # one line per log point on rank 0; a list: of these metrics
    progress: bool = True  # a bar with the time left
    memory: bool = True
    throughput: bool = True  # rates, and the parts of a step
    flops: bool = False  # count the FLOPs of one update, for FLOP/s and MFU
    peak_flops: Positive | None = None  # of one device, FLOP/s, for MFU
    clearml: bool = True  # a ClearML task: in the run's folder, or on the server that the user has configured
    tensorboard: bool = False  # scalars in the run's folder
    wandb: bool = False  # a Weights & Biases run; needs ignite-engine[wandb]
    mlflow: bool = False  # an MLflow run; needs ignite-engine[mlflow]
    project: Annotated[str, Field(min_length=1)] = "ignite_engine"  # of ClearML, Weights & Biases; experiment of MLflow
    report: bool = True  # a page with the curves, when the run ends
    trail: Count | None = None  # updates from one digest of the weights to the next; null: none are written
    compare_ranks: bool = False  # at each digest; the run ends where ranks have different weights


class ProfilerSection(Section):
    """Traces of a few updates, by torch's profiler."""

    active: Count | None = None  # updates that are recorded in a window; null: no profile
    wait: Annotated[int, Field(ge=0)] = 10  # updates of this process before a window
    warmup: Annotated[int, Field(ge=0)] = 2  # updates after them in which the profiler runs and nothing is recorded
    repeat: Count = 1  # windows
    ranks: list[Annotated[int, Field(ge=0)]] = [0]  # that are profiled


_NOT_OF_A_CONFIG = {
    *("module", "device_ids", "output_device", "dim", "process_group", "device_mesh", "check_reduction"),
    *("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"),
}
"""Parameters of DistributedDataParallel that are set for the user, or are objects."""


class DistributedSection(Section):
    """Several ranks. Under torchrun or SLURM the launcher sets how many."""

    nproc_per_node: Count | None = None  # processes to spawn; --nproc-per-node overrides it
    backend: Literal["gloo", "nccl"] | None = None  # default: nccl with CUDA, otherwise gloo
    timeout: TimeLimit | None = None  # how long a rank waits for another one; default: torch's own
    heartbeat_timeout: Annotated[Number, Field(ge=1)] = 60.0  # seconds of silence of a rank, after which all end
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"  # whole models; FSDP2; FSDP2 in groups that are replicas
    tensor_parallel: Count = 1  # ranks that share each model and its data; splits by the task's parallelize
    shard_ranks: Count | None = None  # hsdp: ranks that share one copy of the weights; default: those of a node
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # fsdp, hsdp: of gathered weights and their computation
    loss_parallel: bool = False  # with tensor_parallel: the cross-entropy of logits that are sharded by class
    reduce_each_micro_batch: bool = False  # gradients in each backward, not in a group's last only
    ddp_options: dict[str, Any] = Field(default_factory=dict)  # of DistributedDataParallel, as torch names them
    sync_bn: bool = False  # DDP: batch statistics over all ranks; not on CPU

    @field_validator("ddp_options")
    @classmethod
    def _ddp_takes_the_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items() if name not in _NOT_OF_A_CONFIG}
        for name, value in options.items():
            if name not in defaults:
                near = did_you_mean(name, defaults)
                raise _fault(name, f"got {display(value)}, but DistributedDataParallel has no option '{name}'{near}")
            is_switch = type(defaults[name]) is bool or name.endswith("_buffers")  # None stands for true there
            if is_switch and not isinstance(value, bool):
                raise _fault(name, f"got {display(value)}, expected true or false.")
            if name == "bucket_cap_mb" and (
                isinstance(value, bool) or not isinstance(value, int | float) or value <= 0
            ):
                raise _fault(name, f"got {display(value)}, expected a number more than 0.")
        return options
