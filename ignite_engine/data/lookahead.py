"""One group ahead: while the ranks train on one group, they agree on the next."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from ignite_engine import rng
from ignite_engine.data.place import Held
from ignite_engine.data.read_errors import ReadErrors, split
from ignite_engine.errors import PeerFailed, StopRequested, one_line
from ignite_engine.ranks import agreement, mesh
from ignite_engine.step.micro_batches import Group, WeightFn, check_weight

logger = logging.getLogger(__name__)
_CAN_REPEAT, _ERROR, _STOP = 1, 2, 4


class Waiting(Protocol):
    """Who is told that a signal may raise :class:`StopRequested` now."""

    waiting_for_data: bool

    def stops_waiting(self) -> bool:
        """Whether this rank is to stop."""
        ...


class LookAhead:
    """The groups of one pass, the same number on every rank; made and iterated on all of them.

    A rank fetches group i+1 when group i is taken, and starts to exchange how many batches it has, what they weigh,
    and whether it failed or was stopped. The exchange is read before group i+1 is taken, so it runs beside step i, and
    no rank enters a step that a peer will not join. A rank that is exhausted repeats its last batch, which weighs
    nothing, until all are; one that has none takes a peer's.

    Args:
        batches: this rank's, from its position on.
        repeated: gives what this rank repeats, where it was exhausted before; None: it was not, or takes a peer's.
        steps: batches in a group.
        position: where the data is now; None where nothing that is fetched ahead need be saved.
        weigh: weight of a batch, None weighs none.
        waiting: its ``waiting_for_data`` is set while a fetch may be interrupted.
        read_errors: counts the batches in whose place ``batches`` has an error; None: there are none.
        left: batches that are left of the pass on the longest rank, None if unknown.

    Raises (from ``next``):
        Exception: what this rank's data raised, after the step before.
        PeerFailed: what a peer's raised, at the same place.
        StopRequested: a rank was stopped while it waited for data, on every rank.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        *,
        repeated: Iterator[Any] | None = None,
        steps: int,
        position: Callable[[], Held] | None = None,
        weigh: WeightFn | None = None,
        waiting: Waiting | None = None,
        read_errors: ReadErrors | None = None,
        left: int | None = None,
    ) -> None:
        self._batches, self._steps, self._weigh = batches, steps, weigh
        self._repeated = repeated
        self._position, self._waiting, self._left = position, waiting, left
        self._read_errors = read_errors
        self._before: deque[Held] = deque()
        self._taken = 0
        self._places = 0
        self._unread: list[Exception] = []
        self.fetched: Sequence[Any] = ()
        """What was fetched and not taken yet, with what could not be read."""
        self._group: Group | None = None
        self._weights: list[float] = []
        self._exchange: Callable[[], list[list[float]]] | None = None
        self._error: Exception | None = None
        self._last: Any = None
        self._can_repeat = self._over = self._draws = False

    @property
    def before(self) -> Held | None:
        """Where the data was before the first group that is not consumed; None: nothing is fetched."""
        return self._before[0] if self._before else None

    def consumed(self) -> None:
        """The group that was taken last is trained on; with it those before it of which nothing could be read."""
        for _ in range(min(self._taken, len(self._before))):
            self._before.popleft()
        self._taken = 0

    def __iter__(self) -> Iterator[Group]:
        return self

    def __next__(self) -> Group:
        if self._over:
            raise StopIteration
        if self._group is None:
            self.fetch()
        group = None
        while not group:
            if self._over:
                raise StopIteration
            try:
                group = self._agreed()
            except BaseException:
                self._over = True
                raise
            self._taken += 1
            if self._left is None or self._left > 0:
                self.fetch()
            else:
                self._over = True
        return group

    def fetch(self, *, drawn: bool = False) -> None:
        """Fetch the next group, and start to tell the peers.

        Args:
            drawn: what it draws was drawn before the place was saved at which this pass goes on.
        """
        in_hand = self._group is not None
        if self._position is not None:
            self._before.append(self._position())
        self._group, self._unread, self._weights, self._places, flags = Group(), [], [], 0, 0
        try:
            for batch in self._repeated or ():
                self._last, self._can_repeat = batch, True
            places = self._read(interruptible=not (in_hand and self._draws))
            self._group, self._unread = split(places)
            self.fetched = places
            self._places = len(places)
            if self._weigh is not None:
                self._weights = [check_weight(self._weigh(batch)) for batch in self._group]
            if self._position is not None and not in_hand:
                self._draws = not rng.is_at(self._before[-1].rng)
        except StopRequested:
            flags = _STOP
            if self._position is not None and not drawn:
                self._undo_draws(in_hand)
        except Exception as error:
            self._error, flags = error, _ERROR
        if self._group:
            self._last, self._can_repeat = self._group[-1], True
        elif self._before and not flags and not self._places:
            self._before[-1] = replace(self._before[-1], exhausted=True)
        flags |= _CAN_REPEAT * self._can_repeat
        self._exchange = agreement.start_gather([len(self._group), flags, sum(self._weights), self._places])

    def _undo_draws(self, in_hand: bool) -> None:
        """Undo those of a fetch that a stop has ended: a resumed run makes them again."""
        before = self._before[-1]
        if not in_hand:
            rng.restore(before.rng)
            self._before[-1] = replace(before, rng=None)
        elif not rng.is_at(before.rng):
            logger.warning(
                "The stop came while a batch was read that draws random numbers, as those before it did not: the "
                "iteration that is still trained draws others than in a run that is not stopped."
            )

    def _read(self, *, interruptible: bool) -> Group:
        """The next batches; where what they draw comes before an iteration that is still trained, a stop waits."""
        if self._waiting is None or not interruptible:
            return Group(islice(self._batches, self._steps))
        try:
            self._waiting.waiting_for_data = True
            return Group(islice(self._batches, self._steps))
        finally:
            self._waiting.waiting_for_data = False

    def _agreed(self) -> Group:
        """The group that was fetched, as long as the longest of all ranks; empty if no rank could read any of it."""
        assert self._exchange is not None
        rows, self._exchange = self._exchange(), None  # a forked worker must not be the one that frees what gloo holds
        flags = [int(row[1]) for row in rows]
        if any(rank_flags & _ERROR for rank_flags in flags):
            self._raise()
        if any(rank_flags & _STOP for rank_flags in flags):
            raise StopRequested
        group, length, places = self._group, *(int(max(row[column] for row in rows)) for column in (0, 3))
        assert group is not None
        if not places:
            raise StopIteration
        self.fetched = ()
        if self._left is not None:
            self._left -= places
        if self._read_errors is not None:
            found = int(sum(row[3] - row[0] for row in rows))
            self._read_errors.take(places, self._unread, found=found, empty=not length)
        if not length:
            return group
        if not all(rank_flags & _CAN_REPEAT for rank_flags in flags):
            holder = next(rank for rank, row in enumerate(rows) if row[0])
            shared = batch_of(holder, group[0] if group else None)
            self._last, self._can_repeat = (self._last if self._can_repeat else shared), True
        of_data = mesh.by_data_rank(rows)
        group.padding, group.total = length - len(group), int(sum(row[0] for row in of_data))
        group.extend([self._last] * group.padding)
        group.places = length if self._read_errors is None else self._read_errors.batches
        if self._weigh is not None:
            group.weights = self._weights + [0.0] * group.padding
            group.total_weight = sum(row[2] for row in of_data)
        return group

    def _raise(self) -> None:
        lines = agreement.gather_objects(None if self._error is None else one_line(self._error))
        if self._error is not None:
            raise self._error
        rank, line = next((rank, line) for rank, line in enumerate(lines) if line is not None)
        raise PeerFailed(f"Rank {rank} failed, reading its data: {line}")


def batch_of(holder: int, batch: Any) -> Any:
    """The batch of rank ``holder``, on every rank; a collective.

    Raises:
        Exception: it cannot be pickled, on every rank.
    """
    mine = agreement.rank() == holder
    return pickle.loads(agreement.agreed(lambda: pickle.dumps(batch) if mine else b"")[holder])
