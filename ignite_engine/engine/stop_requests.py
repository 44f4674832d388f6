"""What single ranks ask of the run while it is under way, agreed on by all ranks at step boundaries."""

from __future__ import annotations

from collections.abc import Callable

from ignite_engine.ranks import agreement

STOP, SAVE, BACKGROUND_DONE, TICK, END = 1, 2, 4, 8, 16


class StopRequests:
    """Requests to stop, to end, to save, and to collect background work.

    Flags are only ever assigned: a signal handler or another thread may do it between any two instructions.
    """

    def __init__(self) -> None:
        self.single_process = True
        """There is no other rank to agree with."""
        self.pending = False
        """This rank has requested something since the last vote."""
        self.stop: tuple[str, int | None] | None = None
        """Reason and signal of the requested stop; after the vote those of the first rank that requested one."""
        self.end: tuple[str, bool | str] | None = None
        """Reason and option of ``terminate()``; after the vote those of the first rank that called it."""
        self.waiting_for_data = False
        """The main thread is inside the loader's ``next``: the one place where a signal may raise StopRequested."""
        self.checks: list[Callable[[], None]] = []
        """Called now and then while the run waits for a window, in which no event is fired; they may request a stop."""
        self._save = self._background_done = False
        self._due: list[int] = []
        self._ticks: list[int] = []
        self._vote = agreement.Vote()

    def reset(self) -> None:
        """A run begins: drop what an earlier one was asked for."""
        self.single_process = agreement.world_size() == 1
        self.stop, self.end, self.pending = None, None, False
        self._save = self._background_done = False
        self._due, self._ticks = [], []

    def first_vote_after(self, iteration: int) -> None:
        """The first vote is at the iteration that follows."""
        self._vote.restart(iteration)

    def request_stop(self, reason: str, signal: int | None) -> None:
        if self.stop is None:
            self.stop = (reason, signal)
        self.pending = True

    def request_end(self, reason: str, option: bool | str) -> None:
        """``terminate()`` was called on this rank, perhaps on no other."""
        if self.end is None:
            self.end = (reason, option)
        self.pending = True

    def stops_waiting(self) -> bool:
        """Whether this rank is to stop, while it waits for a window."""
        for check in self.checks:
            check()
        return self.stop is not None

    def request_save(self) -> None:
        self._save = self.pending = True

    def report_background_done(self) -> None:
        self._background_done = self.pending = True

    def request_ticks(self, due: list[int]) -> None:
        """Note the places of rank 0's clocks that have reached their time, for the next vote."""
        self._due += due
        self.pending = True

    def take_ticks(self) -> list[int]:
        """The ticks on which all ranks have agreed since the last call."""
        ticks, self._ticks = self._ticks, []
        return ticks

    def request_again(self, agreed: int) -> None:
        """What was agreed could not be done at this boundary, on any rank: vote on it at the next one."""
        if agreed & SAVE:
            self.request_save()
        if agreed & BACKGROUND_DONE:
            self.report_background_done()
        if agreed:
            self.vote_now()

    def vote_now(self) -> None:
        """Vote at the next step boundary even if it is not its turn; every rank calls it at the same place."""
        self._vote.vote_now()

    def agree(self, iteration: int, *, now: bool) -> int:
        """What any rank has requested, as bits, the same on all ranks; 0 between votes. A collective.

        Args:
            now: vote at this iteration even if it is not its turn; every rank must say the same.
        """
        self.pending = False
        wanted = (
            (STOP if self.stop else 0) | (SAVE if self._save else 0) | (BACKGROUND_DONE if self._background_done else 0)
        ) | (TICK if self._due else 0)
        if self.end is not None and now:  # not where the clock says: the last iteration would depend on it
            wanted |= END
        agreed = self._vote.poll(iteration, wanted, now=now)
        if agreed & STOP:
            reasons = agreement.gather_objects(self.stop)
            self.stop = next(reason for reason in reasons if reason is not None)
        if agreed & END:
            self.end = next(end for end in agreement.gather_objects(self.end) if end is not None)
        if agreed & SAVE:
            self._save = False
        if agreed & BACKGROUND_DONE:
            self._background_done = False
        if agreed & TICK:
            self._ticks += agreement.gather_objects(self._due)[0]
            self._due = []
        return agreed
