"""The site: it builds without a warning, needs nothing from elsewhere, and shows all that is public."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ignite_engine
from ignite_engine import handlers

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow  # `make docs` builds it too


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loaded = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+"
    assert len(pages) > 50
    assert [found for page in pages for found in re.findall(loaded, page.read_text(encoding="utf-8"))] == []
    assert not re.search(r"url\([\"']?(https?:)?//", "".join(path.read_text() for path in site.rglob("*.css")))


def test_the_reference_has_all_that_is_public(site: Path) -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    anchors = set(re.findall(r' id="([\w.]+)"', reference))
    public = {f"ignite_engine.{name}" for name in ignite_engine.__all__}
    public |= {f"ignite_engine.handlers.{name}" for name in handlers.__all__}
    assert public - anchors == set()
    assert re.findall(r":(?:class|meth|func):", reference) == []


def test_lists_and_tables_are_read_as_on_a_code_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        prose = re.sub(r"<pre.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r"^(?:<p>)?(?:[-*] |\|).*", prose, re.MULTILINE) == [], page


def test_files_of_the_repository_that_pages_link_to_are_on_the_site(site: Path) -> None:
    assert 'href="benchmarks/index.html"' in (site / "index.html").read_text(encoding="utf-8")  # README.md
    assert 'href="decisions/index.html"' in (site / "index.html").read_text(encoding="utf-8")  # a folder
    assert 'href="examples/gan.py.html"' in (site / "python_api.html").read_text(encoding="utf-8")
    assert "class GAN" in re.sub(r"<[^>]+>", "", (site / "examples/gan.py.html").read_text(encoding="utf-8"))
    assert 'href="../decisions/0008-' in (site / "benchmarks/index.html").read_text(encoding="utf-8")


def test_what_is_broken_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "repository"
    shutil.copytree(ROOT / "docs", source / "docs")
    shutil.copy(ROOT / "mkdocs.yml", source)
    for name in set(os.listdir(ROOT)) - {"docs", "mkdocs.yml", "site", ".git", ".venv"}:
        (source / name).symlink_to(ROOT / name)
    page = source / "docs" / "windows.md"
    page.write_text(page.read_text() + "\n[no file](../nowhere.py), [no heading](handlers.md#nowhere)\n")
    (source / "docs" / "stray.md").write_text("# Not in the navigation\n")

    done = build(source, tmp_path / "site")

    assert done.returncode != 0
    for named in ("'../nowhere.py'", "'handlers.md#nowhere'", "stray.md"):
        assert named in done.stderr + done.stdout
