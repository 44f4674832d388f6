"""What objects and functions hold is found by name, to any depth, and without a call of their code."""

from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Engine
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

from ignite_engine.held import held


class Mark:
    """What is looked for."""

    def method(self) -> None:
        pass


class Slots:
    __slots__ = ("__private", "unset", "value")

    def __init__(self, value: Any) -> None:
        self.__private = self.value = value


class Named(NamedTuple):
    value: Any


class Methods:
    """Uses a variable of this module in a method that another one calls, and another one only to be made."""

    def __init__(self) -> None:
        self.size = len(str(MADE_WITH))

    def __call__(self) -> Any:
        return self.inner()

    def inner(self) -> Any:
        return [SCRIPT_LEVEL for _ in range(1)]


SCRIPT_LEVEL, MADE_WITH = Mark(), Mark()


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def wrapped(value: Any) -> Callable[[], Any]:
    function = closure(value)

    @wraps(function)
    def outer() -> Any:
        return function()

    return outer


def default(value: Any) -> Callable[[], Any]:
    def function(argument: Any = value, *, other: Any = 3) -> Any:
        return argument, other

    return function


def attribute_of(owner: Any, value: Any) -> Any:
    owner.value = value
    return owner


HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda mark: SimpleNamespace(value=mark), "it.value"),
    "slot": (Slots, "it._Slots__private"),
    "list": (lambda mark: [0, mark], "it[1]"),
    "nested": (lambda mark: {"a": ({3: mark},)}, "it['a'][0][3]"),
    "named tuple": (Named, "it[0]"),
    "deque": (lambda mark: deque([mark]), "it[0]"),
    "set": (lambda mark: {mark}, "it{}"),
    "ordered": (lambda mark: OrderedDict(a=mark), "it['a']"),
    "default": (lambda mark: defaultdict(list, a=[mark]), "it['a'][0]"),
    "user dict": (lambda mark: UserDict(a=mark), "it.data['a']"),
    "by an object": (lambda mark: {Mark: mark}, "it[0]"),
    "closure": (closure, "it.value"),
    "wrapped": (wrapped, "it.function.value"),
    "cached": (lambda mark: lru_cache(closure(mark)), "it.__wrapped__.value"),
    "default of a function": (default, "it.argument"),
    "partial": (lambda mark: partial(print, mark, end=""), "it[0]"),
    "partial by name": (lambda mark: partial(print, end=mark), "it.end"),
    "method": (lambda mark: mark.method, "it"),
    "method that is not Python's": (lambda mark: attribute_of(type("L", (list,), {})(), mark).append, "it.value"),
    "module": (lambda mark: nn.Sequential(nn.Identity(), attribute_of(nn.Identity(), mark)), "it.1.value"),
    "data set": (
        lambda mark: ConcatDataset([attribute_of(TensorDataset(torch.ones(2)), mark)] * 2),
        "it.datasets[0].value",
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_is_found_by_its_name(holder: str) -> None:
    make, name = HOLDERS[holder]
    mark = Mark()
    ((found, value),) = held({"it": make(mark)}, (Mark,))
    assert (found, value) == (name, mark)


def test_hooks_of_a_module_are_looked_at() -> None:
    mark, model = Mark(), nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: mark and None)
    ((found, value),) = held({"it": model}, (Mark,))
    assert found.startswith("it.0._forward_hooks[") and found.endswith(".mark") and value is mark


def test_methods_use_what_a_script_has_made_and_not_what_made_the_object() -> None:
    assert [*held({"it": Methods()}, (Mark,))] == [("it.SCRIPT_LEVEL", SCRIPT_LEVEL)]


def test_names_are_one_for_each_object_and_the_nearest_comes_first() -> None:
    first, second, third = Mark(), Mark(), Mark()
    found = [*held({"it": partial(default(first), [second], argument=third)}, (Mark,))]

    assert found == [("it.argument", third), ("it.argument'", first), ("it[0][0]", second)]


class Careless(dict[str, Any]):
    """Runs code wherever it is asked."""

    def __iter__(self) -> Any:
        raise OSError("the file is closed")

    def values(self) -> Any:
        raise OSError("the file is closed")

    items = values

    @property
    def broken(self) -> Any:
        raise OSError("the file is closed")

    def __getattr__(self, name: str) -> Any:
        raise OSError("the file is closed")

    def __eq__(self, other: object) -> bool:
        raise OSError("the file is closed")

    __hash__ = None  # type: ignore[assignment]


def test_no_code_of_an_object_is_run() -> None:
    mark = Mark()
    assert [*held({"it": [Careless(a=mark)]}, (Mark,))] == [("it[0]['a']", mark)]


def test_what_is_gone_or_not_bound_is_passed_over() -> None:
    def function() -> Any:
        return later  # never bound

    if not function:
        later = 0
    gone = Mark()
    proxy = weakref.proxy(gone)
    del gone
    assert [*held({"it": [proxy, function]}, (Mark,))] == []


def test_engines_tensors_and_optimizers_are_closed_but_an_owner_is_open() -> None:
    mark = Mark()
    engine = attribute_of(Engine(lambda engine, batch: None), mark)
    tensor, optimizer = attribute_of(torch.ones(1), mark), torch.optim.SGD([torch.ones(1)])
    assert [*held({"it": [engine, tensor, attribute_of(optimizer, mark)]}, (Mark,))] == []
    assert [*held({"it": optimizer}, (Mark,))] == [("it.value", mark)]


def test_of_long_collections_the_first_elements_are_looked_at() -> None:
    many = [[Mark()] for _ in range(5000)]
    assert len([*held({"it": many}, (Mark,))]) == 1000
    assert len([*held({"it": [[[place] for place in range(1000)] for _ in range(1000)], "last": Mark()}, (Mark,))]) == 1
