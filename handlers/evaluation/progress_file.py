"""The progress of an evaluation in a file, from which a long one that was killed or stopped continues.

The file is valid only for the evaluation in which it was written: same set, iteration, weights, limit and number of
ranks. As training is reproduced bit for bit, a run resumed from the previous checkpoint reaches that evaluation again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_engine import rng
from ignite_engine.checkpointing.digests import tensor_sha256
from ignite_engine.checkpointing.filesystem import ensure_directory, replace_file
from ignite_engine.checkpointing.part_file import load_plain
from ignite_engine.checkpointing.plain_data import refuse_what_cannot_be_loaded
from ignite_engine.data.source import DataSource
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ranks import agreement
from ignite_engine.states import metrics as metric_state

logger = logging.getLogger(__name__)

_FORMAT = 1


class EvaluationProgress:
    """The progress file of one named set; every method is a collective.

    Args:
        directory: of the progress files, accessible to rank 0; it is created with the first one.
        name: of the set.
        every: batches between two writes.

    A file that cannot be written is a warning: the evaluation continues, and would start over after a kill.
    """

    def __init__(self, directory: str | Path, name: str, every: int) -> None:
        self.path = Path(directory).absolute() / f"{quote(name, safe='')}.progress"
        self.name, self.every = name, every
        self._warned = False

    def usable(self, evaluator: Engine, model: object, *, sized: bool) -> bool:
        """Whether an evaluation can be continued in its middle; the reason against it is logged once.

        Args:
            sized: every rank's loader has a length.
        """
        found = next(filter(None, agreement.gather_objects(self._unsupported_reason(evaluator, model, sized))), None)
        if found is not None and not self._warned:
            self._warned = True
            logger.warning("The evaluation of %s always starts at its first batch: %s.", self.name, found)
        return found is None

    def _unsupported_reason(self, evaluator: Engine, model: object, sized: bool) -> str | None:
        if not isinstance(model, nn.Module):
            return "its evaluator has no model, whose weights identify an evaluation"
        if not sized and agreement.world_size() > 1:
            return "its data has no length, so that the ranks cannot agree when to write"
        for name, metric in metric_state.metrics_of(evaluator).items():
            if (found := metric_state.unsupported_reason(metric)) is not None:
                return f"its metric {name!r} cannot be saved: {found}, which is not plain data"
        return None

    def begin(
        self, evaluator: Engine, model: nn.Module, source: DataSource, *, iteration: int, limit: int | None
    ) -> OngoingProgress:
        """Read the file; if it is of this evaluation, ``source`` is moved to its batch."""
        what = {
            "format": _FORMAT,
            "name": self.name,
            "iteration": iteration,
            "limit": limit,
            "ranks": agreement.world_size(),
        }
        ongoing = OngoingProgress(self, evaluator, model, source, what)
        ongoing.continue_from(agreement.broadcast_object(self._read(what) if agreement.rank() == 0 else None))
        return ongoing

    def _read(self, what: Mapping[str, Any]) -> dict[str, Any] | None:
        """The file's content, if all but the weights matches the evaluation ``what``."""
        try:
            digest, _, content = self.path.read_bytes().partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode() != digest:
                raise CheckpointError("its content has changed")
            saved = load_plain(self.path, io.BytesIO(content), mmap=False)
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError) as error:
            logger.warning("%s is not used, the evaluation starts over: %s.", self.path, one_line(error).rstrip("."))
            return None
        differences = [f"{key} {saved.get(key)}, not {value}" for key, value in what.items() if saved.get(key) != value]
        if differences:
            logger.info("%s is of another evaluation (%s) and not used.", self.path, ", ".join(differences))
        return None if differences else saved

    def write(self, saved: Mapping[str, Any]) -> None:
        """Replace the file by ``saved``, atomically and synced to disk; rank 0 only.

        Raises:
            OSError: the previous file is still in place.
        """
        buffer = io.BytesIO()
        torch.save(dict(saved), buffer)
        content = buffer.getvalue()
        ensure_directory(self.path.parent)
        digest = hashlib.sha256(content).hexdigest().encode()
        replace_file(self.path, lambda file: file.writelines([digest, b"\n", content]))


