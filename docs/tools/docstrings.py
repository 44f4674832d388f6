"""Reads this project's docstrings for the site: an extension of griffe.

They are in Google's style with Sphinx's roles, and an entry of ``Args:`` may name several: ``minutes, seconds: ...``.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(~?)([\w.]+)`")
_ENTRY = re.compile(r"^(    )(\w+(?:, \w+)+)(: )", re.MULTILINE)
_ARGS = re.compile(r"(?<=^Args:\n)(?:[ \t]+.*\n?|\n(?=[ \t]))+", re.MULTILINE)


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ARGS.sub(lambda match: _ENTRY.sub(_one_by_one, match[0]), obj.docstring.value)
            obj.docstring.value = _ROLE.sub(_reference, text)


def _one_by_one(entry: re.Match[str]) -> str:
    """``a, b: text`` as an entry for ``a`` that refers to ``b``, and the text at ``b``."""
    *others, last = entry[2].split(", ")
    return "".join(f"{entry[1]}{name}: see ``{last}``.\n" for name in others) + f"{entry[1]}{last}{entry[3]}"


def _reference(role: re.Match[str]) -> str:
    """A link where the site has the object, its name as code elsewhere."""
    name = role[2].rpartition(".")[2] if role[1] else role[2]
    return f'<autoref identifier="{role[2]}" optional><code>{name}</code></autoref>'
