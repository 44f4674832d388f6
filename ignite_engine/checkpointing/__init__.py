"""The checkpoint store: commit protocol, manifest, verification, retention. Usable without any engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# A trainer stands on the modules about plain data alone; the store is loaded by what saves and loads.
_MODULES = {
    "FORMAT_VERSION": "ignite_engine.checkpointing.manifest",
    "BackgroundSave": "ignite_engine.checkpointing.background",
    "BestCheckpoint": "ignite_engine.checkpointing.retention",
    "CheckpointError": "ignite_engine.errors",
    "CheckpointInfo": "ignite_engine.checkpointing.retention",
    "CheckpointStore": "ignite_engine.checkpointing.store",
    "LoadPlan": "ignite_engine.checkpointing.load.plan",
    "LoadSource": "ignite_engine.checkpointing.load.sources",
    "LoadTable": "ignite_engine.checkpointing.load.table",
    "Loaded": "ignite_engine.checkpointing.store",
    "Manifest": "ignite_engine.checkpointing.manifest",
    "Newest": "ignite_engine.checkpointing.store",
    "NotExact": "ignite_engine.errors",
    "Retention": "ignite_engine.checkpointing.retention",
    "SaveFilter": "ignite_engine.checkpointing.save_filter",
    "SaveOptions": "ignite_engine.checkpointing.save_options",
    "Snapshot": "ignite_engine.checkpointing.snapshot",
    "Source": "ignite_engine.checkpointing.weights_source",
    "StateMismatch": "ignite_engine.errors",
    "all_finite": "ignite_engine.checkpointing.part_file",
    "find_directory": "ignite_engine.checkpointing.naming",
    "find_source": "ignite_engine.checkpointing.naming",
    "prepare": "ignite_engine.checkpointing.load.prepare",
    "read_manifest": "ignite_engine.checkpointing.manifest",
    "read_source": "ignite_engine.checkpointing.weights_source",
    "require_exact": "ignite_engine.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
