"""Tables of text."""

from __future__ import annotations

from ignite_engine.text import in_columns


def test_columns_are_as_wide_as_their_widest_cell_without_trailing_spaces() -> None:
    assert in_columns([("a", "long name", "1"), ("wide", "b", "")]) == ["a     long name  1", "wide  b"]
    assert in_columns([]) == []
