"""Batches that resume: loaders, their order, and the source that a Trainer iterates."""

from ignite_engine.data.loader import loader, resumable
from ignite_engine.data.readers import length_of
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.data.seeding import SeededDataset
from ignite_engine.data.source import DataSource
from ignite_engine.data.workers import end_workers

__all__ = [
    "DataSource",
    "ResumableSampler",
    "SeededDataset",
    "end_workers",
    "length_of",
    "loader",
    "resumable",
]
