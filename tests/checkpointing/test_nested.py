"""Walking and rebuilding nested states."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

import pytest

from ignite_engine.checkpointing.nested import MAX_DEPTH, TooDeep, dotted, rebuilt, walk


class Pair(NamedTuple):
    first: int
    second: int


def test_each_leaf_comes_with_its_path_in_order():
    state = {"a": [1, (2, {"b": 3})], "empty": {}, 4: None}
    assert list(walk(state)) == [(("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1, "b"), 3), ((4,), None)]
    assert dotted(("a", 1, 0)) == "a.1.0"
    assert list(walk(7)) == [((), 7)]


def test_containers_may_count_as_leaves():
    assert list(walk({"a": [1, 2], "b": {"c": []}}, whole=lambda value: isinstance(value, list))) == [
        (("a",), [1, 2]),
        (("b", "c"), []),
    ]


def test_rebuilt_keeps_types_and_copies_containers():
    state = {"a": OrderedDict(b=[1]), "c": Counter(d=2), "e": (3, {4}), "f": Pair(5, 6)}
    copy = rebuilt(state, lambda value: value)
    assert copy == state and copy is not state and copy["a"]["b"] is not state["a"]["b"]
    assert [type(each) for each in copy.values()] == [type(each) for each in state.values()]
    assert rebuilt([1, (2,)], lambda value: value * 10) == [10, (20,)]


@pytest.mark.parametrize("work", [lambda state: list(walk(state)), lambda state: rebuilt(state, lambda value: value)])
def test_a_state_without_end_is_an_error_and_no_recursion(work):
    deep = 0
    for _ in range(MAX_DEPTH):
        deep = [deep]
    work(deep)
    cyclic = {}
    cyclic["again"] = {"self": cyclic, "twice": cyclic}
    for state in ([deep], cyclic):
        with pytest.raises(TooDeep, match=f"more than {MAX_DEPTH} deep"):
            work(state)
