"""The checkpoint store: commit protocol, manifest, verification, retention. Usable without any engine."""

from __future__ import annotations

from ignite_engine.checkpointing.background import BackgroundSave
from ignite_engine.checkpointing.errors import CheckpointError
from ignite_engine.checkpointing.manifest import FORMAT_VERSION, Manifest, read_manifest
from ignite_engine.checkpointing.parts import all_finite
from ignite_engine.checkpointing.retention import CheckpointInfo, Retention
from ignite_engine.checkpointing.snapshot import Snapshot
from ignite_engine.checkpointing.store import CheckpointStore, Loaded, Newest

__all__ = [
    "FORMAT_VERSION",
    "BackgroundSave",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointStore",
    "Loaded",
    "Manifest",
    "Newest",
    "Retention",
    "Snapshot",
    "all_finite",
    "read_manifest",
]
