"""The command line: thin over ``runs.recipe.build_run``."""

from __future__ import annotations

from ignite_engine.cli.main import main

__all__ = ["main"]
