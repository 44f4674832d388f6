"""How far an evaluation has come, in a file: a long one that was killed or stopped goes on from there.

The file counts only for the evaluation that it was written in: same set, iteration, weights, limit and ranks. As
training is bit for bit, a run that resumes from the checkpoint before comes to that evaluation again.
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
from ignite_engine.checkpointing.part_file import load_plain, refuse_what_cannot_be_loaded
from ignite_engine.data.source import DataSource
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ranks import agreement
from ignite_engine.states import metrics as metric_state

logger = logging.getLogger(__name__)

_FORMAT = 1


class EvaluationProgress:
    """The progress file of one named set; every method is a collective.

    Args:
        directory: of such files, seen by rank 0; it is made when the first one is written.
        name: of the set.
        every: batches between two writes.

    A file that cannot be written is a warning: the evaluation goes on, and would begin anew after a kill.
    """

    def __init__(self, directory: str | Path, name: str, every: int) -> None:
        self.path = Path(directory) / f"{quote(name, safe='')}.progress"
        self.name, self.every = name, every
        self._told = False

    def usable(self, evaluator: Engine, model: object, *, sized: bool) -> bool:
        """Whether an evaluation can be taken up in its middle; what is in the way is told once.

        Args:
            sized: every rank's loader says how many batches it has.
        """
        found = next(filter(None, agreement.gather_objects(self._problem(evaluator, model, sized))), None)
        if found is not None and not self._told:
            self._told = True
            logger.warning("The evaluation of %s always begins at its first batch: %s.", self.name, found)
        return found is None

    def _problem(self, evaluator: Engine, model: object, sized: bool) -> str | None:
        if not isinstance(model, nn.Module):
            return "its evaluator has no model, by whose weights evaluations are told apart"
        if not sized and agreement.world_size() > 1:
            return "its data has no length, and the ranks would not know when to write together"
        for name, metric in metric_state.metrics_of(evaluator).items():
            if (found := metric_state.problem(metric)) is not None:
                return f"its metric {name!r} cannot be saved, as {found}, which is no plain data"
        return None

    def begin(
        self, evaluator: Engine, model: nn.Module, source: DataSource, *, iteration: int, limit: int | None
    ) -> OngoingProgress:
        """Take up what the file holds, if it is of this very evaluation: ``source`` then stands at its batch."""
        what = {
            "format": _FORMAT,
            "name": self.name,
            "iteration": iteration,
            "limit": limit,
            "ranks": agreement.world_size(),
        }
        ongoing = OngoingProgress(self, evaluator, model, source, what)
        ongoing.take_up(agreement.broadcast_object(self._read(what) if agreement.rank() == 0 else None))
        return ongoing

    def _read(self, what: Mapping[str, Any]) -> dict[str, Any] | None:
        """The file's content if it is of the evaluation ``what``, as far as can be told without the weights."""
        try:
            digest, _, content = self.path.read_bytes().partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode() != digest:
                raise CheckpointError("its content has changed")
            saved = load_plain(self.path, io.BytesIO(content), mmap=False)
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError) as error:
            logger.warning("%s is not used, the evaluation begins anew: %s.", self.path, one_line(error).rstrip("."))
            return None
        other = [f"{key} {saved.get(key)}, not {value}" for key, value in what.items() if saved.get(key) != value]
        if other:
            logger.info("%s is of another evaluation (%s) and not used.", self.path, ", ".join(other))
        return None if other else saved

    def write(self, saved: Mapping[str, Any]) -> None:
        """Put ``saved`` in the place of the file, whole and durable; rank 0 only.

        Raises:
            OSError: the file before it stands.
        """
        buffer = io.BytesIO()
        torch.save(dict(saved), buffer)
        content = buffer.getvalue()
        ensure_directory(self.path.parent)
        digest = hashlib.sha256(content).hexdigest().encode()
        replace_file(self.path, lambda file: file.writelines([digest, b"\n", content]))


class OngoingProgress:
    """Of one evaluation. ``start`` is the batch that it begins with, 0 unless it goes on."""

    def __init__(
        self, kept: EvaluationProgress, evaluator: Engine, model: nn.Module, source: DataSource, what: dict[str, Any]
    ) -> None:
        self.start = 0
        self._kept, self._evaluator, self._model, self._source, self._what = kept, evaluator, model, source, what
        self._metrics = metric_state.metrics_of(evaluator)
        self._weights: list[str] | None = None
        self._mine: Mapping[str, Any] = {}
        self._failed = False

    def take_up(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from ``saved``, the same on every rank, if weights, metrics and data are those it was written with."""
        if saved is None:
            return
        path = self._kept.path
        if saved["weights"] != self._digests():
            logger.info("%s is of other weights and not used.", path)
            return
        mine, pass_number = saved["states"][agreement.rank()], self._source.pass_number
        try:
            if sorted(mine["metrics"]) != sorted(self._metrics):
                known = [sorted(each) for each in (mine["metrics"], self._metrics)]
                raise ValueError(f"It holds the metrics {known[0]}, now there are {known[1]}.")
            agreement.agreed(lambda: self._source.load_state_dict(mine["data"]))
        except ValueError as error:
            self._source.load_state_dict({"pass": pass_number, "batch": 0, "ended": False})
            logger.warning("%s is not used, the evaluation begins anew: %s", path, error)
            return
        self.start, self._mine = self._source.batch, mine
        if agreement.rank() == 0:
            logger.info("The evaluation of %s goes on after %d batches, from %s.", self._kept.name, self.start, path)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """The evaluator runs within it: once Ignite has reset metrics and iteration, they are put where they were."""
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
        """Put this rank's generators where they were; after the loader's iterator was made."""
        if self.start:
            rng.restore(dict(self._mine["rng"]))

    def due(self, batches: int) -> bool:
        """Whether to write after so many batches."""
        return batches > self.start and batches % self._kept.every == 0

    def write(self, batches: int) -> None:
        """Keep what ``batches`` batches have come to; every rank after the same number."""
        if self._failed or batches <= self.start:
            return
        self._source.batch = batches
        try:
            states = agreement.agreed(self._state)
            saved = {**self._what, "weights": self._digests(), "batches": batches, "states": states}
            if agreement.rank() == 0:
                self._kept.write(saved)
        except CheckpointError as error:  # on every rank
            self._give_up(error)
        except OSError as error:  # on rank 0, whose peers go on meeting it
            self._give_up(error, failed=False)

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

    def _give_up(self, error: Exception, *, failed: bool = True) -> None:
        logger.warning(
            "The progress of the evaluation of %s is not kept: %s. It goes on, and begins anew if it is cut off.",
            self._kept.name,
            one_line(error).rstrip("."),
        )
        self._failed = failed

    def complete(self) -> None:
        """The evaluation is at its end: the file goes."""
        if agreement.rank() == 0:
            with contextlib.suppress(OSError):
                self._kept.path.unlink(missing_ok=True)
