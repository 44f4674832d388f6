"""How far a run has come: the counters that ``state`` does not hold, and the position in the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from enum import Enum
from itertools import islice, repeat
from typing import Any

from ignite_engine import rng
from ignite_engine.data.lookahead import Waiting
from ignite_engine.data.read_errors import ReadErrors
from ignite_engine.data.shares import source_of
from ignite_engine.data.source import DataSource
from ignite_engine.data.windows import WindowedSource, Windows
from ignite_engine.ranks import agreement, mesh
from ignite_engine.state import COUNTERS, TOTALS, TrainingState
from ignite_engine.states.registry import Stateful
from ignite_engine.states.resume_state import ResumeState
from ignite_engine.step.micro_batches import check_steps

logger = logging.getLogger(__name__)


class Ending(Enum):
    """How the run before ended in this process, which decides how the next one starts."""

    NONE = "none"
    """There was none."""
    AT_BOUNDARY = "at_boundary"
    """At a step boundary: it can be continued."""
    PAUSED = "paused"
    """By ``interrupt()``, at a step boundary: ``run()`` continues there, with the same data if none is given."""
    TERMINATED = "terminated"
    """By ``terminate()``: as in Ignite, the rest of the pass is given up."""
    FAILED = "failed"
    """By an exception, perhaps within an update: the next run starts over."""


class Progress:
    """Counters and data position; the parts ``trainer``, ``data`` and ``rng`` of a checkpoint.

    ``epochs_completed`` and ``epoch_iteration`` are counted, never derived from ``iteration``: passes over data of
    unknown length differ, and an epoch may have been cut short.
    """

    def __init__(
        self,
        state: TrainingState,
        resume: ResumeState,
        accumulation_steps: int | None,
        global_micro_batches: int | None = None,
        *,
        may_be_empty: bool = False,
        weigh: Callable[[Any], float] | None = None,
        waiting: Waiting | None = None,
        max_read_errors: int = 0,
    ) -> None:
        self.state, self.accumulation_steps = state, accumulation_steps
        self.global_micro_batches, self._may_be_empty = global_micro_batches, may_be_empty
        self._weigh, self._waiting, self.max_read_errors = weigh, waiting, max_read_errors
        self._resume = resume
        self.source: DataSource | WindowedSource | None = None
        self.user_data: Any = None
        """The user's own object behind :attr:`source`."""
        self.epochs_completed = 0
        self.epoch_iteration = 0
        self.advanced = 1
        """Iterations of the epoch that the last group counts for: more than one, where others could not be read."""
        self.measured = False
        """An epoch is one pass over data of unknown length."""
        self.whole_passes = False
        """An epoch is one pass over data, nobody gave another length."""
        self.at_boundary = True
        """No update is half done."""
        self.epoch_ends: bool | str = False
        """``terminate_epoch()`` was asked for at this boundary; a stop came first."""
        self.ending = Ending.NONE
        self.left_at = (0, 0)
        """Iteration and epoch at that ending."""
        self._batches = self._optimizer_steps = 0
        self._saved_with = self._grouping
        self.built_with = accumulation_steps
        """``accumulation_steps`` of a run that starts."""
        self._next_steps: int | None = None
        """What it changes to with the next pass."""

    @property
    def _grouping(self) -> tuple[int | None, int | None]:
        return self.accumulation_steps, self.global_micro_batches

    def change_accumulation(self, steps: int) -> None:
        """Group other numbers of batches from the next pass over the data on, or, before a run, in all of it.

        Raises:
            ValueError: it is below 1, or batches are not grouped by it.
        """
        check_steps(steps, "accumulation_steps")
        if self.accumulation_steps is None:
            how = "global_micro_batches" if self.global_micro_batches is not None else "no grouping"
            raise ValueError(
                f"accumulation_steps can change in a Trainer that was made with some, and this one has {how}: make it "
                "Trainer(update, accumulation_steps=1)."
            )
        if self.state.status == "running":
            self._next_steps = steps
        else:
            self.accumulation_steps = self.built_with = steps
            self._saved_with = self._grouping

    @property
    def length_as_built(self) -> int | None:
        """Iterations of the run had it not changed its accumulation itself; None: it did not, or that is not known."""
        source, state = self.source, self.state
        changed = self._next_steps is not None or self.accumulation_steps != self.built_with
        if not changed or not self.whole_passes or state.max_iters is not None or state.max_epochs is None:
            return None
        assert isinstance(source, DataSource) and source.batches is not None and self.built_with is not None
        return state.max_epochs * -(-source.batches // self.built_with)

    def start_over(self) -> None:
        """A run starts fresh: accumulation that an earlier one has changed is as it was built."""
        self.accumulation_steps, self._next_steps = self.built_with, None
        self._saved_with = self._grouping

    def _change_steps(self) -> None:
        steps, self._next_steps = self._next_steps, None
        if steps is None or steps == self.accumulation_steps:
            return
        self.accumulation_steps = steps
        self._saved_with = self._grouping
        if isinstance(self.source, DataSource):
            self.source.steps = steps
        if agreement.rank() == 0:
            logger.info("From iteration %d on an iteration is %d micro-batches.", self.state.iteration + 1, steps)

    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint by name."""
        return {
            "trainer": _Part(self.state_dict, self.load_state_dict),
            "data": _Part(self._data_state, self._set_data_state),
            "rng": _Part(rng.capture, self._set_rng_state),
        }

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> int | None:
        """Iterations in one pass over the data, None if unknown."""
        return None if self.source is None else self.source.iterations

    @property
    def pass_is_untouched(self) -> bool:
        """Nothing of the present pass was consumed."""
        return self.source is None or (self.source.position.batch == 0 and not self.source.position.ended)

    def new_source(self, data: Any) -> DataSource | WindowedSource:
        """A source over the user's data; a collective."""
        if isinstance(data, Windows):
            if self.global_micro_batches is not None and not data.shared and mesh.data_size() > 1:
                raise ValueError(
                    "global_micro_batches deals one order of samples out to the ranks, and Windows(shared=False) gives "
                    "each rank samples of its own: use shared windows, or accumulation_steps."
                )
            stops = (lambda: False) if self._waiting is None else self._waiting.stops_waiting
            return WindowedSource(data, self._source_of, stops)
        source = self._source_of(data)
        source.agree_lengths()
        return source

    def _source_of(self, data: Any) -> DataSource:
        return source_of(
            data,
            *self._grouping,
            may_be_empty=self._may_be_empty,
            weigh=self._weigh,
            waiting=self._waiting,
            read_errors=ReadErrors(self.max_read_errors, self.state) if self.max_read_errors else None,
        )

    def use(self, source: DataSource | WindowedSource | None, data: Any) -> None:
        """Iterate ``source``, made of ``data``, from now on."""
        self.source, self.user_data = source, data
        self.state.padding, self.state.group_total, self.state.group_weights = 0, 0, None

    def replace_data(self, data: Any) -> None:
        """A handler or ``set_data()`` gave other data in the middle of a run: a new pass over it."""
        before, source = self.source, self.new_source(data)
        if before is not None:  # another pass: the same order again would be the same data
            source.position.pass_number = before.position.pass_number + int(before.position.batch > 0)
        self.use(source, data)

    def open_pass(self) -> Iterator[Any]:
        """The groups of the present pass from the position on; None for each iteration where there is no data."""
        data = self.state.dataloader
        if data is not None and data is not self.user_data:
            self.replace_data(data)
        if data is None or self.source is None:
            assert self.state.epoch_length is not None
            return repeat(None, self.state.epoch_length)
        if self.source.position.between_passes:
            self._change_steps()
            self.source.agree_lengths()  # the data may have grown
            self.state.padding, self.state.group_total, self.state.group_weights = 0, 0, None
            if self.whole_passes and self.source.iterations:
                self.state.epoch_length = self.source.iterations
        if not self.source.was_begun:
            return iter(self.source)
        with rng.isolated():  # the uninterrupted run made this iterator earlier
            return iter(self.source)

    def close(self) -> None:
        """The run is over: loader workers end with it."""
        if self.source is not None:
            self.source.close()

    @property
    def windows(self) -> WindowedSource | None:
        """The source, where it is one of windows."""
        return self.source if isinstance(self.source, WindowedSource) else None

    @property
    def _present(self) -> DataSource | None:
        """Over what is iterated now: the source, or its open window."""
        return self.source.window if isinstance(self.source, WindowedSource) else self.source

    # -- counting -------------------------------------------------------------------------------------------------

    def epoch_is_full(self) -> bool:
        """Whether the epoch has all its iterations; a pass over data of unknown length ends with the data."""
        length = self.state.epoch_length
        return length is not None and self.epoch_iteration >= length and not self.measured

    def group_fetched(self, group: Any) -> None:
        self.at_boundary = False
        self._optimizer_steps = self.state.optimizer_steps
        if (source := self._present) is not None:
            self._batches = source.size_of(group)
            if source.pads:
                self.state.padding, self.state.group_total = source.padded(self._batches)
                self.state.group_weights = source.weights

    def samples_of_group(self) -> list[int] | None:
        """Dataset indices of this rank's group that was fetched last; None if the data is not a ``loader()``'s."""
        source = self._present
        if source is None or source.sampler is None:
            return None
        size, order = source.data.batch_size, copy(source.sampler)
        order.start = source.position.batch * size
        return [index for _, index in islice(order, self._batches * size)]

    def group_consumed(self) -> None:
        self.at_boundary = True
        before = self.epoch_iteration
        self.epoch_iteration += 1
        self._consume()
        self.advanced = self.epoch_iteration - before

    def rest_is_unread(self) -> bool:
        """Whether the epoch is full with what could not be read at the end of the pass, which is then consumed."""
        errors = None if self._present is None else self._present.read_errors
        if errors is None or not errors.groups:
            return False
        self._batches = errors.batches
        self._consume()
        return self.epoch_is_full()

    def _consume(self) -> None:
        if self.source is None or self._present is None:
            return
        if (errors := self._present.read_errors) is not None:
            self.epoch_iteration += errors.groups
            self.state.read_errors += errors.count
        self.source.consumed(self._batches)

    def group_discarded(self) -> None:
        """A user's EXCEPTION_RAISED handler swallowed the error of an update: its group does not come again."""
        if not self.at_boundary:
            self.at_boundary = True
            self._consume()

    def end_pass(self) -> None:
        if self.source is not None:
            self.source.next_pass()
        self.state.window, self.state.windows_completed = None, self.state.windows

    def begin_window(self) -> None:
        """The first group of a window was fetched."""
        assert self.windows is not None
        self.windows.begin()
        self.state.windows += 1
        self.state.window = self.windows.data.present

    def end_epoch(self) -> None:
        self.epochs_completed = self.state.epoch
        self.epoch_iteration = 0
        if self.windows is not None:
            self.windows.end_epoch()

    @contextmanager
    def before_the_failure(self, update: Any) -> Iterator[bool]:
        """Let the counters say what was done before an iteration failed; yields whether the weights agree with it.

        They do not if an optimizer had begun to step, nor after an update function that does not say so.
        """
        state = self.state
        stepped = getattr(update, "stepping", True) or state.optimizer_steps != self._optimizer_steps
        undone = int(not self.at_boundary and state.iteration > 0)
        state.iteration -= undone
        try:
            yield self.at_boundary or not stepped
        finally:
            state.iteration += undone

    def reason_of_end(self) -> str:
        """Why a run that nobody stopped is over."""
        state = self.state
        if state.max_iters is not None and state.iteration >= state.max_iters:
            return "max_iters"
        if state.max_epochs is not None and self.epochs_completed >= state.max_epochs:
            return "max_epochs"
        by_windows = state.max_windows is not None and state.windows_completed >= state.max_windows
        return "max_windows" if by_windows else "terminate"

    # -- in checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self.state, name) for name in ("iteration", *COUNTERS)}
        counters |= {name: total for name in TOTALS if (total := getattr(self.state, name)) is not None}
        return counters | {
            "epochs_completed": self.epochs_completed,
            "epoch_iteration": self.epoch_iteration,
            "epoch_ends": self.epoch_ends,
            "accumulation_steps": self.accumulation_steps,
            "accumulation_built_with": self.built_with,
            "next_accumulation_steps": self._next_steps,
            "micro_batch_limit": self.state.micro_batch_limit,
            "global_micro_batches": self.global_micro_batches,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in ("iteration", *COUNTERS):
            setattr(self.state, name, saved.get(name, 0))  # some were not always saved
        for name in TOTALS:
            setattr(self.state, name, saved.get(name))
        self.epochs_completed, self.epoch_iteration = saved["epochs_completed"], saved["epoch_iteration"]
        self.epoch_ends = saved.get("epoch_ends", False)
        self.state.micro_batch_limit = saved.get("micro_batch_limit")  # it was not always saved
        self.state.epoch = self.epochs_completed
        if saved.get("accumulation_built_with") is not None and saved["accumulation_built_with"] == self.built_with:
            # the same program: a change within the run is not undone by a resume
            self.accumulation_steps, self._next_steps = saved["accumulation_steps"], saved["next_accumulation_steps"]
        self._saved_with = saved["accumulation_steps"], saved.get("global_micro_batches")
        self._resume.counters = True

    def grouped_otherwise(self) -> str | None:
        """How an iteration differs from one of the run that was loaded, None if it does not."""
        if self._saved_with == self._grouping:
            return None
        names = ("accumulation_steps", "global_micro_batches")
        then, now = (
            ", ".join(f"{name}={value}" for name, value in zip(names, each, strict=True) if value) or "no grouping"
            for each in (self._saved_with, self._grouping)
        )
        return f"saved with {then}, resumed with {now}: an iteration is other samples"

    def regroup(self) -> None:
        """After a resume with another accumulation or number of ranks: how much of the epoch is left the data says."""
        source, same = self.source, self._saved_with == self._grouping
        self._saved_with = self._grouping
        if source is None or (same and not source.position.skipped) or not self.whole_passes:
            return
        assert isinstance(source, DataSource) and source.batches is not None and self.state.epoch_length is not None
        left = 0 if source.position.ended else -(-(source.batches - source.position.batch) // source.steps)
        at_its_start = source.position.ended and self.epoch_iteration == 0
        self.epoch_iteration = 0 if at_its_start else self.state.epoch_length - left

    def _data_state(self) -> dict[str, Any]:
        return {} if self.source is None else self.source.state_dict()

    def _set_data_state(self, saved: dict[str, Any]) -> None:
        self._resume.data = saved

    def _set_rng_state(self, saved: dict[str, Any]) -> None:
        self._resume.rng = saved


class _Part:
    """A part of a checkpoint made of two functions."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.state_dict, self.load_state_dict = get, put
