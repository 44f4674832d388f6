"""Weights of a checkpoint into a model, also one that is built by the task that the checkpoint's config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ignite_engine import rng
from ignite_engine.checkpoint.load import prepare
from ignite_engine.checkpoint.sources import NAMES, LoadSource, Source, Which, model_part, read_named, split_name
from ignite_engine.checkpoint.states.loading import load_state
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, clean_name, unwrap
from ignite_engine.errors import CheckpointError, StateMismatch, check_type
from ignite_engine.runs.task import IN_PYTHON, Task, TaskError, build_task, find_task


def load_model(
    checkpoint: str | Path,
    which: Which = "last",
    *,
    ema: bool | str | None = None,
    import_task: bool = False,
    task: Callable[[Mapping[str, Any]], Task] | None = None,
    strict: bool = True,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Rebuild a checkpoint's model and load its weights as :func:`load_weights` does.

    Args:
        checkpoint, which, ema: as for :func:`load_weights`; a checkpoint, not a file of weights.
        import_task: import and run the task file that the checkpoint's config names: only if you trust it.
        task: the function that makes the task, instead of the named one. It gets the config's ``task_options``; the
            random number generators of this process are left unchanged.
        strict: as for :func:`load_weights`; otherwise what is missing stays as the task built it.
        device: of the returned model.

    Returns:
        The model in evaluation mode.

    Raises:
        CheckpointError: it cannot be read, or holds no config, model or average.
        TaskError: ``import_task`` is False, or the task cannot be found or built.
        StateMismatch: the weights do not fit the model that the task builds.
    """

    def built(source: Source, weights: str) -> nn.Module:
        config = source.manifest.config if source.manifest is not None else None
        if config is None and task is None:
            raise CheckpointError(f"{source.path} holds no config, so how its model is built is unknown: give task=.")
        config = config or {}
        build = task or _named_task(source.path, config, import_task)
        with rng.isolated():
            rng.seed_host(config.get("run", {}).get("seed", 0))  # what was left out is initialized as in the run
            model = build_task(build, config.get("task_options", {})).model
        _load(source, weights, model, strict=strict)
        return model

    model = read_named(_named(checkpoint, which), weights=_part_of(ema), use=built)
    return model.to(device).eval()


def load_weights(
    model: nn.Module,
    checkpoint: str | Path,
    which: Which = "last",
    *,
    ema: bool | str | None = None,
    part: str | None = None,
    strict: bool = True,
) -> Path:
    """Load the weights of a checkpoint into a model, in place: ``load_weights(model, "runs/x", "best")``.

    The model may be in DDP, ``torch.compile`` or FSDP2, also if it was not when it was saved, and the other way round.
    Not a collective: each rank reads for itself.

    Args:
        model: its device and mode stay.
        checkpoint: its directory, a folder of checkpoints or of a run, perhaps with a name (``runs/x/best``), or a file
            of weights (safetensors, or a state_dict of ``torch.save``).
        which: of a folder the ``last`` valid one or the ``best``.
        ema: load the average; a name if it is not ``ema``. None: of the best the weights that were evaluated,
            otherwise the trained ones.
        part: the name under which the run has registered it; None: ``model``, or its only model.
        strict: refuse if names are missing on either side, or shapes differ; otherwise these stay as they are.

    Returns:
        The checkpoint or file that was loaded.

    Raises:
        CheckpointError: there is none, it cannot be read, or it holds no model or no such average.
        StateMismatch: the weights do not fit the model.
    """
    check_type("model", model, isinstance(model, nn.Module), "a module")

    def load(source: Source, weights: str) -> Path:
        _load(source, weights, model, strict=strict, part=part)
        return source.path

    return read_named(_named(checkpoint, which), weights=_part_of(ema), use=load)


def _named(checkpoint: str | Path, which: Which) -> Path:
    """The path that also has the name."""
    if which not in NAMES:
        raise ValueError(f"which must be 'best' or 'last', got {which!r}.")
    return split_name(checkpoint)[0] / which if which == "best" else Path(checkpoint)


def _part_of(ema: bool | str | None) -> str | None:
    """The part of the weights that ``ema`` asks for."""
    return ("ema" if ema else "raw") if isinstance(ema, bool) else ema


def _load(source: Source, weights: str, model: nn.Module, *, strict: bool, part: str | None = None) -> None:
    path, state = source.path, ModelState(model)
    part = model_part(source, part)
    saved = source.parts[part] if source.manifest is not None else _unwrapped(source.parts[part], state)
    wanted = LoadSource(path, weights=weights, strict=False)
    read = replace(source, parts={**source.parts, "model": saved})
    states, report = prepare(wanted, read, {"model": state}, kinds={"model": "model"})
    if not report.complete and (strict or not report.loaded):
        raise StateMismatch(
            f"The model is not that of {path} ({report.differences.replace('model:', '')}): build it as it was saved, "
            "or use strict=False to leave these as they are."
        )
    load_state(state, states["model"])


def _unwrapped(weights: Mapping[str, Any], state: ModelState) -> dict[str, Any]:
    """Weights from elsewhere under the names of the model inside DDP and torch.compile."""
    clean = {clean_name(name): value for name, value in weights.items()}
    inside = all(name.startswith("module.") for name in clean) and not hasattr(unwrap(state.model), "module")
    return {name.removeprefix("module.") if inside else name: value for name, value in clean.items()}


def _named_task(path: Path, config: Mapping[str, Any], import_task: bool) -> Callable[[Mapping[str, Any]], Task]:
    name = config.get("task")
    if not isinstance(name, str):
        raise CheckpointError(f"{path} has a config that names no task: give task=.")
    if name == IN_PYTHON:
        raise TaskError(
            f"{path} was made by fit() in Python, so only its program can build the model: make it there and use "
            "load_weights(model, run), or give a function that makes the task as task=."
        )
    if not import_task:
        raise TaskError(
            f"{path} was made with the task {name!r}, which would be imported and run: use import_task=True if you "
            "trust it, or give the function as task=."
        )
    return find_task(name, path.resolve().parent)
