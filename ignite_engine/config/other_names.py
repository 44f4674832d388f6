"""Keys of the configs of Ignite's code generator, for the line about a key that is not known, and of other trainers.

Source: the ``config.yaml`` of each template in github.com/pytorch-ignite/code-generator.
"""

from __future__ import annotations

_KEYS = {
    "train_batch_size": "data.batch_size",
    "eval_epoch_length": "evaluation.limit",
    "use_amp": "update.precision",
    "terminate_on_nan": "update.non_finite",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
    "num_warmup_epochs": "schedule.warmup",
    "output_dir": "run.directory",
    "limit_sec": "run.time_limit",
    "log_every_iters": "logging.every",
    "save_every_iters": "checkpoint.every",
    "n_saved": "checkpoint.keep_last",
    "patience": "early_stopping.patience",
}
_OF_THE_TASK = [
    *("data_path", "model", "model_dir", "tokenizer_dir", "num_classes", "drop_out", "n_fc", "max_length"),
    *("z_dim", "d_filters", "g_filters"),
]
IN_WORDS = {
    "nproc_per_node": "processes are started by --nproc-per-node on the command line",
    "backend": "it is given by --backend on the command line",
    **dict.fromkeys(
        ["nnodes", "node_rank", "master_addr", "master_port"],
        "several nodes are started by torchrun, which has an option of this name",
    ),
    "train_epoch_length": "an epoch is one pass over the data; run.max_iterations is the length of a run in updates",
    "filename_prefix": "checkpoints have no prefix, as each run has a folder, run.directory",
    "debug": "what is logged is in logs/rank_N.log of the run's folder, whatever the console shows",
}
NAMES = _KEYS | {name: f"task_options.{name}" for name in _OF_THE_TASK}

MEANT = NAMES | {
    "learning_rate": "optimizer.lr",
    **dict.fromkeys(["grad_clip", "gradient_clip_val", "max_grad_norm"], "update.clip_norm"),
    "save_top_k": "checkpoint.keep_best",
    "save_total_limit": "checkpoint.keep_last",
    "scaler": "update.grad_scaler",
}


def hint(name: str) -> str | None:
    """The end of a sentence about an unknown key of that name; None: it is none of them."""
    if name in MEANT:
        return f"; did you mean '{MEANT[name]}'?"
    return f"; {IN_WORDS[name]}." if name in IN_WORDS else None
