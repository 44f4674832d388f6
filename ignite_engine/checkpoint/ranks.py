"""The ranks that write one checkpoint together: they succeed or fail as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ignite_engine.errors import CheckpointError, one_line

T = TypeVar("T")


class Ranks:
    """The members of a process group, or only this process.

    ``ranks.agreement.agreed`` does the same over all ranks; the store has its own so as to be usable alone.

    Args:
        group: a group that can exchange CPU objects (gloo); None: the default group if there is one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group) if self._distributed() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self._group) if self._distributed() else 1

    def together(self, work: Callable[[], T], failure: Callable[[str], str]) -> list[T]:
        """Do ``work`` on every rank; a collective.

        Args:
            work: what this rank does. It must not itself wait for a peer.
            failure: makes the error's text of the causes, which name their ranks.

        Returns:
            The results of all ranks.

        Raises:
            CheckpointError: the same on all ranks, if any failed. An interrupt of this process passes through as it
                is, after the peers were informed.
        """
        cause: BaseException | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = (work(), None)
        except BaseException as error:  # a peer waits for this rank's answer even when this rank is interrupted
            cause = error
            mine = (None, one_line(error))
        outcomes = self._gather(mine)
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        causes = [
            reason if self.world_size == 1 else f"rank {rank}: {reason}"
            for rank, (_, reason) in enumerate(outcomes)
            if reason is not None
        ]
        if causes:
            raise CheckpointError(failure("; ".join(reason.rstrip(".") for reason in causes))) from cause
        return [result for result, _ in outcomes]

    def rank_zero(self, work: Callable[[], T], failure: Callable[[str], str]) -> T:
        """Do ``work`` on rank 0 only; a collective. All ranks get its result, or the same CheckpointError."""
        results: list[Any] = self.together(lambda: work() if self.rank == 0 else None, failure)
        first: T = results[0]
        return first

    def _gather(self, mine: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        if not self._distributed():
            return [mine]
        outcomes: list[Any] = [None] * self.world_size
        dist.all_gather_object(outcomes, mine, group=self._group)
        return outcomes

    def _distributed(self) -> bool:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self._group) == 1:
            return False
        if self._group is None and "gloo" not in (backend := dist.get_backend()):
            raise ValueError(
                f"The default process group uses {backend}, the ranks of a checkpoint need a CPU group: "
                'pass group=torch.distributed.new_group(backend="gloo").'
            )
        return True
