"""The batches of one evaluation, which a stop may end early on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from ignite.engine import Engine
from torch import nn
from torch.utils.data import DataLoader

from ignite_engine import Trainer
from ignite_engine.data.loader import resumable
from ignite_engine.data.readers import length_of
from ignite_engine.data.source import DataSource
from ignite_engine.data.workers import begin_pass, end_workers, with_own_iterator
from ignite_engine.errors import StopRequested
from ignite_engine.handlers.evaluation.progress import EvaluationProgress
from ignite_engine.ranks import agreement
from ignite_engine.ranks.mesh import waits_for_peers


def loader_of(data: Any) -> Any:
    """What is iterated in the place of ``data``, which training may be in the middle of; a collective.

    A plain ``DataLoader`` is rebuilt as for training, sharded over the ranks; one with persistent workers or a state
    gets an iterator of its own.
    """
    return with_own_iterator(resumable(data, seed=0))  # the same order in a resumed process


def check_loader(name: str, data: Any, *, on_each_rank: bool = False) -> None:
    """Refuse, before training, a ``DataLoader`` without a batch; a collective.

    Args:
        on_each_rank: refuse one that has none on some rank.

    Raises:
        ValueError: no rank has one; on every rank the same line.
    """
    lengths = _lengths(length_of(data) if isinstance(data, DataLoader) else None)
    _check(name, lengths, on_each_rank=on_each_rank)


def _lengths(batches: int | None) -> list[int]:
    """By rank, -1 where it is unknown; a collective."""
    return [int(row[0]) for row in agreement.gather_floats([-1.0 if batches is None else float(batches)])]


def _check(name: str, lengths: list[int], *, on_each_rank: bool) -> None:
    if (0 in lengths) if on_each_rank else not any(lengths):
        remedy = "use fewer ranks, a smaller batch_size or more data" if any(lengths) else "give data that has one"
        known = ["unknown" if length < 0 else str(length) for length in lengths]
        where = "a batch on every rank" if on_each_rank else "a batch"
        by = " by rank" if len(known) > 1 else ""
        raise ValueError(f"The evaluation of {name!r} needs {where}, got {', '.join(known)}{by}: {remedy}.")


class EvaluationBatches:
    """Iterated once by the evaluator, and by hand on a rank that has no batch (see ``holders``).

    The batches end early when all ranks know of a stop: on one process also during a wait for the loader, on several
    after the same number, a rank that has no more of them exchanging along.

    Args:
        on_each_rank: a rank without a batch is an error.

    Raises:
        ValueError: no rank has a batch; on every rank the same line.
    """

    def __init__(
        self,
        data: Iterable[Any],
        name: str,
        limit: int | None,
        trainer: Trainer,
        evaluator: Engine,
        *,
        on_each_rank: bool = False,
    ) -> None:
        self.data, self.name, self.limit, self.trainer, self.evaluator = data, name, limit, trainer, evaluator
        sized = length_of(data)
        self.length = sized if limit is None or sized is None else min(sized, limit)
        self.single_process, self.interrupted = agreement.world_size() == 1, False
        self._lengths = _lengths(self.length)
        self.common = min(self._lengths)
        """Batches that every rank has; below 0 where a rank does not know."""
        model = getattr(evaluator, "model", None) or trainer.update.model
        waits = not self.single_process and isinstance(model, nn.Module) and waits_for_peers(model)
        self._on_each_rank = on_each_rank or waits
        _check(name, self._lengths, on_each_rank=self._on_each_rank)
        self._forwards_along = waits
        if waits and len(set(self._lengths)) > 1 and not (self.sized and hasattr(evaluator, "step")):
            raise ValueError(
                f"The evaluation of {name!r} has a model in FSDP2, in which each forward waits for all ranks: "
                "give data with a length, and an evaluator of create_evaluator()."
            )
        self.progress: EvaluationProgress | None = None
        self.at_end: Callable[[], None] | None = None
        """Called where no rank has a batch left, if the evaluator asks for one more than there are."""
        self._iterator: Any = None
        self._peeked: list[Any] = []

    @property
    def sized(self) -> bool:
        """Every rank knows how many batches it has."""
        return self.common >= 0

    def holders(self) -> list[int]:
        """The ranks that have a batch; a collective.

        Raises:
            ValueError: there is none; on every rank the same line.
        """
        if self.single_process:
            return [0]
        if not self.sized:
            self._iterator = begin_pass(self.data)
            self._peeked = [next(self._iterator, _END)]
            self._lengths = _lengths(0 if self._peeked[0] is _END else -1)
            _check(self.name, self._lengths, on_each_rank=self._on_each_rank)
        return [rank for rank, length in enumerate(self._lengths) if length]

    def keep_progress(self, saved: Mapping[str, Any] | None) -> None:
        """Keep the progress where it is broken off; start where ``saved`` ends."""
        self.source = DataSource(self.data, None)
        self.source.pass_number = _pass_of(self.data)
        self.progress = EvaluationProgress(self.evaluator, self.source, saved, self.limit)

    def __iter__(self) -> Iterator[Any]:
        progress, batches = self.progress, self.progress.start if self.progress else 0
        iterator = self._iterator
        if iterator is None:
            iterator = begin_pass(self.data) if progress is None else chain.from_iterable(self.source.open())
            self._iterator = iterator
        if progress is not None:
            progress.restore_rng()
        requests, batch = self.trainer.requests, None
        while self.limit is None or batches < self.limit:
            if self._stops(batches):
                self._interrupt(iterator)
                return
            try:
                requests.waiting_for_data = self.single_process
                try:
                    following = self._peeked.pop() if self._peeked else next(iterator, _END)
                finally:
                    requests.waiting_for_data = False
            except StopRequested:
                if progress is not None and self.source.sampler is not None:  # others may have drawn random numbers
                    progress.capture(batches)
                self._interrupt(iterator)
                return
            if batches == 0 and self.single_process:
                _check(self.name, [0 if following is _END else -1], on_each_rank=False)
            if following is _END:
                break
            batch = following
            yield batch
            batches += 1
        while not self.single_process:  # a rank without a batch exchanges along until no peer has one
            stops, have_more, _ = self._exchange(has_more=False)
            if stops:
                self._interrupt(iterator)
                return
            if not have_more:
                break
            if self._forwards_along:
                self.evaluator.step(self.evaluator, batch)  # type: ignore[attr-defined]  # checked above
        if self.at_end is not None:
            self.at_end()

    @property
    def epoch_length(self) -> int | None:
        """The epoch length for the evaluator; None: it asks for one batch more, as this rank's peers may have some."""
        return self.length if len(set(self._lengths)) == 1 else None

    def close(self) -> None:
        """End the loader's workers; torch ends them when the iterator is collected, and may wait 5 s for each then."""
        if self.progress is not None:
            self.source.close()
        elif not getattr(self.data, "persistent_workers", False):
            end_workers(self._iterator, self.data)

    def _stops(self, batches: int) -> bool:
        """Whether all ranks stop after so many; then the progress is kept."""
        stops, _, each_has_more = self._exchange(has_more=True)
        # the position of one that has none left is not that of the others
        if stops and self.progress is not None and each_has_more:
            self.progress.capture(batches)
        return stops

    def _exchange(self, *, has_more: bool) -> tuple[bool, bool, bool]:
        """Whether all ranks stop, whether one may have another batch, and whether each of them may."""
        rows = agreement.gather_floats([float(self.trainer.stop_requested), float(has_more)])
        return any(stops for stops, _ in rows), any(more for _, more in rows), all(more for _, more in rows)

    def _interrupt(self, iterator: Any) -> None:
        self.interrupted = True
        if self.progress is not None:
            self.source.close(at_once=True)
        else:
            end_workers(iterator, self.data)
        if self.evaluator.state.epoch_length is None:
            # else the end of the data would be the end of a pass, whose metrics are computed, perhaps of no batch
            self.evaluator.state.epoch_length = sys.maxsize
        self.evaluator.terminate(skip_completed=True)  # handlers of COMPLETED read the metrics, which there are none of


def _pass_of(data: Any) -> int:
    sampler = getattr(data, "sampler", data)
    number = getattr(sampler, "pass_number", getattr(sampler, "epoch", 0))
    return number if isinstance(number, int) else 0


_END = object()
