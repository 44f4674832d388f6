"""The sections of a config; the comment beside a field is its unit and meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ignite_engine.runs.config.named import Fault, Only

Positive = Annotated[float, Only(lambda value: value > 0, "more than 0")]
Count = Annotated[int, Only(lambda value: value >= 1, "at least 1")]
CountFrom0 = Annotated[int, Only(lambda value: value >= 0, "at least 0")]
Heartbeat = Annotated[float, Only(lambda value: value >= 1, "at least 1")]


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Which run this is and how long."""

    name: str | None = None  # the run's name; default: the config file's name
    directory: str | None = None  # where the run writes; default: `runs/<name>`
    restart: bool = False  # move a run that the folder holds to `<directory>.1`, and begin anew
    seed: CountFrom0 = 0  # rank r uses seed + r after the model is made
    max_iterations: Count | None = None  # length in updates; the first limit that is reached ends the run
    max_epochs: Count | None = None  # length in passes over the data; one of the two limits is required
    deterministic: bool = False  # `torch.use_deterministic_algorithms`
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of fp32 products
    threads: Count | None = None  # CPU threads of each rank; default: torch's

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, kw_only=True)
class ScalerOptions:
    """Of ``torch.amp.GradScaler``."""

    init_scale: Positive = 2.0**16
    growth_factor: Positive = 2.0
    backoff_factor: Positive = 0.5
    growth_interval: Count = 2000


@dataclass(frozen=True, kw_only=True)
class UpdateSection:
    """One optimizer step."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # autocast; weights stay fp32
    accumulation_steps: Count | None = None  # micro-batches per update on each rank; default: one, ungrouped
    global_micro_batches: Count | None = None  # instead: micro-batches per update over all ranks
    accumulate: Literal["rank_invariant", "capture"] | None = None  # another way to compute the gradients
    clip_norm: Positive | None = None  # largest joint L2 norm of the gradients
    log_grad_norm: bool = False  # log `grad_norm` without clipping, too
    grad_scaler: ScalerOptions | None = None  # options of `torch.amp.GradScaler`, for fp16
    non_finite: Literal["skip", "stop", "rollback"] | None = None  # at a loss or gradient that is not finite
    max_skips: Count = 10  # most iterations that `non_finite` leaves out


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """Of ``DistributedDataParallel``; None: as torch has it."""

    broadcast_buffers: bool | None = None
    bucket_cap_mb: Positive | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False


@dataclass(frozen=True, kw_only=True)
class DistributedSection:
    """Several ranks. Under torchrun or SLURM the launcher sets how many."""

    nproc_per_node: Count | None = None  # processes to start, as `--nproc-per-node`; default: one
    backend: Literal["gloo", "nccl"] | None = None  # default: nccl with CUDA, otherwise gloo
    timeout: Positive | None = None  # seconds that a rank waits for another one; default: torch's
    heartbeat_timeout: Heartbeat = 60.0  # seconds of silence of a rank that end the run
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"  # whole models; FSDP2; FSDP2 within replicated groups
    tensor_parallel: Count = 1  # ranks that share each model and its data; the task's `parallelize` splits it
    shard_ranks: Count | None = None  # hsdp: ranks that share one copy of the weights; default: those of a node
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # fsdp, hsdp: dtype of the gathered weights and their computation
    loss_parallel: bool = False  # with `tensor_parallel`: the cross-entropy of logits that are sharded by class
    reduce_each_micro_batch: bool = False  # reduce gradients in each backward, not only in the last one of a group
    ddp_options: DDPOptions = field(default_factory=DDPOptions)  # of `DistributedDataParallel`
    sync_bn: bool = False  # DDP: batch statistics over all ranks; not on the CPU
