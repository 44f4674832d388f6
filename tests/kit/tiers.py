"""Which of a test's cases `make test` runs."""

import pytest


def tiered(cases, *quick):
    """The cases, marked nightly but for the ``quick`` ones, which walk the same path."""
    assert set(quick) <= set(cases), set(quick) - set(cases)
    return [each if each in quick else pytest.param(each, marks=pytest.mark.nightly) for each in cases]
