"""How a run starts: every rule about it, and nothing else.

:func:`begin` is all that happens between ``Trainer.run()`` and STARTED. It decides which of the four starts this is,
checks the arguments against it, and puts counters and data where the run begins. Nothing has changed if it raises.
``docs/the_loop.md`` shows the four starts side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ignite_engine import rng
from ignite_engine.data.source import DataSource
from ignite_engine.data.windows import WindowedSource, Windows
from ignite_engine.engine.progress import Ending, Progress
from ignite_engine.ranks import agreement
from ignite_engine.state import COUNTERS, Start, TrainingState
from ignite_engine.states.registry import Registry
from ignite_engine.states.resume_state import ResumeState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunArguments:
    """The arguments of ``Trainer.run()``.

    Raises:
        TypeError, ValueError: one of them is not what it should be, whatever the state of the run.
    """

    data: Iterable[Any] | None
    max_epochs: int | None
    max_iters: int | None
    epoch_length: int | None

    def __post_init__(self) -> None:
        if self.data is not None and not isinstance(self.data, Iterable):
            raise TypeError(f"Argument data should be iterable, got {type(self.data).__name__}.")
        if self.max_epochs is not None and self.max_iters is not None:
            raise ValueError(
                "Arguments max_iters and max_epochs are mutually exclusive. "
                "Please provide only max_epochs or max_iters."
            )
        for name in ("max_epochs", "max_iters"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"Argument {name} is invalid. Please, set a correct {name} positive value: "
                    f"expected a whole number of at least 1, got {value!r}."
                )
        if self.epoch_length is not None and not isinstance(self.epoch_length, int):
            raise ValueError(f"epoch_length must be a whole number of iterations, got {self.epoch_length!r}.")


def check_ranks_agree(arguments: RunArguments, settings: Mapping[str, Any], optimizers: Mapping[str, Any]) -> None:
    """Refuse, on all ranks, a run that is not the same on each of them, or would wait for ever; a collective.

    Args:
        settings: of the Trainer.
        optimizers: by name; their groups' numbers, texts and truth values are compared.

    Raises:
        ValueError: what differs, both values, and their ranks.
    """
    if agreement.world_size() == 1:
        return
    limits = {name: getattr(arguments, name) for name in ("max_epochs", "max_iters", "epoch_length")}
    limits |= arguments.data.settings if isinstance(arguments.data, Windows) else {}
    groups = {
        f"{name}.param_groups[{place}][{key!r}]": value
        for name, optimizer in optimizers.items()
        for place, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, int | float | str | tuple | None)
    }
    if difference := agreement.first_difference({**settings, **limits, **groups}):
        raise ValueError(f"{difference}: every rank must train with the same settings.")


def is_done(state: TrainingState, epochs: int) -> bool:
    """Whether a limit is reached after ``epochs`` epochs; not by iterations per epoch, as passes differ in length."""
    by_epochs = state.max_epochs is not None and epochs >= state.max_epochs
    by_windows = state.max_windows is not None and state.windows_completed >= state.max_windows
    return by_epochs or by_windows or (state.max_iters is not None and state.iteration >= state.max_iters)


def begin(
    arguments: RunArguments, state: TrainingState, progress: Progress, registry: Registry, resume: ResumeState
) -> Start:
    """Put counters, limits and data where the run begins; a collective.

    Raises:
        ValueError: the arguments contradict the state, or the data is unusable.
        StateMismatch: the loaded position is one in other data.
    """
    start, max_epochs, max_iters = _decide(arguments, state, progress, resume)
    if start is Start.FRESH:
        progress.start_over()
    before, continues = progress.source, start is Start.CONTINUED
    # a new source may begin a stream again, and draw random numbers for its loaders
    position = before.state_dict() if continues and before is not None else None
    random_numbers = rng.capture() if continues else None
    source = None if arguments.data is None else progress.new_source(arguments.data)
    windows = source if isinstance(source, WindowedSource) else None
    if windows is not None and arguments.epoch_length is not None:
        raise ValueError(
            f"Windows(per_epoch=...) sets the length of an epoch, got epoch_length={arguments.epoch_length}."
        )
    epoch_length = _epoch_length(arguments, state, source, start, measured=progress.measured)
    known = None if source is None else source.iterations
    whole_passes = arguments.epoch_length is None and known is not None and epoch_length == known
    if source is not None:
        _place(source, start, arguments.data, progress, resume, position)

    # nothing below raises
    progress.measured = source is not None and epoch_length is None
    progress.whole_passes = whole_passes
    progress.use(source, arguments.data)
    state.max_epochs, state.max_iters, state.epoch_length = max_epochs, max_iters, epoch_length
    state.dataloader = arguments.data
    state.max_windows = None if windows is None else windows.data.limit
    state.window = windows.data.present if windows is not None and windows.begun else None
    progress.at_boundary = True
    if start is Start.FRESH:
        if progress.ending is Ending.FAILED:
            state.metrics.clear()
            state.metrics.fresh = {}
            state.media.clear()
        for counter in ("iteration", "epoch", *COUNTERS):
            setattr(state, counter, 0)
        state.not_finite_at = state.micro_batch_limit = None
        progress.epochs_completed = progress.epoch_iteration = 0
    elif start is Start.RESET:
        progress.epochs_completed, progress.epoch_iteration = state.epoch, 0
        if epoch_length is not None and progress.ending is not Ending.TERMINATED:
            progress.epoch_iteration = state.iteration % epoch_length  # as Ignite after its load_state_dict()
    else:
        if start is Start.CONTINUED:
            registry.keep_metrics()
            resume.rng = random_numbers  # handlers of STARTED may draw, too
        if (reason := progress.grouped_otherwise()) is not None:
            registry.resumed_otherwise.append(reason)
            if agreement.rank() == 0:
                logger.warning("The run may go on with other bits: it was %s.", reason)
        progress.regroup()
        state.epoch = progress.epochs_completed + int(progress.epoch_iteration > 0)  # that in which it was left
    state.windows_completed = state.windows - int(windows is not None and windows.begun)
    state.start = start
    return start


def _decide(
    arguments: RunArguments, state: TrainingState, progress: Progress, resume: ResumeState
) -> tuple[Start, int | None, int | None]:
    """Which start it is, with ``max_epochs`` and ``max_iters``."""
    given = arguments.max_epochs, arguments.max_iters
    default = (1, None) if given == (None, None) else given
    if resume.counters:
        at_least = max(1, progress.epochs_completed)  # a finished run is evaluated, not trained on
        return Start.RESUMED, *((at_least, None) if given == (None, None) else given)
    if progress.ending is Ending.FAILED or (state.max_epochs is None and state.max_iters is None):
        return Start.FRESH, *default
    unchanged = progress.left_at == (state.iteration, state.epoch)
    stopped = state.status == "interrupted" or (progress.ending is Ending.PAUSED and unchanged)
    _check_against_state(arguments, state, stopped=stopped)
    max_epochs = given[0] if given[0] is not None else state.max_epochs
    max_iters = given[1] if given[1] is not None else state.max_iters
    if stopped:
        return Start.CONTINUED, max_epochs, max_iters
    done = (max_epochs is not None and state.epoch >= max_epochs) or (
        max_iters is not None and state.iteration >= max_iters
    )
    if done:
        return Start.FRESH, *default
    continues = progress.ending is Ending.AT_BOUNDARY and unchanged
    return (Start.CONTINUED if continues else Start.RESET), max_epochs, max_iters


def after_pause(arguments: RunArguments, state: TrainingState, progress: Progress) -> RunArguments:
    """The same arguments; after ``interrupt()`` the data of the paused run in the place of none."""
    has_limit = state.max_epochs is not None or state.max_iters is not None
    if progress.ending is not Ending.PAUSED or arguments.data is not None or not has_limit:
        return arguments
    return replace(arguments, data=progress.user_data)


def _check_against_state(arguments: RunArguments, state: TrainingState, *, stopped: bool = False) -> None:
    """Ignite's rules for a second ``run()``; one after a stop may be given a nearer end."""
    limits = (("max_iters", "max_epochs", "iteration"), ("max_epochs", "max_iters", "epoch"))
    for name, other, counter in limits:
        value, reached = getattr(arguments, name), getattr(state, counter)
        if value is not None and getattr(state, other) is not None:
            raise ValueError(
                f"To switch from {other} to {name} mode during resume, "
                f"you must first reset by setting 'engine.state.{other} = None' before calling run()."
            )
        if value is not None and value < reached and not stopped:
            raise ValueError(
                f"Argument {name} should be greater than or equal to the start {counter} defined in the state: "
                f"{value} vs {reached}. Please, set engine.state.{name} = None "
                "before calling engine.run() in order to restart the training from the beginning."
            )


