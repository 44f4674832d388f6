"""A few of the random trials; ``python -m tests.replay`` makes hundreds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.replay.trials import SECTIONS

FEW = {"moments": 3, "differences": 2, "forgeries": 3}


@pytest.mark.long
@pytest.mark.parametrize("section", FEW)
def test_a_few_random_trials_are_right(section: str, tmp_path: Path) -> None:
    trials = list(SECTIONS[section](tmp_path, random.Random(11), FEW[section]))
    assert len(trials) >= FEW[section]
    assert [trial.problem for trial in trials if trial.problem is not None] == []


@pytest.mark.slow
@pytest.mark.distributed
def test_moments_on_two_ranks(tmp_path: Path) -> None:
    trials = list(SECTIONS["ranks"](tmp_path, random.Random(11), 10))
    assert len(trials) == 2 and [trial.problem for trial in trials] == [None, None]
