"""The table says what became of each part, in words."""

from __future__ import annotations

import pytest

from ignite_engine.checkpointing.load.table import LoadTable, PartRow


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (PartRow("ema", "missing"), "not in the checkpoint, stays as built"),
        (PartRow("ema", "not saved"), "left out when it was saved, stays as built"),
        (PartRow("ema", "waits"), "waits until it is registered"),
        (PartRow("ema", "unclaimed"), "skipped, nothing is registered for it"),
        (PartRow("trainer", "loaded"), "loaded"),
        (PartRow("model", "loaded", loaded=["a", "b"], skipped=["c"]), "loaded 2; skipped 1: c"),
        (PartRow("model", "loaded", loaded=["a"], left_out=["b"]), "loaded 1; not saved 1: b"),
        (
            PartRow("model", "loaded", loaded=["a"], missing=["b"], unexpected=["c"], reshaped=["d (1,) for (2,)"]),
            "loaded 1; 1 missing: b; 1 unexpected: c; 1 of another shape: d (1,) for (2,)",
        ),
    ],
)
def test_a_row_in_words(row: PartRow, text: str) -> None:
    assert str(row) == text


def test_a_table_is_complete_without_what_does_not_fit() -> None:
    table = LoadTable("there", [PartRow("model", "loaded", loaded=["a"], skipped=["b"]), PartRow("rng", "unclaimed")])
    assert table.complete and table["rng"].outcome == "unclaimed"
    for row in (PartRow("ema", "missing"), PartRow("ema", "loaded", reshaped=["a"])):
        table = LoadTable("there", [*table.rows[:2], row])
        assert not table.complete and table.unfit == [row]


def test_a_table_as_text_has_one_line_for_each_part() -> None:
    rows = [PartRow("model", "loaded", loaded=["a"]), PartRow("optimizer", "missing")]
    assert str(LoadTable("runs/a", rows)).splitlines() == [
        "Loaded from runs/a:",
        "  model      loaded 1",
        "  optimizer  not in the checkpoint, stays as built",
    ]
