"""The progress of a run in a checkpoint: the parts ``trainer``, ``data`` and ``rng``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ignite_engine import rng
from ignite_engine.checkpoint.states.model_and_optimizer import clean_name, unwrap
from ignite_engine.checkpoint.states.registry import ResumeState, Stateful
from ignite_engine.loop.position import Grouping
from ignite_engine.loop.progress import Progress
from ignite_engine.state import COUNTERS, TOTALS
from ignite_engine.update.base import BaseUpdate


def parts(progress: Progress, resume: ResumeState, update: BaseUpdate) -> dict[str, Stateful]:
    """The parts by name: all of :attr:`Progress.position`, the counters, and the random numbers.

    Args:
        resume: takes what cannot be set before the run begins.
        update: what the run calls.
    """

    def set_counters(saved: dict[str, Any]) -> None:
        _set_counters(progress, saved)
        resume.in_eval_mode = saved["in_eval_mode"]
        resume.saved_grouping = Grouping(saved["accumulation_steps"], saved["global_micro_batches"])

    return {
        "trainer": _Part(lambda: counters(progress) | {"in_eval_mode": in_eval_mode(update)}, set_counters),
        "data": _Part(lambda: progress.position.data, lambda saved: setattr(resume, "data", saved)),
        "rng": _Part(rng.capture, lambda saved: setattr(resume, "rng", saved)),
    }


def counters(progress: Progress) -> dict[str, Any]:
    """Counters and settings that a resumed run needs."""
    state = progress.state
    values = {name: getattr(state, name) for name in ("iteration", *COUNTERS)}
    values |= {name: total for name in TOTALS if (total := getattr(state, name)) is not None}
    return values | {
        "epochs_completed": progress.epochs_completed,
        "epoch_iteration": progress.epoch_iteration,
        "epoch_ends": progress.epoch_ends,
        "accumulation_steps": progress.grouping.accumulation_steps,
        "global_micro_batches": progress.grouping.global_micro_batches,
        "output": _numbers(state.output),  # where this iteration turns out to be its epoch's last, its end reads it
    }


def in_eval_mode(update: BaseUpdate) -> list[str]:
    """The modules of its model that a handler has put into eval mode, as it may at EPOCH_STARTED alone."""
    modules = () if update.model is None else unwrap(update.model).named_modules()
    return [clean_name(name) for name, module in modules if not module.training]


def set_modes(model: nn.Module, in_eval_mode: Collection[str]) -> None:
    """Train mode, but for these."""
    model.train()
    for name, module in unwrap(model).named_modules():
        if clean_name(name) in in_eval_mode:
            module.training = False


def _numbers(output: Any) -> Any:
    """What an update has returned, as far as it is numbers; tensors of one element stay tensors."""
    if isinstance(output, Mapping):
        return {str(name): value for name, part in output.items() if (value := _numbers(part)) is not None}
    if isinstance(output, Tensor):
        return output.detach().clone() if output.numel() == 1 else None
    return output if isinstance(output, int | float) else None


def _set_counters(progress: Progress, saved: dict[str, Any]) -> None:
    state = progress.state
    for name in ("iteration", *COUNTERS):
        setattr(state, name, saved[name])
    for name in TOTALS:
        setattr(state, name, saved.get(name))
    state.epoch = saved["epochs_completed"]
    progress.epochs_completed, progress.epoch_iteration = saved["epochs_completed"], saved["epoch_iteration"]
    progress.epoch_ends = saved["epoch_ends"]
    state.output = saved.get("output")


class _Part:
    """A part of a checkpoint, made of two functions."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.state_dict, self.load_state_dict = get, put
