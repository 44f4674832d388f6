"""The checkpoint store: commit protocol, manifest, verification, retention. Usable without any engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignite_engine.checkpoint.sources import LoadSource
    from ignite_engine.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "LoadSource"]

_MODULES = {"CheckpointStore": "store", "LoadSource": "sources"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:  # importing a trainer must not import the store
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
