"""The rules by which a run starts.

:func:`begin` decides which of the four starts this is, checks the arguments against it, and puts counters and data
where the run begins. Trainer, state and the data of the run before are as they were if it raises; a stream of windows
may have been rewound, which the next start does again.
``docs/the_loop.md`` shows the four starts side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from ignite_engine import rng
from ignite_engine.checkpoint.states.registry import Registry, ResumeState
from ignite_engine.data.source import OwnSource, Source
from ignite_engine.errors import is_whole
from ignite_engine.loop.position import EpochIs, Plan, Position, limit_reached
from ignite_engine.loop.progress import Progress
from ignite_engine.ranks import agreement, mesh
from ignite_engine.state import COUNTERS, Start, TrainingState

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
        for name in ("max_epochs", "max_iters"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 1):
                raise ValueError(
                    f"Argument {name} is invalid. Please, set a correct {name} positive value: "
                    f"expected a whole number of at least 1, got {value!r}."
                )
        if self.epoch_length is not None and not is_whole(self.epoch_length):
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
    limits |= arguments.data.settings if isinstance(arguments.data, OwnSource) else {}
    groups = {
        f"{name}.param_groups[{place}][{key!r}]": value
        for name, optimizer in optimizers.items()
        for place, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, int | float | str | tuple | None)
    }
    if difference := agreement.first_difference({**settings, **limits, **groups}):
        raise ValueError(f"{difference}: every rank must train with the same settings.")


def begin(
    arguments: RunArguments, state: TrainingState, progress: Progress, registry: Registry, resume: ResumeState
) -> None:
    """Put counters, limits and data where the run begins; a collective.

    Raises:
        ValueError: the arguments contradict the state, or the data is unusable.
        StateMismatch: the loaded position is one in other data.
    """
    start, position, max_epochs, max_iters = _decide(arguments, state, progress, resume)
    if isinstance(arguments.data, OwnSource) and arguments.epoch_length is not None:
        kind = type(arguments.data).__name__
        raise ValueError(
            f"{kind}(per_epoch=...) sets the length of an epoch, got epoch_length={arguments.epoch_length}."
        )
    # a new source may begin a stream again, and draw random numbers for its loaders
    random_numbers = rng.capture() if start is Start.CONTINUED and position.data is not None else None
    source = None if arguments.data is None else progress.new_source(arguments.data)
    try:
        if source is not None:
            position = _placed(source, arguments.data, start, state, progress, position)
        plan = _plan(arguments, state, progress, source, start, max_epochs, max_iters)
    except BaseException:
        if source is not None:
            source.close()  # the loader is the user's again
        raise
    if position.data is None and plan.epoch_length is not None and not _is_as_left(state, progress):
        # as Ignite after its load_state_dict()
        position = replace(position, epoch_iteration=state.iteration % plan.epoch_length)
    left = source.iterations_left if source is not None and position.data else None
    if left is not None and plan.epoch_is is EpochIs.A_PASS and (left or position.epoch_iteration):
        assert plan.epoch_length is not None
        # whatever an iteration was, or how many ranks have read: at 0 the end of the epoch has not been reported
        position = replace(position, epoch_iteration=plan.epoch_length - left)

    # nothing below raises
    if start is Start.FRESH:
        _reset(state, progress)
    progress.begin(source, arguments.data, plan, position)
    if random_numbers is not None:
        registry.keep_metrics()
        resume.rng = random_numbers  # handlers of STARTED may draw, too
    if start is Start.RESUMED and resume.saved_grouping != progress.grouping:
        reason = f"saved with {resume.saved_grouping}, resumed with {progress.grouping}: an iteration is other samples"
        registry.resumed_otherwise.append(reason)
        if agreement.rank() == 0:
            logger.warning("The run may not be bit-exact: it was %s.", reason)
    state.epoch, state.start = position.epoch, start
    _say_what_is_read_whole(getattr(source, "data", None))


def _decide(
    arguments: RunArguments, state: TrainingState, progress: Progress, resume: ResumeState
) -> tuple[Start, Position, int | None, int | None]:
    """The kind of start, the position before its data is considered, ``max_epochs`` and ``max_iters``."""
    given, left = (arguments.max_epochs, arguments.max_iters), progress.left
    default = (1, None) if given == (None, None) else given
    if resume.is_pending:
        at_least = max(1, progress.epochs_completed)  # a finished run is evaluated, not trained on
        limits = (at_least, None) if given == (None, None) else given
        return Start.RESUMED, replace(progress.counted, data=resume.data or {}), *limits
    if progress.failed or (state.max_epochs is None and state.max_iters is None):
        return Start.FRESH, Position(), *default
    stopped = left is not None and state.status == "interrupted"
    _check_against_state(arguments, state, stopped=stopped)
    max_epochs = given[0] if given[0] is not None else state.max_epochs
    max_iters = given[1] if given[1] is not None else state.max_iters
    done = limit_reached(Position(state.iteration, state.epoch), Plan(max_epochs, max_iters))
    if done and not stopped:
        return Start.FRESH, Position(), *default
    goes_on = left is not None and left.data is not None and (stopped or _is_as_left(state, progress))
    position = left if goes_on and left else Position(state.iteration, epochs=state.epoch, data=None)
    return Start.CONTINUED, position, max_epochs, max_iters


def _is_as_left(state: TrainingState, progress: Progress) -> bool:
    """Whether the counters are still those with which the previous run ended."""
    left = progress.left
    return left is not None and (left.iteration, left.epoch) == (state.iteration, state.epoch)


def _say_what_is_read_whole(data: Any) -> None:
    """A stream that nobody shares out here; who knows ranks does it himself."""
    is_stream = isinstance(getattr(data, "dataset", None), IterableDataset)
    if is_stream and mesh.data_size() > 1 and agreement.rank() == 0:
        logger.warning(
            "%s is read whole by each of the %d ranks, unless it yields the share of data_rank() of data_size() (both "
            "in ignite_engine.ranks), and of torch's get_worker_info().",
            *(type(data.dataset).__name__, mesh.data_size()),
        )


def _reset(state: TrainingState, progress: Progress) -> None:
    """Set all counters of a fresh run to zero, and drop what a failed run has left."""
    if progress.failed:
        state.metrics.clear()
        state.metrics.fresh = {}
    for counter in ("epoch", *COUNTERS):
        setattr(state, counter, 0)
    state.not_finite_at = None


def _check_against_state(arguments: RunArguments, state: TrainingState, *, stopped: bool = False) -> None:
    """Apply Ignite's rules for a second ``run()``; after a stop, limits may be lowered."""
    limits = (("max_iters", "max_epochs", "iteration"), ("max_epochs", "max_iters", "epoch"))
    for name, other, counter in limits:
        value, reached = getattr(arguments, name), getattr(state, counter)
        switches = getattr(state, name) is None and getattr(state, other) is not None
        if value is not None and switches and getattr(arguments, other) is None:
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


