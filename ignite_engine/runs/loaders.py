"""The loaders of a run, of whatever its task gives as data."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import devices
from ignite_engine.data.loader import loader, resumable
from ignite_engine.data.source import OwnSource
from ignite_engine.ranks import mesh
from ignite_engine.runs.config import Config
from ignite_engine.runs.task import Task


def is_loader(data: Any) -> bool:
    """Whether it yields batches, as a ``DataLoader`` does or what looks like one."""
    has_batches = any(hasattr(data, name) for name in ("batch_size", "batch_sampler"))
    return isinstance(data, DataLoader) or (
        has_batches and hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    )


def data_loader(config: Config, task: Task, dataset: Any, *, training: bool) -> Any:
    """The loader of this rank's share of one set; only that of training shuffles or drops a last batch.

    Of windows each that holds a dataset gets one. A loader of the user's own stays, a plain ``DataLoader`` is rebuilt
    to resume exactly.
    """
    if isinstance(dataset, OwnSource):
        return dataset.opened_by(lambda window: data_loader(config, task, window, training=training))
    if is_loader(dataset):
        return resumable(dataset, seed=config.run.seed, any_sampler=True) if training else dataset
    data = config.data
    options: dict[str, Any] = {"num_workers": data.num_workers, "collate_fn": task.collate_fn}
    options["pin_memory"] = devices.pins_memory() if data.pin_memory is None else data.pin_memory
    if data.num_workers:
        options |= {"persistent_workers": data.persistent_workers, "prefetch_factor": data.prefetch_factor}
    size = data.batch_size if training else data.eval_batch_size or data.batch_size
    if isinstance(dataset, IterableDataset):
        return _stream_loader(dataset, size, drop_last=training and data.drop_last, **options)
    if training:
        order = {"shuffle": data.shuffle} if task.sampler is None else {"sampler": task.sampler}
        options |= {"drop_last": data.drop_last, **order}
    return loader(dataset, size, seed=config.run.seed, **options)


def _stream_loader(stream: Any, size: int, **options: Any) -> Any:
    """Of a Hugging Face stream this rank's share; any other is whole, and shares itself out."""
    if mesh.data_size() > 1 and type(stream).__module__.partition(".")[0] == "datasets":
        split = importlib.import_module("datasets.distributed").split_dataset_by_node
        stream = split(stream, rank=mesh.data_rank(), world_size=mesh.data_size())
    kind: Any = DataLoader
    if hasattr(stream, "state_dict") and importlib.util.find_spec("torchdata") is not None:
        kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader  # which saves its state
    return kind(stream, size, **options)
