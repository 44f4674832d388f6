"""Batches that resume: loaders, their order, and the source that a Trainer iterates."""

from ignite_engine.data.loader import loader, resumable
from ignite_engine.data.sampler import ResumableSampler, SeededDataset
from ignite_engine.data.source import DataSource

__all__ = ["DataSource", "ResumableSampler", "SeededDataset", "loader", "resumable"]
