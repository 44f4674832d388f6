"""The progress of an evaluation that a stop has broken off, with which the resumed run goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import rng
from ignite_engine.checkpoint.pack import Pack
from ignite_engine.checkpoint.states import metrics as metric_state
from ignite_engine.data.source import DataSource
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import Group

logger = logging.getLogger(__name__)


def unsupported_reason(evaluator: Engine, *, sized: bool) -> str | None:
    """Why an evaluation cannot go on in its middle; None: it can.

    Args:
        sized: every rank's loader has a length.
    """
    if not sized and agreement.world_size() > 1:
        return "its data has no length, so that the ranks cannot agree where it stops"
    for name, metric in metric_state.metrics_of(evaluator).items():
        if (found := metric_state.unsupported_reason(metric)) is not None:
            return f"its metric {name!r} cannot be saved: {found}, which is not plain data"
    return None


class EvaluationProgress:
    """The progress of one evaluation on this rank. ``start`` is its first batch, 0 unless it goes on.

    Args:
        source: placed at the beginning of the pass.
        saved: what :meth:`capture` returned in the run before, on all ranks alike; None: it begins.
        limit: batches of the evaluation.
    """

    def __init__(
        self, evaluator: Engine, source: DataSource, saved: Mapping[str, Any] | None, limit: int | None
    ) -> None:
        self.start = self._counted = 0
        self.saved: dict[str, Any] | None = None
        """What a checkpoint holds, once it was broken off."""
        self._evaluator, self._source = evaluator, source
        self._metrics = metric_state.metrics_of(evaluator)
        self._what = {"ranks": agreement.world_size(), "limit": limit, "names": sorted(self._metrics)}
        self._begun = saved
        fits = saved is not None and saved["what"] == self._what
        if not all(agreement.gather_objects(fits)):
            return
        assert saved is not None
        pass_number = source.pass_number
        try:
            agreement.agreed(lambda: source.load_state_dict(saved["data"]))
        except ValueError as error:
            at_first = {"pass": pass_number, "batch": 0, "ended": False, "held": {}, "ranks": mesh.data_size()}
            source.load_state_dict(at_first)
            logger.warning("The evaluation starts over: %s", error)
            return
        self.start = self._counted = saved["batches"]
        if agreement.rank() == 0:
            logger.info("The evaluation continues after %d batches.", self.start)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """While the evaluator runs: restores metrics and iteration once Ignite has reset them."""
        if not self.start:
            yield
            return
        with self._evaluator.add_event_handler(Events.EPOCH_STARTED, self._restore):
            yield

    def _restore(self) -> None:
        assert self._begun is not None
        for name, metric in self._metrics.items():
            metric_state.restore(metric, self._begun["metrics"][name])
        self._evaluator.state.iteration = self.start

    def restore_rng(self) -> None:
        """Restore this rank's generators; after the loader's iterator was created."""
        if self.start:
            assert self._begun is not None
            rng.restore(dict(self._begun["rng"]))

    def capture(self, batches: int) -> None:
        """Keep the progress after ``batches`` batches in :attr:`saved`; every rank calls it after the same number."""
        evaluated = Group()
        evaluated.places, self._counted = batches - self._counted, batches
        self._source.consumed(evaluated)
        metrics = {name: metric_state.capture(metric) for name, metric in self._metrics.items()}
        state = {"what": self._what, "metrics": metrics, "rng": rng.capture(), "data": self._source.state_dict()}
        state["batches"] = batches
        try:
            Pack(state)  # refuses it
        except CheckpointError as error:
            logger.warning("The evaluation will start over, as its progress cannot be saved: %s", one_line(error))
        else:
            self.saved = state
