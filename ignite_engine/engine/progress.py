"""Where a run stands: its counters, its data and its random numbers, and how they are taken up again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ignite_engine import rng
from ignite_engine.data.source import DataSource
from ignite_engine.state import COUNTERS
from ignite_engine.states.registry import Stateful
from ignite_engine.step.micro_batches import Group

if TYPE_CHECKING:
    from ignite_engine.engine.loop import TrainingLoop


class RunPosition:
    """The Trainer's counters: what ``state`` does not say; the parts ``trainer``, ``data``, ``rng`` of a checkpoint.

    ``epochs_completed`` and ``epoch_iteration`` are counted, never derived from ``iteration``: passes over unsized
    data differ in length, and an epoch may have been cut short.
    """

    def __init__(self, trainer: TrainingLoop) -> None:
        self._trainer: TrainingLoop = weakref.proxy(trainer)  # no cycle: a dropped Trainer is freed at once
        self.source: DataSource | None = None
        self.epochs_completed = 0
        self.epoch_iteration = 0
        self.measured = False
        """An epoch is one pass over data of unknown length."""
        self.resumed = False
        self.clean = True
        """No group is half done."""
        self._waiting_data: dict[str, Any] | None = None
        self._waiting_rng: dict[str, Any] | None = None
        self._batches = self._steps = 0
        self._continues = False
        self._other_groups = False
        self.taking_up = False
        """STARTED of a run that goes on: what happens at the start of a run has happened."""

    def parts(self) -> dict[str, Stateful]:
        """What stands beside the counters in a checkpoint, by name."""
        return {"data": _Part(self._data_state, self._set_data_state), "rng": _Part(rng.capture, self._set_rng_state)}

    # -- the loop tells ------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> int | None:
        """Iterations in one pass over the data, None if unknown."""
        return None if self.source is None else self.source.iterations

    @property
    def source_is_fresh(self) -> bool:
        """Nothing of the present pass was consumed."""
        return self.source is None or (self.source.batch == 0 and not self.source.ended)

    def group_fetched(self, group: Any) -> None:
        self.clean = False
        self._steps = self._trainer.state.optimizer_steps
        self._batches = len(group) if type(group) is Group else 1
        if self.source is not None and self.source.uneven:
            state = self._trainer.state
            state.padding, state.group_total = self.source.padded(self._batches)

    def group_lost(self) -> None:
        """A user's handler swallowed the error of an update: its group comes no more."""
        if not self.clean:
            self.clean = True
            if self.source is not None:
                self.source.batch += self._batches

    def group_consumed(self) -> None:
        self.clean = True
        self.epoch_iteration += 1
        if self.source is not None:
            self.source.batch += self._batches

    @contextmanager
    def before_the_failure(self) -> Iterator[bool]:
        """Let the counters say what was done, where an iteration broke off; yields whether the weights agree with it.

        They do not if an optimizer had begun to step, nor after an update function that does not say so.
        """
        state, update = self._trainer.state, self._trainer.update
        stepped = getattr(update, "stepping", True) or state.optimizer_steps != self._steps
        undone = int(not self.clean and state.iteration > 0)
        state.iteration -= undone
        try:
            yield self.clean or not stepped
        finally:
            state.iteration += undone

    def end_pass(self) -> None:
        if self.source is not None:
            self.source.next_pass()

    def end_epoch(self) -> None:
        self.epochs_completed = self._trainer.state.epoch
        self.epoch_iteration = 0

    def reason_of_end(self) -> str:
        """Why a run that nobody stopped is over."""
        state = self._trainer.state
        if state.max_iters is not None and state.iteration >= state.max_iters:
            return "max_iters"
        return (
            "max_epochs" if state.max_epochs is not None and self.epochs_completed >= state.max_epochs else "terminate"
        )

    # -- the start of a run --------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """The run about to start takes up one that was saved or stopped."""
        return self.resumed or self._continues

    def claim(self, max_epochs: int | None, max_iters: int | None, epoch_length: int | None) -> None:
        """Tell Ignite's ``run()`` that it goes on, after a resume or a stop."""
        state = self._trainer.state
        self._continues = state.status == "interrupted" and not self._trainer.failed
        if self._continues:
            self._trainer.registry.keep_metrics()
            state.epoch = self.epochs_completed
            state.max_iters = max_iters if state.max_iters and max_iters else state.max_iters
            state.max_epochs = max_epochs if state.max_epochs and max_epochs else state.max_epochs
        if self.resumed:
            state.max_iters = max_iters
            state.max_epochs = max_epochs if max_iters is None else None
            if max_iters is None and max_epochs is None:
                state.max_epochs = max(1, self.epochs_completed)
            state.epoch_length = epoch_length

    def take(self, source: DataSource, *, anew: bool = False) -> None:
        """Go over to another source, at the position that is waiting for it."""
        before, self.source = self.source, source
        self._trainer.state.padding = self._trainer.state.group_total = 0
        if anew:
            if before is not None:  # another pass: the same order again would be no other data
                source.pass_number = before.pass_number + int(before.batch > 0)
            return
        if self._waiting_data is not None:
            if self._waiting_data:
                source.load_state_dict(self._waiting_data)
            self._waiting_data = None
        elif before is not None:
            if self._continues and source.data is before.data:
                source.load_state_dict(before.state_dict())
            else:
                source.pass_number, source.batch = before.pass_number, before.batch
        if self.resumed and self._trainer.state.epoch_length is None:
            self._trainer.state.epoch_length = source.iterations
        if self._other_groups and self._trainer.state.epoch_length == source.iterations is not None:
            assert source.batches is not None
            left = 0 if source.ended else -(-(source.batches - source.batch) // source.steps)
            at_its_start = source.ended and self.epoch_iteration == 0
            self.epoch_iteration = 0 if at_its_start else source.iterations - left
        self._other_groups = False

    def begin(self) -> None:
        """The first thing in a run: which kind of start is this?"""
        state, source = self._trainer.state, self.source
        self.taking_up = self.resumed or self._continues
        if self.taking_up:
            self.resumed = self._continues = False
            return
        self.epochs_completed = state.epoch
        if state.iteration == 0:
            self.epoch_iteration = 0
            for counter in COUNTERS:
                setattr(state, counter, 0)
            if source is not None:
                source.pass_number = source.batch = 0
                source.ended = False
        else:  # as Ignite: data from its beginning, the rest of the epoch by the iteration's number
            length = state.epoch_length
            self.epoch_iteration = state.iteration % length if length and not self._trainer.was_terminated else 0
            if source is not None and source.batch:
                source.next_pass()

    def restore_rng(self) -> None:
        """Put the generators back where the checkpoint found them: the run has started."""
        self.taking_up = False
        if self._waiting_rng is not None:
            rng.restore(self._waiting_rng)
            self._waiting_rng = None

    # -- in checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        counters = {name: getattr(state, name) for name in ("iteration", *COUNTERS)}
        return counters | {
            "epochs_completed": self.epochs_completed,
            "epoch_iteration": self.epoch_iteration,
            "accumulation_steps": self._trainer.accumulation_steps,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state = self._trainer.state
        for name in ("iteration", *COUNTERS):
            setattr(state, name, saved[name])
        self.epochs_completed, self.epoch_iteration = saved["epochs_completed"], saved["epoch_iteration"]
        state.epoch = self.epochs_completed
        # iterations are of another size then: where the epoch stands follows from the data
        self._other_groups = saved["accumulation_steps"] != self._trainer.accumulation_steps
        self.resumed = True

    def _data_state(self) -> dict[str, Any]:
        return {} if self.source is None else self.source.state_dict()

    def _set_data_state(self, saved: dict[str, Any]) -> None:
        self._waiting_data = saved

    def _set_rng_state(self, saved: dict[str, Any]) -> None:
        self._waiting_rng = saved


class _Part:
    """A named part of a checkpoint made of two functions."""

    def __init__(self, get: Any, put: Any) -> None:
        self.state_dict, self.load_state_dict = get, put
