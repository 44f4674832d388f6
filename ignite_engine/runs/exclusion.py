"""Samples that training leaves out of their batches, by their indices: ``data.exclude``."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from ignite_engine.config import Config
from ignite_engine.data import Windows
from ignite_engine.data.sampler import reads_whole_batches
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory, lines_of, write_whole
from ignite_engine.runs.loaders import is_loader
from ignite_engine.state import Start
from ignite_engine.step.losses import LossFn
from ignite_engine.step.micro_batches import WeightFn
from ignite_engine.step.out_of_memory import samples_of
from ignite_engine.task import Task
from ignite_engine.trainer import Trainer
from ignite_engine.update import Update

logger = logging.getLogger(__name__)

RECORD = "exclusion.json"
"""In the folder of a run: the number of samples that it leaves out, and the hash of their indices."""


class Kept(NamedTuple):
    """A batch without the samples that are left out."""

    batch: Any
    """Where none is kept: a batch of other samples, for the peers of a wrapped model; it weighs nothing."""
    share: float
    """The share of its samples that is kept, from 0 to 1."""


def without_excluded(config: Config, task: Task) -> Task:
    """The task, whose training set leaves out what ``data.exclude`` names; its batches are :class:`Kept`.

    Raises:
        ConfigError: the file cannot be read, names what is not there or all there is, the data has no indices, or the
            run in the folder has left out other samples.
    """
    path = config.data.exclude
    if path is None:
        _check_resumed(config, frozenset())
        return task
    data: Any = task.train_set
    if isinstance(data, Windows | IterableDataset) or is_loader(data):
        kind = type(data).__name__
        raise config.error(
            "data.exclude",
            f"got {path!r}, but the train_set is a {kind}, whose samples have no indices: give map-style data, or "
            "leave them out of what it reads and train anew.",
        )
    try:
        excluded = read_indices(Path(path), len(data))
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise config.error("data.exclude", f"got {path!r}: {problem}.") from None
    _check_resumed(config, excluded)
    if agreement.rank() == 0:
        logger.info("%d of %d samples are left out (%s, %s).", len(excluded), len(data), path, digest_of(excluded)[:12])
    wrapper = _WithoutInBatches if reads_whole_batches(data) else _Without
    return replace(
        task,
        train_set=wrapper(data, excluded),
        collate_fn=_CollateKept(task.collate_fn or default_collate, data, excluded),
        weight_fn=None if task.weight_fn is None else _WeighKept(task.weight_fn),
        tokens_fn=None if task.tokens_fn is None else _CountKept(task.tokens_fn),
    )


def recorded(directory: Path) -> str | None:
    """The hash of what the run in a folder leaves out; None: nothing."""
    return next((str(line.get("sha256")) for line in lines_of(directory / RECORD)), None)


def record_excluded(directory: Path, excluded: frozenset[int]) -> None:
    """Write into a run's folder what it leaves out."""
    values = {"samples": len(excluded), "sha256": digest_of(excluded)}
    write_whole(directory / RECORD, f"{json.dumps(values)}\n")


def record_from_start(config: Config, task: Task, trainer: Trainer) -> None:
    """Write what is left out into the run's folder once it trains; a resumed run has what it had."""

    def write(trainer: Trainer) -> None:
        is_new = trainer.state.start is Start.FRESH or recorded(config.directory) is None
        if agreement.rank() == 0 and is_new:
            record_excluded(config.directory, task.collate_fn.excluded)  # type: ignore[union-attr]  # without_excluded made it

    write.replayed = False  # type: ignore[attr-defined]
    trainer.add_event_handler(Events.EPOCH_STARTED, write)


def _check_resumed(config: Config, excluded: frozenset[int]) -> None:
    before = recorded(config.directory)
    if before is None or before == digest_of(excluded) or not any(RunDirectory(config.directory).checkpoints.glob("*")):
        return
    now = f"{config.data.exclude!r} with {len(excluded)} samples ({digest_of(excluded)[:12]})" if excluded else "none"
    raise config.error(
        "data.exclude",
        f"got {now}, but the run in {config.directory} leaves out other samples ({before[:12]}, {RECORD}): give its "
        "list again, or train anew in another run.directory.",
    )


