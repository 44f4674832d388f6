"""Tables of text; HTML where IPython runs already: the stand-in has what IPython documents of ``display``."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ignite_engine.text import Html, in_columns, in_notebook, show_page


def test_columns_are_as_wide_as_their_widest_cell_without_trailing_spaces() -> None:
    assert in_columns([("a", "long name", "1"), ("wide", "b", "")]) == ["a     long name  1", "wide  b"]
    assert in_columns([]) == []


def notebook(monkeypatch: pytest.MonkeyPatch, *, kernel: bool = True) -> list[list[str]]:
    """This process is a notebook's kernel, or IPython in a terminal; gets every version of each piece shown."""
    shown: list[list[str]] = []

    class Handle:
        def __init__(self, html: str) -> None:
            self.versions = [html]
            shown.append(self.versions)

        def update(self, html: str) -> None:
            self.versions.append(html)

    package: Any = ModuleType("IPython")
    shell = SimpleNamespace(kernel=object()) if kernel else SimpleNamespace()
    package.get_ipython = lambda: shell
    package.display = ModuleType("IPython.display")
    package.display.HTML = str
    package.display.display = lambda html, display_id: Handle(html)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", package.display)
    return shown


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook() and "IPython" not in sys.modules
    notebook(monkeypatch, kernel=False)
    assert not in_notebook()
    notebook(monkeypatch)
    assert in_notebook()


def test_html_is_replaced_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, first, second = notebook(monkeypatch), Html(), Html()
    first.show("a")
    second.show("b")
    first.show("c")

    assert shown == [["a", "c"], ["b"]]


def test_page_is_in_a_frame_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = notebook(monkeypatch)
    show_page('<p class="a">&amp;</p>', height=300)

    assert shown == [
        [
            '<div><iframe srcdoc="&lt;p class=&quot;a&quot;&gt;&amp;amp;&lt;/p&gt;" '
            'style="width:100%;height:300px;border:0"></iframe></div>'
        ]
    ]
