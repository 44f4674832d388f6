"""The sections of a config; the comment beside a field is its unit and meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from ignite_engine.errors import is_number
from ignite_engine.runs.config.named import Fault, above, at_least, checked
from ignite_engine.runs.config.yaml_file import display

Positive = Annotated[float, above(0)]
Count = Annotated[int, at_least(1)]
CountFrom0 = Annotated[int, at_least(0)]


def some_text(value: str) -> str:
    """For ``Annotated``: not an empty one."""
    if not value:
        raise Fault(("", "got an empty text, expected some."))
    return value


Name = Annotated[str, some_text]


def _seed(value: int) -> int:
    if not 0 <= value < 2**32:
        raise Fault(("", f"got {value}, expected at least 0 and less than {2**32}."))
    return value


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Which run this is and how long."""

    name: Name | None = None  # the run's name; default: the config file's name
    directory: Name | None = None  # where the run writes; default: `runs/<name>`
    must_be_new: bool = False  # refuse a folder that holds a run, instead of resuming it
    restart: bool = False  # move a run that the folder holds to `<directory>.1`, and begin anew
    seed: Annotated[int, _seed] = 0  # rank r uses seed + r after the model is made
    max_iterations: Count | None = None  # length in updates; the first limit that is reached ends the run
    max_epochs: Count | None = None  # length in passes over the data; one of the two limits is required
    deterministic: bool = False  # `torch.use_deterministic_algorithms`
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of fp32 products
    threads: Count | None = None  # CPU threads of each rank; default: torch's

    def __post_init__(self) -> None:
        if self.restart and self.must_be_new:
            raise Fault(
                ("restart", "got true with run.must_be_new, which refuses what it would move; set one of them.")
            )
        if self.max_iterations is None and self.max_epochs is None:
            raise Fault(("", "expected one of max_iterations and max_epochs, or both, got neither."))


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """How the loaders are made. Sizes are per rank."""

    batch_size: Count = 32  # samples of a micro-batch on one rank
    eval_batch_size: Count | None = None  # samples of an evaluation batch; default: `batch_size`
    shuffle: bool = True  # the training set, in a new order each epoch
    drop_last: bool = False  # leave out an epoch's last batch if it is smaller
    max_read_errors: CountFrom0 = 0  # batches that a run may leave out because they cannot be read
    num_workers: CountFrom0 = 0  # loader processes per rank; 0: the training process loads
    prefetch_factor: Count | None = None  # batches that each worker loads ahead; default: torch's
    persistent_workers: bool = False  # keep the workers between epochs
    pin_memory: bool | None = None  # page-locked host memory; default: on devices that copy while they compute


def _scaler_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``torch.amp.GradScaler``, all of them positive numbers."""
    checked(torch.amp.GradScaler, options)
    for key, value in options.items():
        if not is_number(value) or value <= 0:
            raise Fault((key, f"got {display(value)}, expected a number above 0."))
    return options


@dataclass(frozen=True, kw_only=True)
class UpdateSection:
    """One optimizer step."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # autocast; weights stay fp32
    accumulation_steps: Count | None = None  # micro-batches per update on each rank; default: one, ungrouped
    global_micro_batches: Count | None = None  # instead: micro-batches per update over all ranks
    accumulate: Literal["rank_invariant", "capture"] | None = None  # another way to compute the gradients
    clip_norm: Positive | None = None  # largest joint L2 norm of the gradients
    log_grad_norm: bool = False  # log `grad_norm` without clipping, too
    grad_scaler: Annotated[dict[str, Any], _scaler_options] | None = None  # options of `torch.amp.GradScaler`, for fp16
    non_finite: Literal["skip", "stop", "rollback"] | None = None  # at a loss or gradient that is not finite
    max_skips: Count = 10  # most iterations that `non_finite` leaves out

    def __post_init__(self) -> None:
        if self.global_micro_batches is not None and self.accumulation_steps is not None:
            complaint = (
                f"got {self.global_micro_batches} with update.accumulation_steps {self.accumulation_steps}; set one of "
                "them, for all ranks or for each."
            )
            raise Fault(("global_micro_batches", complaint))
        if self.accumulate == "rank_invariant" and self.global_micro_batches is None:
            complaint = "got 'rank_invariant' without update.global_micro_batches; set how many an update has in all."
            raise Fault(("accumulate", complaint))


_MADE_FOR_THE_USER = {
    *("module", "device_ids", "output_device", "dim", "process_group", "device_mesh", "check_reduction"),
    *("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"),
}
"""Parameters of DistributedDataParallel that are set for the user, or are objects."""


def _ddp_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``DistributedDataParallel``."""
    checked(torch.nn.parallel.DistributedDataParallel, options, skip=1)
    for key, value in options.items():
        if key in _MADE_FOR_THE_USER:
            raise Fault((key, f"got {value!r}, but it is set for you, or takes an object; leave it out."))
        if key.endswith("_buffers") and not isinstance(value, bool):  # None stands for true there
            raise Fault((key, f"got {value!r}, expected true or false."))
        if key == "bucket_cap_mb" and not (is_number(value) and value > 0):
            raise Fault((key, f"got {value!r}, expected a number more than 0."))
    return options


@dataclass(frozen=True, kw_only=True)
class DistributedSection:
    """Several ranks. Under torchrun or SLURM the launcher sets how many."""

    nproc_per_node: Count | None = None  # processes to start, as `--nproc-per-node`; default: one
    backend: Literal["gloo", "nccl"] | None = None  # default: nccl with CUDA, otherwise gloo
    timeout: Positive | None = None  # seconds that a rank waits for another one; default: torch's
    heartbeat_timeout: Annotated[float, at_least(1)] = 60.0  # seconds of silence of a rank that end the run
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"  # whole models; FSDP2; FSDP2 within replicated groups
    tensor_parallel: Count = 1  # ranks that share each model and its data; the task's `parallelize` splits it
    shard_ranks: Count | None = None  # hsdp: ranks that share one copy of the weights; default: those of a node
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # fsdp, hsdp: dtype of the gathered weights and their computation
    loss_parallel: bool = False  # with `tensor_parallel`: the cross-entropy of logits that are sharded by class
    reduce_each_micro_batch: bool = False  # reduce gradients in each backward, not only in the last one of a group
    ddp_options: Annotated[dict[str, Any], _ddp_options] = field(default_factory=dict)  # of `DistributedDataParallel`
    sync_bn: bool = False  # DDP: batch statistics over all ranks; not on the CPU
