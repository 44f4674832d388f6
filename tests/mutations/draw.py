"""Small changes of a module's code, found in its syntax tree and drawn at random."""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_OTHER_FUNCTION = {"max": "min", "min": "max", "any": "all", "all": "any"}
_SAYING = ("logger.", "warnings.", "print", "_say", "console.")
"""Calls that tell people something: what they say is no promise."""
_LARGEST = 8
"""Larger numbers are sizes and times, of which one more changes nothing."""


@dataclass(frozen=True)
class Mutation:
    """One change: the text from ``start`` to ``end`` of a file becomes ``text``.

    Args:
        within: the line of code on which it begins.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    text: str
    within: str

    @property
    def key(self) -> str:
        """The same wherever in the file its line is."""
        return (
            f"{self.path} {self.kind}: {_one_line(self.before)} -> {_one_line(self.text)} in {_one_line(self.within)}"
        )

    def applied(self, source: str) -> str:
        assert source[self.start : self.end] == self.before
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        return self.key.replace(f"{self.path} ", f"{self.path}:{self.line} ", 1)


def mutations_of(path: str, source: str) -> list[Mutation]:
    """Every change of one kind at one place in the functions of a module."""
    found = _Finder(path, source)
    found.visit(ast.parse(source))
    return found.mutations


def drawn(paths: Sequence[Path], root: Path, seed: str) -> Iterator[Mutation]:
    """All mutations of some modules in an order of chance, in which each kind comes as often as any other."""
    generator = random.Random(seed)
    by_kind: dict[str, list[Mutation]] = {}
    for path in sorted(paths):
        for mutation in mutations_of(str(path.relative_to(root)), path.read_text(encoding="utf-8")):
            by_kind.setdefault(mutation.kind, []).append(mutation)
    while by_kind:
        kind = generator.choice(sorted(by_kind))
        left = by_kind[kind]
        yield left.pop(generator.randrange(len(left)))
        if not left:
            del by_kind[kind]


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.mutations: list[Mutation] = []
        self._lines = source.splitlines(keepends=True)
        self._starts = [*itertools.accumulate(map(len, self._lines), initial=0)]
        self._within_function = self._within_constructor = False

    # -- what is passed over --------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._within_function, self._within_constructor
        self._within_function, self._within_constructor = True, node.name == "__init__"
        if node.name not in ("__repr__", "__str__"):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
            for statement in node.body:
                self.visit(statement)
        self._within_function, self._within_constructor = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if self._within_function:
            self._delete(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Our own invariants."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    # -- what is changed ------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith(_SAYING):
            return
        if not isinstance(node.value, ast.Yield | ast.YieldFrom | ast.Await):
            self._delete(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        is_attribute = all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
        if is_attribute and not self._within_constructor:  # else it is missing wherever it is read
            self._delete(node)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._delete(node)
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._delete(node)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            operators = [*node.ops]
            operators[place] = _OPPOSITE[type(operator)]()
            self._replace(node, "comparison", ast.Compare(node.left, operators, node.comparators))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, "not", node.operand)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace(node, "and, or", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Of numbers: another operator of texts, lists, paths or dicts is an error wherever the line runs."""
        other = _OTHER_OPERATOR.get(type(node.op))
        if other is not None and self._within_function and not any(map(_is_no_number, (node.left, node.right))):
            self._replace(node, "operator", ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not any(map(_is_text, (node.body, node.orelse))):
            self._replace(node, "branches", ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not self._within_function:
            return
        if isinstance(node.value, bool):
            self._replace(node, "constant", ast.Constant(not node.value))
        elif isinstance(node.value, int) and abs(node.value) <= _LARGEST:
            self._replace(node, "constant", ast.Constant(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _OTHER_FUNCTION:
            self._replace(node.func, "function", ast.Name(_OTHER_FUNCTION[node.func.id]))
        first, second = (*node.args, None, None)[:2]
        # of things as unlike as a list and a function it is an error wherever the line runs
        alike = (
            first is not None
            and type(first) is type(second)
            and isinstance(first, ast.Name | ast.Attribute | ast.Constant)
        )
        if alike and self._within_function and ast.unparse(first) != ast.unparse(second):
            self._replace(node, "arguments", ast.Call(node.func, [second, first, *node.args[2:]], node.keywords))
        self.generic_visit(node)

    # -- the text -------------------------------------------------------------------------------------------------

    def _delete(self, node: ast.stmt) -> None:
        self._add(node, "deleted", "pass")

    def _replace(self, node: ast.expr, kind: str, other: ast.expr) -> None:
        text = ast.unparse(other)
        self._add(node, kind, text if isinstance(node, ast.Name | ast.Constant) else f"({text})")

    def _add(self, node: ast.stmt | ast.expr, kind: str, text: str) -> None:
        start, end = self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)
        within = self._lines[node.lineno - 1].strip()
        self.mutations.append(Mutation(self.path, node.lineno, kind, start, end, self.source[start:end], text, within))

    def _place(self, line: int | None, column: int | None) -> int:
        """In characters; the tree has bytes of a line."""
        assert line is not None and column is not None
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_no_number(node: ast.expr) -> bool:
    is_set = isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "dict", "list", "Path")
    return is_set or _is_text(node) or isinstance(node, ast.List | ast.Tuple | ast.ListComp | ast.Dict)


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= 90 else joined[:87] + "..."
