"""The batches of one evaluation, which a stop may end early on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ignite.engine import Engine
from torch import nn
from torch.utils.data import DataLoader

from ignite_engine import StopRequested, Trainer
from ignite_engine.data import resumable
from ignite_engine.data.source import DataSource, length_of
from ignite_engine.data.workers import begin_pass, end_workers, with_own_iterator
from ignite_engine.handlers.evaluation.progress_file import EvaluationProgress, OngoingProgress
from ignite_engine.ranks import agreement
from ignite_engine.ranks.mesh import waits_for_peers


def loader_of(data: Any) -> Any:
    """What is iterated in the place of ``data``, which training may be in the middle of; a collective.

    A plain ``DataLoader`` is rebuilt as for training, sharded over the ranks; one with persistent workers or a state
    gets an iterator of its own.
    """
    return with_own_iterator(resumable(data, seed=0))  # the same order in a resumed process


def check_loader(name: str, data: Any) -> None:
    """Refuse, before training, a ``DataLoader`` without a batch; a collective.

    Raises:
        ValueError: a rank has none; on every rank the same line.
    """
    _smallest(name, length_of(data) if isinstance(data, DataLoader) else None)


def _smallest(name: str, batches: int | None) -> int:
    """The smallest number of batches of a rank, -1 if it is unknown on any; a collective that refuses 0."""
    return min(_of_all_ranks(name, batches))


def _of_all_ranks(name: str, batches: int | None) -> list[int]:
    lengths = [int(row[0]) for row in agreement.gather_floats([-1.0 if batches is None else float(batches)])]
    if 0 in lengths:
        remedy = "use fewer ranks, a smaller batch_size or more data" if len(lengths) > 1 else "give data that has one"
        known = ["unknown" if each < 0 else str(each) for each in lengths]
        raise ValueError(
            f"The evaluation of {name!r} needs a batch on every rank, got {', '.join(known)} by rank: {remedy}."
        )
    return lengths


class EvaluationBatches:
    """Iterated once by the evaluator.

    The batches end early when all ranks know of a stop: on one process also during a wait for the loader, on several
    at a batch that every rank reaches.

    Raises:
        ValueError: a rank has no batch; on every rank the same line.
    """

    def __init__(self, data: Iterable[Any], name: str, limit: int | None, trainer: Trainer, evaluator: Engine) -> None:
        self.data, self.name, self.limit, self.trainer, self.evaluator = data, name, limit, trainer, evaluator
        sized = length_of(data)
        self.length = sized if limit is None or sized is None else min(sized, limit)
        self.single_process, self.interrupted = agreement.world_size() == 1, False
        lengths = _of_all_ranks(name, self.length)
        self.common = min(lengths)
        """Batches that every rank has; below 0 where a rank does not know."""
        self._idle_forwards = 0 if self.single_process else self._forwards_of_peers(lengths)
        self.progress: OngoingProgress | None = None
        self._vote = agreement.Vote()

    def _forwards_of_peers(self, lengths: list[int]) -> int:
        """How many more batches than this rank another one has, where a forward waits for all ranks (FSDP2).

        Raises:
            ValueError: ranks would wait for each other; on every rank the same line.
        """
        model = getattr(self.evaluator, "model", None) or getattr(self.trainer.update, "model", None)
        if not isinstance(model, nn.Module) or not waits_for_peers(model) or min(lengths) == max(lengths) >= 0:
            return 0
        if self.length is None or min(lengths) < 0 or not hasattr(self.evaluator, "step"):
            raise ValueError(
                f"The evaluation of {self.name!r} has a model in FSDP2, in which each forward waits for all ranks: "
                "give data with a length, and an evaluator of create_evaluator()."
            )
        return max(lengths) - self.length

    @property
    def sized(self) -> bool:
        """Every rank knows how many batches it has."""
        return self.common >= 0

    def keep_progress(self, progress: EvaluationProgress, model: nn.Module) -> None:
        """Save the progress from now on; start where the saved progress ends."""
        self.source = DataSource(self.data, None)
        self.source.position.pass_number = _pass_of(self.data)
        iteration = self.trainer.state.iteration
        self.progress = progress.begin(self.evaluator, model, self.source, iteration=iteration, limit=self.limit)

    def __iter__(self) -> Iterator[Any]:
        progress, batches = self.progress, self.progress.start if self.progress else 0
        iterator = begin_pass(self.data) if progress is None else iter(self.source)
        if progress is not None:
            progress.restore_rng()
        self._vote.restart(batches)
        while self.limit is None or batches < self.limit:
            if self._stops(batches):
                self._interrupt(iterator)
                return
            try:
                self.trainer.requests.waiting_for_data = self.single_process
                try:
                    batch = next(iterator, _END)
                finally:
                    self.trainer.requests.waiting_for_data = False
            except StopRequested:
                if progress is not None and self.source.sampler is not None:  # others may have drawn random numbers
                    progress.write(batches)
                self._interrupt(iterator)
                return
            if batches == 0 and not self.sized:
                _smallest(self.name, 0 if batch is _END else None)
            if batch is _END:
                return
            if self._idle_forwards and batches + 1 == self.length:
                for _ in range(self._idle_forwards):  # peers have more batches
                    self.evaluator.step(self.evaluator, batch)  # type: ignore[attr-defined]  # checked above
            yield batch
            batches += 1

    def _stops(self, batches: int) -> bool:
        """Whether all ranks stop after so many; saves the progress where it is due."""
        if not self.single_process and batches >= self.common:
            return False
        due = self.progress is not None and self.progress.due(batches)
        stops = bool(self._vote.poll(batches, int(self.trainer.stop_requested), now=due))
        if self.progress is not None and (due or stops):
            self.progress.write(batches)
        return stops

    def _interrupt(self, iterator: Any) -> None:
        self.interrupted = True
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
