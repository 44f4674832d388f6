"""The checkpoint store: commit protocol, manifest, verification, retention. Usable without any engine."""

from __future__ import annotations

from ignite_engine.checkpointing.background import BackgroundSave
from ignite_engine.checkpointing.load.plan import LoadPlan
from ignite_engine.checkpointing.load.prepare import prepare
from ignite_engine.checkpointing.load.sources import LoadSource
from ignite_engine.checkpointing.load.table import LoadTable
from ignite_engine.checkpointing.manifest import FORMAT_VERSION, Manifest, read_manifest
from ignite_engine.checkpointing.naming import find_directory, find_source
from ignite_engine.checkpointing.part_file import all_finite
from ignite_engine.checkpointing.retention import BestCheckpoint, CheckpointInfo, Retention
from ignite_engine.checkpointing.save_filter import SaveFilter
from ignite_engine.checkpointing.save_options import SaveOptions
from ignite_engine.checkpointing.snapshot import Snapshot
from ignite_engine.checkpointing.store import CheckpointStore, Loaded, Newest
from ignite_engine.checkpointing.weights_source import Source, read_source
from ignite_engine.errors import CheckpointError, NotExact, StateMismatch, require_exact

__all__ = [
    "FORMAT_VERSION",
    "BackgroundSave",
    "BestCheckpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointStore",
    "LoadPlan",
    "LoadSource",
    "LoadTable",
    "Loaded",
    "Manifest",
    "Newest",
    "NotExact",
    "Retention",
    "SaveFilter",
    "SaveOptions",
    "Snapshot",
    "Source",
    "StateMismatch",
    "all_finite",
    "find_directory",
    "find_source",
    "prepare",
    "read_manifest",
    "read_source",
    "require_exact",
]
