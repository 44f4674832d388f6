"""The pieces of an iteration, in the order in which a step comes to them."""

from __future__ import annotations

import pytest

from ignite_engine.ext.replay.steps import FirstPiece, Pieces, first_piece

IN_ORDER = (
    "the samples of the batch",
    "the bytes of the batch[0]",
    "the random generator torch",
    "model.weight before the step",
    "the output loss",
    "the gradient of weight",
    "the rate optimizer",
    "the output accuracy",
    "model.weight after the step",
    "the state of optimizer",
    "another one",
)


@pytest.mark.parametrize("place", range(len(IN_ORDER)))
def test_the_first_piece_of_a_step_is_named_however_many_differ_after_it(place: int) -> None:
    differing = [*reversed(IN_ORDER[place:])]
    first: Pieces = dict.fromkeys(IN_ORDER, "0")
    second: Pieces = {**dict.fromkeys(differing, "1"), **dict.fromkeys(IN_ORDER[:place], "0")}

    assert first_piece({4: first, 5: first}, {4: first, 5: second}) == FirstPiece(5, 0, IN_ORDER[place], "0", "1")
    assert first_piece({5: {}}, {5: second}, rank=1) == FirstPiece(5, 1, IN_ORDER[0], "missing", second[IN_ORDER[0]])
    assert first_piece({4: first}, {5: second}) is None
