"""What objects and functions hold is found by name, to any depth, and without a call of their code."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Engine
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

from ignite_engine.held import held
from ignite_engine.peek import is_of_library, is_of_user


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
    "mapping proxy": (lambda mark: MappingProxyType({"a": mark}), "it['a']"),
    "arguments": (lambda mark: Namespace(value=mark), "it.value"),
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
    assert (found, value) == ("it.0._forward_hooks[0].mark", mark)  # and no number that torch gave it


def test_hooks_of_gradients_are_looked_at() -> None:
    def hook_of(mark: Mark) -> Callable[..., Any]:
        return lambda *_: mark and None

    marks, model = [Mark() for _ in range(4)], nn.Linear(2, 2)
    model.register_full_backward_pre_hook(hook_of(marks[0]))
    model.register_full_backward_hook(hook_of(marks[1]))
    model.weight.register_hook(hook_of(marks[2]))
    model.bias.register_post_accumulate_grad_hook(hook_of(marks[3]))
    found = dict(held({"it": model}, (Mark,)))
    assert sorted(map(id, found.values())) == sorted(map(id, marks))
    assert "it.weight._backward_hooks[0].mark" in found


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
    assert len([*held({"it": [[Mark()] for _ in range(10_100)]}, (Mark,))]) == 10_000
    assert len([*held({"it": [Mark() for _ in range(1500)]}, (Mark,))]) == 1500


def test_plain_elements_cost_little() -> None:
    rows = [[[0] * 1000] * 20 for _ in range(1000)]
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        assert [*held({"it": rows}, (Mark,))] == []
    finally:
        sys.setprofile(None)
    assert calls["call"] < 200_000, "a call for each number would be 20 million"


@pytest.mark.slow
def test_a_module_is_one_object_of_those_that_are_looked_at() -> None:
    mark, model = Mark(), nn.Sequential(*(nn.Sequential(*(nn.Identity() for _ in range(100))) for _ in range(200)))
    model[-1].append(nn.Sequential(nn.Sequential(attribute_of(nn.Identity(), mark))))
    assert [name for name, _ in held({"it": model}, (Mark,))] == ["it.199.100.0.0.value"]


class Parent:
    noise, made_with = Mark(), Mark()

    def __init__(self) -> None:
        self.size = len(str(self.made_with))

    def __repr__(self) -> str:
        return str(MADE_WITH)

    def forward(self) -> Any:
        return SCRIPT_LEVEL

    def loss(self) -> Any:
        return self.noise

    def unused(self) -> Any:
        return MADE_WITH


class Child(Parent):
    def forward(self) -> Any:
        return super().forward()


class Overrides(Parent):
    def forward(self) -> Any:
        return None


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return SCRIPT_LEVEL


def test_a_method_counts_where_a_function_uses_its_name_or_a_library_calls_it() -> None:
    assert [*held({"it": Overrides()}, (Mark,))] == []
    assert [*held({"it": Child()}, (Mark,))] == [("it.SCRIPT_LEVEL", SCRIPT_LEVEL)]
    owners = {"loss_fn": lambda it: it.loss(), "it": Overrides()}
    assert [*held(owners, (Mark,))] == [("it.noise", Parent.noise)]
    assert [*held({"it": OwnStep([torch.ones(1)], lr=0.1)}, (Mark,))] == [("it.func.SCRIPT_LEVEL", SCRIPT_LEVEL)]


def test_an_attribute_named_as_a_variable_of_the_module_is_another() -> None:
    assert [*held({"it": lambda owner: owner.SCRIPT_LEVEL}, (Mark,))] == []


def module(name: str, file: str, code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ModuleType(name)
    made.__file__ = file
    exec(code, vars(made))
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize("name", ["handlers", "this"])
def test_a_file_of_the_users_may_be_named_as_a_librarys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_of_user.cache_clear(), is_of_library.cache_clear()
    made = module(name, f"/home/me/{name}.py", "noise = None\ndef draw(): return noise", monkeypatch)
    made.noise = Mark()
    assert [*held({"it": made.draw}, (Mark,))] == [("it.noise", made.noise)]
    is_of_user.cache_clear(), is_of_library.cache_clear()


def test_modules_within_modules_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = module("my_package.noise", "/home/me/my_package/noise.py", "", monkeypatch)
    outer = module("my_package", "/home/me/my_package/__init__.py", "", monkeypatch)
    user = module("my_script", "/home/me/my_script.py", "def draw(): return my_package.noise.mark", monkeypatch)
    inner.mark, inner.other, outer.noise, user.my_package = Mark(), Mark(), inner, outer
    assert [*held({"it": user.draw}, (Mark,))] == [("it.my_package.noise.mark", inner.mark)]


class Closed:
    def __getattribute__(self, name: str) -> Any:
        raise OSError("the file is closed")


class WithoutAttributes:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise OSError("the file is closed")


class OfAnotherModule:
    @property
    def __module__(self) -> Any:  # type: ignore[override]
        raise OSError("the file is closed")


class Name(str):
    def __format__(self, form: str) -> str:
        raise OSError("the file is closed")


def test_objects_that_run_code_wherever_they_are_asked_end_nothing() -> None:
    named, mark = SimpleNamespace(), Mark()
    vars(named)[Name("key")] = mark
    of_no_module = type("OfNoModule", (), {"__module__": None})()
    it = [Closed(), WithoutAttributes(), OfAnotherModule(), of_no_module, named]
    walk = held({"it": it}, (Mark,))
    assert [*walk] == [("it[4].key", mark)]


def test_what_another_thread_changes_is_read() -> None:
    cache: dict[int, Any] = {}
    ended = threading.Event()

    def fill() -> None:
        for place in itertools.count():
            cache[place % 700] = [[place]]
            cache.pop((place * 7 + 3) % 700, None)
            if ended.is_set():
                return

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(20):
            walk = held({"it": cache}, (Mark,))
            assert [*walk] == []
    finally:
        ended.set()
        thread.join()
