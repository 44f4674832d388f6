"""The errors and the pieces of their messages."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from ignite_engine.errors import did_you_mean, leave_out, one_line, shapes_of, shortened


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 3), "Tensor [2, 3] float32"),
        (np.ones(4, np.int32), "ndarray [4] int32"),
        (None, "NoneType"),
        ([torch.ones(2), "a"], "[Tensor [2] float32, str]"),
        ((1, {"x": torch.ones(())}), "(int, {'x': Tensor [] float32})"),
        ([1] * 9, "[9 of int]"),
        ([[[[1]]]], "[[[list]]]"),
    ],
)
def test_shapes_of_nested_values_are_one_short_line(value: Any, text: str) -> None:
    assert shapes_of(value) == text


def test_remedy_of_fit_is_for_programs_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ignite_engine.runs.fit", types.ModuleType("fit"))
    assert leave_out("ema").endswith(", checkpoint.ignore in a config, or checkpoint={'ignore': ['ema']} to fit()")
    monkeypatch.delitem(sys.modules, "ignite_engine.runs.fit")
    assert leave_out("ema") == "resume(ignore=['ema']), or checkpoint.ignore in a config"


class _Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError(), "ValueError"),
        (_Unprintable(), "_Unprintable"),
        (ValueError("x" * 10_000), f"ValueError: {'x' * 2000} ..."),
    ],
    ids=["several lines", "no text", "unprintable", "very long"],
)
def test_any_error_is_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line
