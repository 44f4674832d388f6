"""A test that is skipped silently proves nothing: .ci/run fails unless tests/allowed_skips.txt lists its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
import pytest

@pytest.mark.parametrize("size", [1])
def test_needs_a_printer(size): pytest.skip("no printer here")

@pytest.mark.xfail
def test_known_to_fail(): assert False

@pytest.mark.skip(reason="too slow")
def test_is_marked(): ...

def test_passes(): ...
"""


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of TESTS skipped."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_sample.py").write_text(TESTS)
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", "/dev/null"]
    subprocess.run([*pytest_run, "--skipped-to=skipped", "."], cwd=folder, capture_output=True, timeout=120)
    return folder / "skipped"


def judged(skipped: Path, folder: Path, allowed: str) -> subprocess.CompletedProcess[str]:
    """What .ci/run reports about TESTS with this list of allowed skips."""
    (folder / "allowed.txt").write_text(allowed)
    script = [sys.executable, ROOT / ".ci" / "skipped.py", skipped, "allowed.txt"]
    return subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_skip_on_the_list_passes_and_is_printed(skipped: Path, tmp_path: Path) -> None:
    allowed = "# why\ntest_sample.py::test_needs_a_printer[1] | no printer*\n*::test_is_marked | too slow\n"

    done = judged(skipped, tmp_path, allowed)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Skipped tests: 2" in done.stdout
    assert "test_sample.py::test_needs_a_printer[1]: no printer here" in done.stdout


@pytest.mark.parametrize("allowed", ["*_printer* | *\n", "*_printer* | *\n*::test_is_marked | another reason\n"])
def test_skip_that_is_not_listed_or_for_another_reason_fails(skipped: Path, tmp_path: Path, allowed: str) -> None:
    done = judged(skipped, tmp_path, allowed)

    assert done.returncode == 1
    assert "NOT ALLOWED test_sample.py::test_is_marked: too slow" in done.stdout


def test_unfinished_test_run_fails(tmp_path: Path) -> None:
    (tmp_path / "skipped").write_text("")
    (tmp_path / "allowed.txt").write_text("")
    script = [sys.executable, ROOT / ".ci" / "skipped.py", "skipped", "allowed.txt"]

    assert subprocess.run(script, cwd=tmp_path, capture_output=True, timeout=60).returncode == 1