def read_indices(path: Path, size: int) -> frozenset[int]:
    """The whole numbers of a file, one in a line; empty lines and what follows a ``#`` do not count.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not the index of a sample, there is none, or they are all there are; no full stop.
    """
    indices = set[int]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text := line.partition("#")[0].strip():
            if not (text.isascii() and text.isdecimal() and int(text) < size):
                raise ValueError(f"line {number} is {text!r}, expected an index from 0 to {size - 1}")
            indices.add(int(text))
    if not indices or len(indices) == size:
        raise ValueError(f"it names {'all' if indices else 'none'} of the {size} samples")
    return frozenset(indices)


def digest_of(indices: Iterable[int]) -> str:
    """SHA-256 of the indices in ascending order, one in a line."""
    return hashlib.sha256("".join(f"{index}\n" for index in sorted(indices)).encode()).hexdigest()


class UpdateOfKept(Update):
    """An update whose batches are :class:`Kept`: they are weighed as such, and the model sees the batch in them."""

    def __init__(
        self, model: nn.Module, optimizer: Any, loss_fn: LossFn, *, weight_fn: WeightFn | None, **options: Any
    ) -> None:
        super().__init__(model, optimizer, loss_fn, weight_fn=_WeighKept(weight_fn), **options)

    def accumulate(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        return super().accumulate(engine, [kept.batch for kept in micro_batches], scales)


class _Sample(NamedTuple):
    """A sample of the training set, or the place of one that is not read."""

    value: Any
    is_kept: bool


class _Without(Dataset[Any]):
    """Every sample at its index; those that are left out are not read."""

    def __init__(self, dataset: Any, excluded: frozenset[int]) -> None:
        self.dataset, self.excluded = dataset, excluded

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _Sample(None, False) if index in self.excluded else _Sample(self.dataset[index], True)


class _Read(NamedTuple):
    """What a dataset that reads whole batches gave for some of the indices of a batch."""

    samples: Any
    share: float


class _WithoutInBatches(_Without):
    def __getitems__(self, indices: Sequence[int]) -> _Read:
        kept = [index for index in indices if index not in self.excluded]
        read = kept or _others(self.dataset, self.excluded, len(indices))
        return _Read(self.dataset.__getitems__(read), len(kept) / len(indices))


def _others(dataset: Any, excluded: frozenset[int], number: int) -> list[int]:
    """The first indices that are not left out, again where they are fewer."""
    return list(islice(cycle(index for index in range(len(dataset)) if index not in excluded), number))


class _CollateKept:
    def __init__(self, collate_fn: Callable[[list[Any]], Any], dataset: Any, excluded: frozenset[int]) -> None:
        self.collate_fn, self.dataset, self.excluded = collate_fn, dataset, excluded

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, _Read):
            return Kept(self.collate_fn(samples.samples), samples.share)
        if not isinstance(samples, list) or not isinstance(samples[0], _Sample):  # of another set
            return self.collate_fn(samples)
        kept = [sample.value for sample in samples if sample.is_kept]
        read = kept or [self.dataset[index] for index in _others(self.dataset, self.excluded, len(samples))]
        return Kept(self.collate_fn(read), len(kept) / len(samples))


class _WeighKept:
    """The weight of a batch: the task's, or the share of its samples that is kept."""

    def __init__(self, weight_fn: Callable[[Any], int | float] | None) -> None:
        self.weight_fn = weight_fn

    def __call__(self, batch: Any) -> float:
        if not isinstance(batch, Kept):  # of another set, or a part of one that did not fit into memory
            return float(samples_of(batch) or 0 if self.weight_fn is None else self.weight_fn(batch))
        if not batch.share or self.weight_fn is None:
            return batch.share
        return float(self.weight_fn(batch.batch))


class _CountKept:
    def __init__(self, tokens_fn: Callable[[Any], int]) -> None:
        self.tokens_fn = tokens_fn

    def __call__(self, kept: Kept) -> int:
        return self.tokens_fn(kept.batch) if kept.share else 0
