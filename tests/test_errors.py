"""The errors and the pieces of their messages."""

from __future__ import annotations

import pytest

from ignite_engine.errors import did_you_mean, shortened


@pytest.mark.parametrize(
    ("given", "known", "told"),
    [
        ("Lr", ["lr", "betas"], "; did you mean 'lr'?"),
        ("adamw", ["AdamW", "SGD"], "; did you mean 'AdamW'?"),
        ("x", ["lr", "betas"], "; known: lr, betas."),
        ("x", [], "."),
        ("x", [f"name{i}" for i in range(22)], f"; known: {', '.join(f'name{i}' for i in range(20))} and 2 more."),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_all(given: str, known: list[str], told: str) -> None:
    assert did_you_mean(given, known) == told


def test_many_names_are_shortened() -> None:
    assert shortened(["a", "b", "c"]) == "a, b, c"
    assert shortened((name for name in "abcde"), limit=2) == "a, b and 3 more"
