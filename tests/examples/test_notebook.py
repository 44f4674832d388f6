"""The cells of the notebook run one after the other, and it is kept without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """The value of the cell's last expression, which a notebook would show."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), namespace)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), namespace)
    return None


def test_run_continues_and_its_best_weights_have_its_best_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = [run_cell("".join(cell["source"]), namespace) for cell in cells]

    start, epoch, _ = shown[-2]
    assert (start.value, epoch) == ("resumed", 8)
    rows = [json.loads(line) for line in (tmp_path / "runs/notebook/metrics.jsonl").read_text().splitlines()]
    values = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    assert len(values) == 8 and shown[-1] == pytest.approx(max(values)) and shown[-1] > 0.8
    assert (tmp_path / "runs/notebook/report.html").exists()