class OngoingProgress:
    """The progress of one evaluation. ``start`` is its first batch, 0 unless it is continued."""

    def __init__(
        self, kept: EvaluationProgress, evaluator: Engine, model: nn.Module, source: DataSource, what: dict[str, Any]
    ) -> None:
        self.start = 0
        self._kept, self._evaluator, self._model, self._source, self._what = kept, evaluator, model, source, what
        self._metrics = metric_state.metrics_of(evaluator)
        self._weights: list[str] | None = None
        self._mine: Mapping[str, Any] = {}
        self._failed = False

    def continue_from(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from ``saved``, on every rank, if weights, metrics and data are those it was written with."""
        if saved is None:
            return
        path = self._kept.path
        if saved["weights"] != self._digests():
            logger.info("%s is of other weights and not used.", path)
            return
        mine, pass_number = saved["states"][agreement.rank()], self._source.place.pass_number
        try:
            if sorted(mine["metrics"]) != sorted(self._metrics):
                known = [sorted(names) for names in (mine["metrics"], self._metrics)]
                raise ValueError(f"It has the metrics {known[0]}, the evaluator has {known[1]}.")
            agreement.agreed(lambda: self._source.load_state_dict(mine["data"]))
        except ValueError as error:
            self._source.load_state_dict({"pass": pass_number, "batch": 0, "ended": False})
            logger.warning("%s is not used, the evaluation starts over: %s", path, error)
            return
        self.start, self._mine = self._source.place.batch, mine
        if agreement.rank() == 0:
            logger.info("The evaluation of %s continues after %d batches, from %s.", self._kept.name, self.start, path)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """While the evaluator runs: restores metrics and iteration once Ignite has reset them."""
        if not self.start:
            yield
            return
        with self._evaluator.add_event_handler(Events.EPOCH_STARTED, self._restore):
            yield

    def _restore(self) -> None:
        for name, metric in self._metrics.items():
            metric_state.restore(metric, self._mine["metrics"][name])
        self._evaluator.state.iteration = self.start

    def restore_rng(self) -> None:
        """Restore this rank's generators; after the loader's iterator was created."""
        if self.start:
            rng.restore(dict(self._mine["rng"]))

    def due(self, batches: int) -> bool:
        """Whether to write after so many batches."""
        return batches > self.start and batches % self._kept.every == 0

    def write(self, batches: int) -> None:
        """Save the progress after ``batches`` batches; every rank calls it after the same number."""
        if self._failed or batches <= self.start:
            return
        self._source.consumed(batches - self._source.place.batch)
        try:
            states = agreement.agreed(self._state)
            saved = {**self._what, "weights": self._digests(), "batches": batches, "states": states}
            if agreement.rank() == 0:
                self._kept.write(saved)
        except CheckpointError as error:  # on every rank
            self._warn(error)
            self._failed = True
        except OSError as error:  # on rank 0, which still takes part in the next collectives
            self._warn(error)

    def _state(self) -> dict[str, Any]:
        metrics = {name: metric_state.capture(metric) for name, metric in self._metrics.items()}
        state = {"metrics": metrics, "rng": rng.capture(), "data": self._source.state_dict()}
        refuse_what_cannot_be_loaded(state)
        return state

    def _digests(self) -> list[str]:
        """SHA-256 of each rank's weights: buffers may differ between ranks."""
        if self._weights is None:
            digest = hashlib.sha256()
            for name, value in sorted(self._model.state_dict().items()):
                if isinstance(value, Tensor):
                    digest.update(f"{name} {tensor_sha256(value)}\n".encode())
            self._weights = agreement.gather_objects(digest.hexdigest())
        return self._weights

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "The progress of the evaluation of %s is not saved: %s. It continues, and starts over if interrupted.",
            self._kept.name,
            one_line(error).rstrip("."),
        )

    def complete(self) -> None:
        """The evaluation has ended: delete the file."""
        if agreement.rank() == 0:
            with contextlib.suppress(OSError):
                self._kept.path.unlink(missing_ok=True)
