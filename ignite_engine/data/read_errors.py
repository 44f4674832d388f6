"""Leaves out batches that cannot be read, and trains on the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ignite_engine.errors import PeerFailed, one_line
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import Group

logger = logging.getLogger(__name__)


class ReadErrors:
    """Lets batches be left out; more than ``limit`` in a run end it.

    A batch that is left out keeps its place in the order: the position counts it, and a group is shorter by it. A group
    of which no rank can read anything is no iteration, and goes with the one after it: an epoch is as long as it proves
    to be.

    Args:
        limit: over all ranks.
        state: of the run, which counts them.

    Raises:
        ValueError: ranks share their data, and might read something else.
    """

    def __init__(self, limit: int, state: Any) -> None:
        self.limit, self._state = limit, state
        if mesh.data_size() < agreement.world_size():
            raise ValueError(
                f"max_read_errors={self.limit} could leave a batch out on one rank of a tensor-parallel group and not "
                "on another one: use max_read_errors=0 with tensor parallelism."
            )

    def count(self, group: Group) -> None:
        """Count the errors of a consumed group."""
        self._state.read_errors += group.unread

    def leave_out(self, errors: Sequence[Exception], group: Group) -> None:
        """Leave unreadable batches out of a group; a collective.

        Args:
            errors: of this rank.

        Raises:
            Exception: of this rank, where there are too many.
            PeerFailed: of another rank, likewise.
        """
        of_all = agreement.gather_objects([one_line(error) for error in errors])
        for rank, line in ((rank, line) for rank, lines in enumerate(of_all) for line in lines):
            group.unread += 1
            total = self._state.read_errors + group.unread
            if total > self.limit:
                if errors:
                    raise errors[0]
                raise PeerFailed(f"Rank {rank} failed, reading its data: {line}")
            if agreement.rank() == 0:
                logger.warning(
                    "A batch at iteration %d cannot be read%s and is left out (%d of at most %d): %s",
                    *(self._state.iteration + 1, agreement.on_ranks([rank]), total, self.limit, line),
                )


def each(batches: Iterator[Any], data: Any, *, marks: bool) -> Iterator[Any]:
    """The batches of ``data``; with ``marks`` the error in the place of each that raises.

    They are asked for one by one, and not for an iterator again: ``__iter__`` of a user's may begin its data anew.

    Raises:
        Exception: the data gives nothing after it, as a generator does; or workers iterate, so that nobody could tell.
    """
    by_index = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    marks = marks and (by_index or not getattr(data, "num_workers", 0))
    failed: Exception | None = None
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            if failed is not None and not by_index:
                raise failed from None
            return
        except Exception as error:
            if not marks:
                raise
            batch = failed = error
        else:
            failed = None
        yield batch
