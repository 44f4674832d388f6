"""What of ``ignite_engine/ext/`` is there: tests outside ``tests/ext`` leave out what they need of it and is not."""

import importlib.util

import pytest


def has(package):
    try:
        return importlib.util.find_spec(f"ignite_engine.ext.{package}") is not None
    except ModuleNotFoundError:
        return False


def needs(package):
    """Marks a test."""
    return pytest.mark.skipif(not has(package), reason=f"ignite_engine.ext.{package} is not there")


def of(package, cases):
    """The cases, or none of them."""
    return cases if has(package) else type(cases)()


WHOLE = all(
    has(package)
    for package in (
        *("accumulation", "capture", "follow", "mirror", "rank_invariant"),
        *("recovery", "replay", "report", "sparse", "windows"),
    )
)
