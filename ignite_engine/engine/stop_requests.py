"""What single ranks ask of the run while it goes, and what all of them hear at the same edge."""

from __future__ import annotations

from ignite_engine.ranks import agreement

STOP, SAVE, ATTEND = 1, 2, 4


class Requests:
    """Flags that are only ever assigned: a signal handler or another thread may do it between any two instructions."""

    def __init__(self) -> None:
        self.alone = True
        """On one process what is asked for is agreed."""
        self.asked = False
        """Something was asked for since the last edge."""
        self.stop: tuple[str, int | None] | None = None
        """Reason and signal of the stop that this rank wants, after the agreement that of the first rank with one."""
        self.hurried = False
        """All ranks have something to hear of at the next edge, or at the run's end if there is none before."""
        self._save = self._attend = False
        self._vote = agreement.Vote()

    def run_starts(self) -> None:
        """Forget what an earlier run was asked for."""
        self.alone = agreement.world_size() == 1
        self.stop, self.asked, self.hurried = None, False, False
        self._save = self._attend = False

    def iterations_start(self, iteration: int) -> None:
        """The first vote falls on the next iteration."""
        self._vote.restart(iteration)

    def ask_to_stop(self, reason: str, signal: int | None) -> None:
        if self.stop is None:
            self.stop = (reason, signal)
        self.asked = True

    def ask_to_save(self) -> None:
        self._save = self.asked = True

    def ask_to_attend(self) -> None:
        self._attend = self.asked = True

    def ask_again(self, agreed: int) -> None:
        """What was agreed could not be done yet, on any rank: it is to be heard at the next edge."""
        if agreed & SAVE:
            self.ask_to_save()
        if agreed & ATTEND:
            self.ask_to_attend()
        if agreed:
            self.agree_at_next_edge()

    def agree_at_next_edge(self) -> None:
        """Vote there even if it is not its turn; every rank says so at the same place."""
        self.hurried = True
        self._vote.hurry()

    def agree(self, iteration: int, *, now: bool) -> int:
        """What any rank has asked for, as bits, the same on all ranks; between votes 0. A collective.

        Args:
            now: vote at this iteration even if it is not its turn; every rank must say the same.
        """
        self.asked = self.hurried = False
        wanted = (STOP if self.stop else 0) | (SAVE if self._save else 0) | (ATTEND if self._attend else 0)
        agreed = self._vote.poll(iteration, wanted, now=now)
        if agreed & STOP:
            reasons = agreement.gather_objects(self.stop)
            self.stop = next(reason for reason in reasons if reason is not None)
        if agreed & SAVE:
            self._save = False
        if agreed & ATTEND:
            self._attend = False
        return agreed
