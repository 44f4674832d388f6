"""Patterns name parts and what is inside them, and one that matches nothing is an error."""

import pytest

from ignite_engine.checkpointing.patterns import Patterns

CONTENTS = {"model": ["head.weight", "body.weight"], "optimizer/dense": ["body.weight"], "ema": []}


def category(part):
    return "optimizer" if part.startswith("optimizer") else part


def test_a_part_is_named_by_its_name_a_wildcard_or_its_category():
    for text in ("optimizer/dense", "optimizer*", "optimizer"):
        patterns = Patterns([text], "parts", category)
        assert [part for part in CONTENTS if patterns.has_part(part)] == ["optimizer/dense"]


def test_a_name_is_meant_by_itself_or_with_its_whole_part():
    inside, whole = Patterns(["model:head.*"], "ignore"), Patterns(["model"], "ignore")
    assert inside.has_name("model", "head.weight") and not inside.has_name("model", "body.weight")
    assert not inside.has_name("ema", "head.weight") and whole.has_name("model", "body.weight")
    assert whole.has_part("model") and not inside.has_part("model")
    assert inside.concern("model") and not inside.concern("ema")
    assert Patterns(["*:head.*"], "ignore").has_name("ema", "head.bias")


@pytest.mark.parametrize("texts", [[""], [":head"], ["model:"], [3]])
def test_a_malformed_pattern_is_refused(texts):
    with pytest.raises(ValueError, match=f"^ignore has the pattern {texts[0]!r}: expected a part"):
        Patterns(texts, "ignore")


def test_text_in_the_place_of_a_list_is_refused():
    with pytest.raises(ValueError, match=r"^ignore is a list of patterns, got 'model': write \['model'\]\.$"):
        Patterns("model", "ignore")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("modle", "ignore: 'modle' is not a part of the checkpoint; did you mean 'model'?"),
        ("model:heat.*", "ignore: 'model:heat.*' matches no name in the checkpoint"),
        ("ema:head.*", "ignore: 'ema:head.*' matches no name in the checkpoint, which has no names inside."),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(text, line):
    with pytest.raises(ValueError) as caught:
        Patterns(["model:head.*", text], "ignore").check(CONTENTS, "the checkpoint")
    assert str(caught.value).startswith(line)
