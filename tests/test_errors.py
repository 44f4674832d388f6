"""The errors and the pieces of their messages."""

import numpy as np
import pytest
import torch

from ignite_engine.errors import did_you_mean, shapes_of, shortened


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
def test_an_unknown_name_is_answered_with_the_nearest_or_all(given, known, told):
    assert did_you_mean(given, known) == told


def test_many_names_are_shortened():
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
def test_shapes_of_nested_values_are_one_short_line(value, text):
    assert shapes_of(value) == text
