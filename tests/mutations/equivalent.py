"""Drawn mutations that change no behaviour, each with the reason; another one is drawn instead."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