def _plan(
    arguments: RunArguments,
    state: TrainingState,
    progress: Progress,
    source: Source | None,
    start: Start,
    max_epochs: int | None,
    max_iters: int | None,
) -> Plan:
    """The limits and the epochs of the run.

    Raises:
        ValueError: ``epoch_length`` contradicts the state or is missing, or there is no data.
    """
    given, known = arguments.epoch_length, None if source is None else source.iterations
    measured = progress.epoch_is is EpochIs.MEASURED
    if start is Start.CONTINUED and state.epoch_length is not None and not measured:
        if given is not None and given != state.epoch_length:
            raise ValueError(
                f"Argument epoch_length should be same as in the state, but given {given} vs {state.epoch_length}"
            )
        if progress.epoch_is is EpochIs.A_LENGTH:
            given = state.epoch_length
    length = given if given is not None else known
    if length is None and source is None:
        length = state.epoch_length if start is Start.FRESH else None
        if length is None:
            raise ValueError("epoch_length should be provided if data is None")
    if known == 0 or (length is not None and length < 1):
        raise ValueError("Input data has zero size. Please provide non-empty data")
    if given is not None or source is None:
        epoch_is = EpochIs.A_LENGTH
    else:
        epoch_is = EpochIs.MEASURED if source.iterations_left is None else EpochIs.A_PASS
    return Plan(max_epochs, max_iters, length, epoch_is)


def _placed(
    source: Source, data: Any, start: Start, state: TrainingState, progress: Progress, position: Position
) -> Position:
    """Move a new source to where the run begins. A collective.

    Returns:
        The position: other data begins at its first batch, and an epoch with it, unless epochs are of a given length.
    """
    before = progress.source
    goes_on = start is Start.RESUMED or state.status == "interrupted" or data is progress.user_data
    if position.data and goes_on:
        same = start is Start.CONTINUED  # what it holds may have changed since
        source.load({**position.data, "fingerprint": None} if same else dict(position.data))
        if same and isinstance(data, Iterator):
            source.reads_on()
        return position
    if start is not Start.CONTINUED or before is None:
        source.begin(position.epochs)
        return position
    source.begin(before.pass_number + int(before.batch > 0))  # the same order would be the same samples
    if position.data is not None and progress.epoch_is is not EpochIs.A_LENGTH:
        return replace(position, epochs=position.epoch, epoch_iteration=0)
    return position
