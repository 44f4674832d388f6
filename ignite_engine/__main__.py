"""``python -m ignite_engine`` and the ``ignite-engine`` command."""

from __future__ import annotations

import sys

from ignite_engine.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
