"""What a Trainer iterates over: it groups micro-batches and knows its position."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ignite_engine import rng
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.data.workers import begin_pass, end_workers
from ignite_engine.errors import StateMismatch, leave_out
from ignite_engine.ranks import agreement
from ignite_engine.step.micro_batches import Group

logger = logging.getLogger(__name__)

_FINISHED = "_iterator_finished"  # in the state of torchdata's StatefulDataLoader


def length_of(data: Any) -> int | None:
    """Batches in one pass over ``data``, None where it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class DataSource:
    """What a Trainer iterates: one pass over ``data`` per ``iter()``, in groups, counted by what was consumed.

    Args:
        data: a loader or any iterable of batches.
        accumulation_steps: batches in a group; None hands on the batches themselves.

    ``pass_number`` and ``batch`` are the position: batch ``batch`` of pass ``pass_number`` is the next not yet
    consumed. On several ranks a sized loader that is shorter than its peers' repeats its last batch to the end of
    the longest (``uneven``); :meth:`padded` says what of a group weighs nothing.
    """

    def __init__(self, data: Any, accumulation_steps: int | None) -> None:
        self.data, self.steps = data, accumulation_steps or 1
        self.grouped = accumulation_steps is not None
        self.sampler: ResumableSampler | None = getattr(data, "sampler", None) if type(data) is DataLoader else None
        if not isinstance(self.sampler, ResumableSampler):
            self.sampler = None
        self.pass_number = self.batch = 0
        self.lengths: list[int] | None = None
        self.uneven = False
        self.ended = False
        """The present pass was at its end when the position was saved: ``batch`` is 0, and nothing more comes of it."""
        self._pending_state: dict[str, Any] | None = None
        self._between_passes = self._exhausted = False
        self._iterator: Any = None
        self._replayed: Any = None

    def agree_lengths(self) -> None:
        """Exchange the sized loaders' lengths; a collective, once per run.

        Raises:
            ValueError: a rank has no batch at all, or only some ranks know their length.
        """
        own = length_of(self.data)
        rows = agreement.gather_floats([-1.0 if own is None else float(own)])
        lengths = [int(row[0]) for row in rows]
        if len(rows) == 1 or max(lengths) < 0:
            self.lengths = None if own is None else [own]
            return
        if min(lengths) < 1:
            raise ValueError(
                f"Every rank needs at least one batch of data with a known length, got {lengths} by rank: "
                "use fewer ranks, a smaller batch_size or more data."
            )
        self.lengths = lengths
        self.uneven = len(set(lengths)) > 1

    @property
    def batches(self) -> int | None:
        """Batches in one pass on the longest rank, None if unknown."""
        return max(self.lengths) if self.lengths else None

    @property
    def iterations(self) -> int | None:
        """Groups in one pass, None if unknown."""
        return None if self.batches is None else -(-self.batches // self.steps)

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        kind = type(self.data).__name__
        if self.sampler is not None:
            return None
        if self.keeps_state:
            workers = getattr(self.data, "num_workers", 0)
            if (sampler := _stateless_order(self.data)) is not None:
                return f"{kind} does not save the order of its {type(sampler).__name__}: it is drawn anew"
            if not workers or hasattr(getattr(self.data, "dataset", None), "state_dict"):
                return None
            return f"{kind} does not save the random numbers of its {workers} workers: samples that draw any differ"
        order = getattr(self.data, "sampler", None)
        if isinstance(getattr(self.data, "dataset", None), IterableDataset):
            order = self.data.dataset
        elif getattr(self.data, "batch_size", 0) is None:
            order = self.data.batch_sampler or order
        by = "" if order is None or type(order) is SequentialSampler else f" with {type(order).__name__}"
        return f"{kind}{by} keeps no state: its batches are replayed"

    @property
    def keeps_state(self) -> bool:
        """The data has a ``state_dict`` of its own, which says where in a pass it stands."""
        return self.sampler is None and hasattr(self.data, "state_dict")

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current pass, from ``batch`` on."""
        if self.ended:
            return iter(())
        batches = self._from_position()
        if self.uneven and self.batches is not None:
            batches = self._repeat_last(batches, self.batches - self.batch)
        return self._groups(batches) if self.grouped else batches

    def _groups(self, batches: Iterator[Any]) -> Iterator[Group]:
        while group := Group(islice(batches, self.steps)):
            yield group

    def _from_position(self) -> Iterator[Any]:
        if self.sampler is not None:
            assert self.data.batch_size is not None
            self.sampler.pass_number = self.pass_number
            self.sampler.start = min(self.batch * self.data.batch_size, len(self.sampler))
            iterator: Iterator[Any] = begin_pass(self.data)
            self._iterator = iterator
            return iterator
        target = getattr(self.data, "sampler", self.data)
        if hasattr(target, "set_epoch"):
            target.set_epoch(self.pass_number)
        between_passes, self._between_passes = self._between_passes, False
        if self._pending_state is not None:
            self.data.load_state_dict(self._pending_state)
            self._pending_state = None
            return self._after_a_pass() if between_passes else self._noted(begin_pass(self.data))
        if self.keeps_state:
            return self._noted(begin_pass(self.data))
        iterator = self._iterator = begin_pass(self.data)
        if self.batch:
            logger.warning(
                "%s keeps no state: the %d batches that were consumed are loaded again and left out.",
                type(self.data).__name__,
                self.batch,
            )
            for batch in islice(iterator, self.batch):
                self._replayed = batch
        return iterator

    def _after_a_pass(self) -> Iterator[Any]:
        """The next pass of data whose state is that of a pass's end: some give nothing then, some begin the next."""
        generators = rng.capture()
        for batch in (iterator := self._noted(begin_pass(self.data))):
            yield batch
            yield from iterator
            return
        self._exhausted = False
        rng.restore(generators)  # what the end of the pass drew was drawn before the state was saved
        yield from self._noted(begin_pass(self.data))

    def _noted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """``iterator``, with a note when it has told its end: that may be while the last group is gathered."""
        self._iterator = iterator
        return self._until_exhausted(iterator)

    def _until_exhausted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self._exhausted = True

    def _repeat_last(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        batch, given = None, 0
        for batch in islice(batches, count):
            given += 1
            yield batch
        if given < count and not given:
            batch = self._last_batch()
        for _ in range(count - given):
            yield batch

    def _last_batch(self) -> Any:
        """The last batch of this rank's shard: what an exhausted rank takes part with after a resume."""
        if self.sampler is None:
            if self._replayed is None:
                raise ValueError(
                    f"The {type(self.data).__name__} of this rank was at its end when the run was saved, and its "
                    "peers' were not: resume needs loader(), or as many batches on every rank."
                )
            return self._replayed
        assert self.data.batch_size is not None
        self.sampler.start = (len(self.data) - 1) * self.data.batch_size
        return next(iter(self.data))

    def padded(self, count: int) -> tuple[int, int]:
        """Of the next ``count`` batches: how many repeat the last, and how many do not, over all ranks."""
        assert self.lengths is not None
        real = [max(0, min(count, length - self.batch)) for length in self.lengths]
        return count - real[agreement.rank()], sum(real)

    def abandon(self) -> None:
        """End the workers of the present pass at once: they may be busy for long with what nobody wants any more."""
        if self.keeps_state and self._pending_state is None:
            self._pending_state = self.data.state_dict()
        end_workers(self._iterator, self.data)
        self._iterator = None

    def next_pass(self) -> None:
        """Begin the next pass at its first batch."""
        self.pass_number, self.batch = self.pass_number + 1, 0
        self._between_passes, self.ended, self._exhausted = True, False, False

    @property
    def was_begun(self) -> bool:
        """The present pass was begun before the position was saved: what making its iterator draws was drawn then."""
        return self.batch > 0 or (self._pending_state is not None and not self._between_passes)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what must be the same for it to mean the same."""
        exhausted = self._exhausted and not self.uneven
        ended = self.ended or exhausted or (self.batches is not None and self.batch >= self.batches)
        # batch 0 of the next pass; but that the one before has ended is still to be told
        at = (self.pass_number + 1, 0) if ended else (self.pass_number, self.batch)
        state: dict[str, Any] = {"pass": at[0], "batch": at[1], "ended": ended}
        if self.sampler is not None:
            state |= {"seed": self.sampler.seed, "samples": self.sampler.length, "batch_size": self.data.batch_size}
        elif self.keeps_state:
            own = self.data.state_dict() if self._pending_state is None else self._pending_state
            state |= {"loader": _unfinished(own), "between_passes": self._between_passes}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a position.

        Raises:
            StateMismatch: the dataset, its seed or the batch size is another one.
        """
        if self.sampler is not None and "seed" in state:
            if self.sampler.adopts_seed:
                self.sampler.seed = self.data.dataset.seed = state["seed"]
            now = {"seed": self.sampler.seed, "samples": self.sampler.length, "batch_size": self.data.batch_size}
            for name, value in now.items():
                if state[name] != value:
                    raise StateMismatch(
                        f"The checkpoint was made with {name} {state[name]} in its data, now it is {value}: make them "
                        f"equal, or leave the position out with {leave_out('data')}."
                    )
        self.ended = state["ended"]
        self.pass_number, self.batch = state["pass"] - int(self.ended), state["batch"]
        self._pending_state = state.get("loader")
        self._between_passes = bool(state.get("between_passes"))


def _stateless_order(data: Any) -> Any:
    """The sampler whose order a loader with a state cannot take up; None: there is none, or its order is fixed."""
    order = getattr(data, "batch_sampler", None)
    if order is None:
        order = getattr(data, "sampler", None)
    if order is None or isinstance(getattr(data, "dataset", None), IterableDataset):
        return None
    stateful = True
    while (inner := getattr(order, "sampler", None)) is not None:  # of a batch sampler
        stateful = stateful and _has_state(order)
        order = inner
    fixed = type(order) is SequentialSampler or isinstance(order, DistributedSampler)
    return None if fixed or (stateful and _has_state(order)) else order


def _has_state(sampler: Any) -> bool:
    """Torchdata's have one in their iterators."""
    return hasattr(sampler, "state_dict") or type(sampler).__module__.startswith("torchdata.")


def _unfinished(state: Any) -> Any:
    """The state of a loader that need not have told yet that its pass is over.

    One of torchdata that has told it, as it does while the last group is gathered, would begin the next pass at once
    when its state is loaded: the end of this one would be lost, and more would be drawn than was drawn here.
    """
    return state | {_FINISHED: False} if isinstance(state, dict) and state.get(_FINISHED) else state
