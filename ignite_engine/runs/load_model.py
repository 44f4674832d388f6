"""A model from its checkpoint alone, built by the task that the checkpoint's config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ignite_engine import rng
from ignite_engine.checkpointing import CheckpointError, LoadPlan, find_source, prepare, read_source
from ignite_engine.states.model_and_optimizer import ModelState
from ignite_engine.task import Task, TaskError, build_task, find_task


def load_model(
    checkpoint: str | Path,
    *,
    ema: bool | str = False,
    import_task: bool = False,
    task: Callable[[Mapping[str, Any]], Task] | None = None,
    strict: bool = True,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Rebuild a checkpoint's model and load its weights.

    Args:
        checkpoint: its directory, or a folder of checkpoints or of a run (the newest valid one).
        ema: load the average; a name if it is not ``ema``.
        import_task: import and run the task file that the checkpoint's config names: only if you trust it.
        task: the function that makes the task, instead of the named one. It gets the config's ``task_options``; the
            random number generators of this process are left unchanged.
        strict: refuse if names are missing on either side, or were left out when it was saved; otherwise they stay as
            the task built them.
        device: of the returned model.

    Returns:
        The model in evaluation mode.

    Raises:
        CheckpointError: it cannot be read, or holds no config, model or average.
        TaskError: ``import_task`` is False, or the task cannot be found or built.
        StateMismatch: the weights do not fit the model that the task builds.
    """
    path = find_source(checkpoint)
    source = read_source(path, whole=False)
    config = source.manifest.config if source.manifest is not None else None
    if config is None and task is None:
        raise CheckpointError(f"{path} holds no config, so how its model is built is unknown: give task=.")
    config = config or {}
    build = task or _named_task(path, config, import_task)
    with rng.isolated():
        rng.seed_host(config.get("run", {}).get("seed", 0))  # what was left out is initialized as in the run
        model = build_task(build, config.get("task_options", {})).model
    name = "ema" if ema is True else ema
    plan = LoadPlan.fine_tune(weights=name or "raw", strict=strict)
    states, table = prepare(
        plan,
        source.parts,
        {"model": ModelState(model)},
        source=str(path),
        left_out=source.left_out,
        kinds=source.kinds,
    )
    if strict and table["model"].left_out:
        raise CheckpointError(
            f"{path} was saved without some of its model ({table['model']}): use strict=False to keep these as "
            "they are built."
        )
    ModelState(model).load_state_dict(states["model"])
    return model.to(device).eval()


def _named_task(path: Path, config: Mapping[str, Any], import_task: bool) -> Callable[[Mapping[str, Any]], Task]:
    name = config.get("task")
    if not isinstance(name, str):
        raise CheckpointError(f"{path} has a config that names no task: give task=.")
    if not import_task:
        raise TaskError(
            f"{path} was made with the task {name!r}, which would be imported and run: use import_task=True if you "
            "trust it, or give the function as task=."
        )
    return find_task(name, path.resolve().parent)