def _epoch_length(
    arguments: RunArguments,
    state: TrainingState,
    source: DataSource | WindowedSource | None,
    start: Start,
    *,
    measured: bool,
) -> int | None:
    """Iterations per epoch; None where each pass over data of unknown length is an epoch."""
    given, known = arguments.epoch_length, None if source is None else source.iterations
    if start in (Start.CONTINUED, Start.RESET) and state.epoch_length is not None and not measured:
        if given is not None and given != state.epoch_length:
            raise ValueError(
                f"Argument epoch_length should be same as in the state, but given {given} vs {state.epoch_length}"
            )
        given = state.epoch_length
    length = given if given is not None else known
    if length is None and source is None:
        length = state.epoch_length if start is Start.FRESH else None
        if length is None:
            raise ValueError("epoch_length should be provided if data is None")
    if length is not None and length < 1:
        raise ValueError("Input data has zero size. Please provide non-empty data")
    return length


def _place(
    source: DataSource | WindowedSource,
    start: Start,
    data: Any,
    progress: Progress,
    resume: ResumeState,
    position: dict[str, Any] | None,
) -> None:
    """Move a new source to the position at which the run begins; a fresh one is at the beginning of pass 0.

    Args:
        position: of the source before, where the run continues.
    """
    before = progress.source
    if start is Start.RESUMED:
        if resume.data:
            source.load_state_dict(resume.data)
            if isinstance(source, DataSource) and source.position.skipped:
                source.agree_lengths()  # of the rest of the pass
    elif position is not None and before is not None:
        if data is progress.user_data or source.data is before.data:
            source.load_state_dict(position)
        else:  # other data: the same place in it
            source.position.pass_number, source.position.batch = before.position.pass_number, before.position.batch
    elif start is Start.RESET and before is not None:
        source.position.pass_number = before.position.pass_number + int(before.position.batch > 0)
