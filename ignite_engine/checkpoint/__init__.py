"""The checkpoint store: commit protocol, manifest, verification, retention. Usable without any engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignite_engine.checkpoint.background import BackgroundSave
    from ignite_engine.checkpoint.load import LoadReport
    from ignite_engine.checkpoint.load_sources import LoadSource
    from ignite_engine.checkpoint.manifest import FORMAT_VERSION, Manifest, read_manifest
    from ignite_engine.checkpoint.naming import find_directory, find_source
    from ignite_engine.checkpoint.retention import BestCheckpoint, CheckpointInfo, Retention
    from ignite_engine.checkpoint.save_filter import SaveFilter
    from ignite_engine.checkpoint.save_options import SaveOptions
    from ignite_engine.checkpoint.snapshot import Snapshot
    from ignite_engine.checkpoint.store import CheckpointStore, Loaded, Newest
    from ignite_engine.checkpoint.weights_source import Source, read_source
    from ignite_engine.errors import CheckpointError, NotExact, StateMismatch, require_exact

__all__ = [
    "FORMAT_VERSION",
    "BackgroundSave",
    "BestCheckpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointStore",
    "LoadReport",
    "LoadSource",
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
    "find_directory",
    "find_source",
    "read_manifest",
    "read_source",
    "require_exact",
]

# A trainer stands on the modules about plain data alone; the store is loaded by what saves and loads.
_HOMES = {
    "checkpoint.background": ("BackgroundSave",),
    "checkpoint.load": ("LoadReport",),
    "checkpoint.load_sources": ("LoadSource",),
    "checkpoint.manifest": ("FORMAT_VERSION", "Manifest", "read_manifest"),
    "checkpoint.naming": ("find_directory", "find_source"),
    "checkpoint.retention": ("BestCheckpoint", "CheckpointInfo", "Retention"),
    "checkpoint.save_filter": ("SaveFilter",),
    "checkpoint.save_options": ("SaveOptions",),
    "checkpoint.snapshot": ("Snapshot",),
    "checkpoint.store": ("CheckpointStore", "Loaded", "Newest"),
    "checkpoint.weights_source": ("Source", "read_source"),
    "errors": ("CheckpointError", "NotExact", "StateMismatch", "require_exact"),
}
_MODULES = {name: f"ignite_engine.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
