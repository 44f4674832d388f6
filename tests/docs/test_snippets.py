"""README.md and docs/ are true: snippets run, configs load, links have targets, keys and commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from docs.tools import settings
from ignite_engine.runs.config import config_from_dict, load_config
from ignite_engine.runs.config.tables import HANDLERS
from tests.kit import runs
from tests.kit.refusals import command

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
LEAST_CONFIG = {"task": "task.py:build", "run": {"max_epochs": 1}}


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its first line, its language, its text, and the file that it is to be."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None

    @property
    def starts_processes(self):
        return 'if __name__ == "__main__":' in self.text

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page):
    """All fenced blocks of a page; an unclosed one is an error."""
    blocks = []
    language, start, lines = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"\s*```(.*)", line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, start, lines = fence[1].strip(), number + 1, []
        else:
            name, _, title = language.partition(" title=")
            text = textwrap.dedent("\n".join(lines)) + "\n"
            blocks.append(Block(page, start, name, text, title.strip('"') or None))
            language = None
    assert language is None, f"{page}:{start - 1}: this block is never closed."
    return blocks


def blocks(language):
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def cells(page):
    """``(setup, heading, code)`` of each section of a page with a table whose last column, ``here``, is code."""
    setup, *sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for section in sections:
        if "| here |" in section:
            found = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
            rows = re.findall(r"^\|.*\| (`.*`) \|$", section, flags=re.MULTILINE)
            lines = [line.strip("`") for row in rows for line in row.split("<br>")]
            yield (
                re.search(r"```python\n(.*?)```", setup, flags=re.DOTALL)[1],
                section.splitlines()[0],
                "\n".join([*found, *lines]),
            )


def prose_of(page):
    """A page without its fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


PYTHON = blocks("python")
RUN_HERE = sorted({block.page for block in PYTHON if not block.starts_processes})
SCRIPTS = [block for block in PYTHON if block.starts_processes]


LONG = ("time_travel.md", "performance.md", "recipes.md", "getting_started.md")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.nightly] * (page.name in LONG)) for page in RUN_HERE],
    ids=lambda page: page.name,
)
def test_python_blocks_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # blocks that are files import each other
    torch.manual_seed(0)
    namespace = {"__name__": "snippet"}
    for block in blocks_of(page):
        if block.language == "python" and not block.starts_processes:
            # line numbers of a traceback are those of the page
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            if block.file:
                Path(block.file).write_text(block.text)
                monkeypatch.delitem(sys.modules, Path(block.file).stem, raising=False)
            exec(code, {"__name__": "__main__"} if block.file else namespace)


MIGRATING = [pytest.param(*cell, id=cell[1]) for cell in cells(DOCS / "migrating.md")]


@pytest.mark.nightly
@pytest.mark.parametrize("setup, heading, code", MIGRATING)
def test_the_right_hand_cells_of_a_table_run_from_top_to_bottom(setup, heading, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippet"}
    exec(setup, namespace)
    exec(code, namespace)
    assert "state" in namespace or heading.startswith("A loop"), "a run was made"


@pytest.mark.row("I1")
@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_scripts_that_start_processes_run_and_resume(block, tmp_path):
    assert 'backend="gloo"' in block.text and "nproc_per_node=2" in block.text
    (tmp_path / "script.py").write_text(block.text)
    saved = []
    saves = "Checkpoint(" in block.text
    for _ in range(1 + saves):
        run = runs.script(tmp_path, "script.py")
        assert run.wait() == 0, run.said()
        saved.append({path: path.read_bytes() for path in tmp_path.rglob("manifest.json")})
    # the second run finds nothing left to do, and saves nothing
    assert bool(saved[0]) == saves and saved[0] == saved[-1]


@pytest.mark.nightly  # each rank imports torch
@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_scripts_that_start_processes_spawn_them(block, tmp_path):
    """As a user starts them: what their ranks are given must be found again by its name."""
    (tmp_path / "script.py").write_text(block.text)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_blocks_are_valid_configs_or_sections_of_one(block, tmp_path):
    values = yaml.safe_load(block.text)
    whole = values if "task" in values else {**LEAST_CONFIG, **values}
    path = tmp_path / "config.yaml"
    path.write_text(block.text if "task" in values else yaml.safe_dump(whole))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(path)
    assert set(values) <= set(config.to_dict())


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_a_file(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_commands_that_are_shown_exist():
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = set(re.findall(r"^    ([a-z-]+)\b", command("--help"), flags=re.MULTILINE))
    shown = [(page, *found) for page in ALL_PAGES for found in _commands(page.read_text())]
    assert {"train", "test"} <= {name for _, program, name in shown if program == "make"}
    for page, program, name in shown:
        assert name in (targets if program == "make" else commands), f"{page.name}: {program} {name}"


def _commands(text):
    for match in re.finditer(r"(?:^|`)(make|python -m ignite_engine|ignite-engine) ([a-z-]+)", text, re.MULTILINE):
        yield match[1], match[2]


def test_the_configuration_page_has_the_tables_that_its_sections_give():
    text = settings.PAGE.read_text(encoding="utf-8")
    assert text == settings.with_tables(text), "run: python docs/tools/settings.py"
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| [^|]* \| (.+) \|$", text, flags=re.MULTILINE))
    config = config_from_dict(LEAST_CONFIG).to_dict()
    assert rows.keys() | settings.SECTIONS.keys() == config.keys()
    for key in ("task_options", "load", "optimizer", "optimizers", "schedule"):
        assert yaml.safe_load(rows[key].strip("`")) == config[key], key


def test_the_configuration_page_names_every_handler_that_a_config_may_have():
    text = (DOCS / "configuration.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]\w+)` \|", text, flags=re.MULTILINE)) == set(HANDLERS)


def test_tests_that_pages_name_exist():
    named = {found for page in PAGES for found in re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", page.read_text())}
    assert named
    missing = [
        pair
        for pair in sorted(named)
        if not re.search(rf"^ *(def {pair[1]}\(|{pair[1]} = )", (ROOT / pair[0]).read_text(), re.M)
    ]
    assert not missing
