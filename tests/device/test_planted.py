"""Each planted mistake is one of today's code; ``python -m tests.device.planted`` says whether the tests find it."""

from __future__ import annotations

import pytest

from tests.device.planted import MISTAKES, Mistake
from tests.mutations.tree import ROOT


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_mistake_can_be_planted(mistake: Mistake) -> None:
    text = (ROOT / mistake.path).read_text(encoding="utf-8")
    changed = mistake.applied(text)

    assert changed != text
    compile(changed, mistake.path, "exec")


def test_mistake_of_a_text_that_is_no_longer_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.py must contain 'x' once, it does 2 times"):
        Mistake("lost", "a.py", (("x", "y"),)).applied("x x")
