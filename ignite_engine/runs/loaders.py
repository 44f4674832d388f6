"""The loaders of a run, of whatever its task gives as data, and how many updates they make."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_engine import devices
from ignite_engine.data.loader import loader, resumable
from ignite_engine.data.readers import Stateful, length_of, reader_of
from ignite_engine.data.sampler import DrawnSampler, ResumableSampler
from ignite_engine.data.source import OwnSource
from ignite_engine.ranks import agreement, mesh
from ignite_engine.runs.config import Config
from ignite_engine.runs.task import Task

logger = logging.getLogger(__name__)


def is_loader(data: Any) -> bool:
    """Whether it yields batches, as a ``DataLoader`` does or what looks like one."""
    by_index = hasattr(data, "__getitem__")
    return isinstance(data, DataLoader) or (
        not by_index
        and hasattr(data, "__iter__")
        and any(hasattr(data, name) for name in ("batch_size", "batch_sampler"))
    )


def data_loader(config: Config, task: Task, dataset: Any, *, training: bool) -> Any:
    """The loader of this rank's share of one set; only that of training shuffles or drops a last batch.

    Of windows each that holds a dataset gets one. A loader of the user's own stays, a plain ``DataLoader`` is rebuilt
    to resume exactly.
    """
    if isinstance(dataset, OwnSource):
        return dataset.opened_by(lambda window: data_loader(config, task, window, training=training))
    if is_loader(dataset):
        if not training:
            return dataset
        taken = resumable(dataset, seed=config.run.seed, any_sampler=True)
        order = getattr(taken, "sampler", None)
        if not isinstance(order, ResumableSampler | DistributedSampler):
            _warn_of_whole(taken)
        return taken
    data = config.data
    options: dict[str, Any] = {"num_workers": data.num_workers, "collate_fn": task.collate_fn}
    options["pin_memory"] = devices.pins_memory() if data.pin_memory is None else data.pin_memory
    if data.num_workers:
        options |= {"persistent_workers": data.persistent_workers, "prefetch_factor": data.prefetch_factor}
    size = data.batch_size if training else data.eval_batch_size or data.batch_size
    if isinstance(dataset, IterableDataset):
        kind = _loader_type(dataset)
        return kind(_of_this_rank(dataset), size, drop_last=training and data.drop_last, **options)
    if not training:
        return loader(dataset, size, seed=config.run.seed, **options)
    order = {"shuffle": data.shuffle} if task.sampler is None else {"sampler": task.sampler}
    return loader(dataset, size, seed=config.run.seed, drop_last=data.drop_last, **order, **options)


def _loader_type(stream: Any) -> Any:
    """One that saves the state of a stream that has some, if torchdata is there."""
    if not hasattr(stream, "state_dict") or importlib.util.find_spec("torchdata") is None:
        return DataLoader
    return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader


def _of_this_rank(stream: Any) -> Any:
    """The share of a Hugging Face stream; any other is whole, and shares itself out."""
    ranks = mesh.data_size()
    if ranks == 1:
        return stream
    if type(stream).__module__.partition(".")[0] == "datasets":
        split = importlib.import_module("datasets.distributed").split_dataset_by_node
        return split(stream, rank=mesh.data_rank(), world_size=ranks)
    return stream


def _warn_of_whole(data: Any) -> None:
    """Data that is not shared out to the ranks here."""
    ranks = mesh.data_size()
    if ranks > 1 and agreement.rank() == 0:
        logger.warning(
            "%s is read whole by each of the %d ranks, unless it yields the share of data_rank() of data_size() (both "
            "in ignite_engine.ranks).",
            *(type(data).__name__, ranks),
        )


def say_how_it_resumes(train_loader: Any) -> None:
    """One line where the data of training is more than map-style; of a plain ``DataLoader`` it has been said."""
    if agreement.rank() != 0 or isinstance(train_loader, OwnSource):
        return
    order, stream = getattr(train_loader, "sampler", None), getattr(train_loader, "dataset", None)
    if isinstance(order, DrawnSampler):
        kind = type(order.drawn).__name__
        logger.info("The order of %s is drawn for each epoch from (seed, epoch), so it is resumed exactly.", kind)
    elif isinstance(reader := reader_of(train_loader), Stateful):
        but = "" if reader.inexact is None else f", but {reader.inexact}"
        logger.info("%s is resumed by its own state%s.", type(train_loader).__name__, but)
    elif not isinstance(order, ResumableSampler):
        how = "" if isinstance(stream, IterableDataset) else ", in an order that may be another one"
        remedy = "; with torchdata installed its state is used" if hasattr(stream, "state_dict") else ""
        logger.info(
            "%s: a resume reads what was consumed of the epoch again and drops it%s%s.",
            *(reader.inexact or type(train_loader).__name__, how, remedy),
        )


def updates_of(config: Config, train_loader: Any) -> int | None:
    """Updates of the whole run; None: its data does not say, and no setting needs it.

    Raises:
        ConfigError: an epoch has no update, or a setting needs the length of data that has none.
    """
    if isinstance(train_loader, OwnSource):
        return _updates_asked_for(config, "a stream of windows")
    if isinstance(order := getattr(train_loader, "sampler", None), ResumableSampler):
        batches = _batches_of(config, order.data_length(), train_loader)
    else:
        own = length_of(train_loader)
        lengths = [row[0] for row in agreement.gather_floats([-1.0 if own is None else float(own)])]
        if min(lengths) < 0:
            return _updates_asked_for(config, type(train_loader).__name__)
        batches = int(max(lengths))
        if not batches:
            raise config.error("task", f"the data 'train_set' is a {type(train_loader).__name__} without a batch.")
    per_epoch = -(-batches // (config.update.global_micro_batches or config.update.accumulation_steps or 1))
    epochs = config.run.max_epochs
    limits = (config.run.max_iterations, None if epochs is None else epochs * per_epoch)
    return min(limit for limit in limits if limit is not None)


def _batches_of(config: Config, samples: int, train_loader: Any) -> int:
    """Micro-batches of an epoch over so many samples: of the longest rank, or with
    ``update.global_micro_batches`` of all ranks."""
    ranks, in_all = mesh.data_size(), config.update.global_micro_batches
    if in_all is not None and in_all < ranks:
        raise config.error(
            "update.global_micro_batches", f"got {in_all} on {ranks} ranks, expected at least one for each."
        )
    shard = samples if in_all is not None else -(-samples // ranks)
    size = train_loader.batch_size
    batches = shard // size if train_loader.drop_last else -(-shard // size)
    if not batches:
        raise config.error("data.batch_size", f"got {size}, but a rank has {shard} samples; drop_last leaves none.")
    return int(batches)


def _updates_asked_for(config: Config, data: str) -> int | None:
    """Updates of the whole run over ``data`` of unknown length; None where the config does not say, nor needs to.

    Raises:
        ConfigError: the schedule needs to know.
    """
    schedules = dict(config.schedule_of(name) for name in config.optimizers or ("optimizer",))
    for key, entry in schedules.items():
        needed = entry.get("name", "none") not in ("none", "constant", "plateau") and entry.get("total") is None
        if needed and config.run.max_iterations is None:
            raise config.error(
                f"{key}.total", f"{data} does not say how many updates there will be: set it, or run.max_iterations."
            )
    totals = [entry["total"] for entry in schedules.values() if entry.get("total") is not None]
    return config.run.max_iterations or max(totals, default=None)
