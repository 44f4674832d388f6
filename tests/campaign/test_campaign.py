"""The campaign itself: no case is lost, whatever it raises and whenever the campaign is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import long_tests
from tests.campaign.__main__ import Campaign
from tests.campaign.report import commit, write_report
from tests.campaign.runs import Bench, Item


def passes(bench: Bench) -> dict[str, Any]:
    (bench.folder / "file.txt").write_text("of a case that passes")
    return {}


def has_a_mistake(bench: Bench) -> dict[str, Any]:
    (bench.folder / "file.txt").write_text("of a case that raises")
    return {"found": {}["what is not there"]}


def returns_no_json(bench: Bench) -> dict[str, Any]:
    return {"found": object()}


def is_killed(bench: Bench) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


def items(**runs: Any) -> list[Item]:
    return [Item("matrix", key, run) for key, run in runs.items()]


def campaign(folder: Path, cases: list[Item], *, keep: Path | None = None) -> Campaign:
    return Campaign(folder / "runs", folder / "results.jsonl", cases, keep=keep, modules=())


def keys_in(folder: Path) -> list[str]:
    return [json.loads(line)["key"] for line in (folder / "results.jsonl").read_text().splitlines()]


def test_case_that_raises_any_error_fails_and_the_others_are_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = items(a=passes, b=has_a_mistake, c=passes, d=passes)
    run = campaign(tmp_path, cases)

    assert run.run(1) == 1

    rows = {row["key"]: row for row in run.of_this_commit()}
    assert {key: row["passed"] for key, row in rows.items()} == {"a": True, "b": False, "c": True, "d": True}
    assert rows["b"]["said"] == "KeyError: 'what is not there'"
    assert "4 cases, 1 failed, 0 without a result" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_worker_that_ends_leaves_cases_without_a_result_which_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = campaign(tmp_path, items(a=passes, b=returns_no_json, c=passes))

    assert run.run(1) == 1

    assert keys_in(tmp_path) == ["a"]
    printed = capsys.readouterr().out
    assert "3 cases, 0 failed, 2 without a result" in printed and "no result: matrix: b" in printed


def test_a_failure_is_on_the_page_though_the_case_has_passed_since(tmp_path: Path) -> None:
    assert campaign(tmp_path, items(a=passes, b=has_a_mistake)).run(1) == 1
    run = campaign(tmp_path, items(a=passes, b=passes))
    assert run.failed_before() == [] and run.run(1) == 0

    write_report(tmp_path / "page.md", [], {}, run.failed_before())
    title, _, line = (tmp_path / "page.md").read_text().splitlines()[-3:]
    assert title == "## What failed, and passed when it was run again"
    assert line == "- `matrix: b`: KeyError: 'what is not there'"


def test_all_passed_is_code_0_and_nothing_is_run_again(tmp_path: Path) -> None:
    cases = items(a=passes, b=passes)

    assert campaign(tmp_path, cases).run(2) == 0
    assert campaign(tmp_path, cases).run(2) == 0

    assert sorted(keys_in(tmp_path)) == ["a", "b"]


def test_campaign_killed_in_the_middle_continues(tmp_path: Path) -> None:
    killed = campaign(tmp_path, items(a=passes, b=is_killed, c=passes))
    process = multiprocessing.get_context("fork").Process(target=killed.run, args=(1,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and keys_in(tmp_path) == ["a"]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"commit": "')  # the row that it was writing
        file.write("\n")

    assert campaign(tmp_path, items(a=passes, b=passes, c=passes)).run(1) == 0

    rows = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["key"] for row in rows if row.endswith("}")] == ["a", "b", "c"]


def test_named_case_is_run_alone_and_again(tmp_path: Path) -> None:
    cases = items(one=passes, two=passes, three=has_a_mistake)
    assert campaign(tmp_path, cases).run(1, cases=["matrix: one", "two"]) == 0

    assert campaign(tmp_path, cases).run(1, cases=["one"]) == 0

    assert keys_in(tmp_path) == ["one", "two", "one"]


def test_no_chosen_case_is_a_failure(tmp_path: Path) -> None:
    assert campaign(tmp_path, items(one=passes)).run(1, cases=["another"]) == 1


def test_files_of_a_failed_case_are_kept(tmp_path: Path) -> None:
    campaign(tmp_path, items(a=passes, b=has_a_mistake, c=passes), keep=tmp_path / "kept").run(1)

    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["matrix_b"]
    assert (tmp_path / "kept" / "matrix_b" / "file.txt").read_text() == "of a case that raises"


def test_results_of_another_change_of_the_code_do_not_count(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    source = tmp_path / "ignite_engine" / "module.py"
    source.parent.mkdir()
    source.write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    keys = [commit(tmp_path)]
    for text in ("a = 2\n", "a = 3\n"):
        source.write_text(text)
        keys.append(commit(tmp_path))
    for text in ("b = 2\n", "b = 3\n"):
        source.with_name("added.py").write_text(text)
        keys.append(commit(tmp_path))

    assert len(set(keys)) == 5 and all(key.startswith(keys[0] + "+") for key in keys[1:])
    source.write_text("a = 2\n")
    source.with_name("added.py").unlink()
    assert commit(tmp_path) == keys[1]


def test_a_file_of_long_tests_passes_if_each_of_them_does_and_one_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    long:\n    cuda:\n    accelerator:\n")
    (tmp_path / "tests").mkdir()
    for name, mark, text in (
        ("right", "long", "def test_it(): pass\ndef test_else(): pass"),
        ("wrong", "long", "def test_it(): assert 1 == 2"),
        ("skipped", "long", "def test_it(): pytest.skip('why')"),
        ("of_another_kind", "slow", "def test_it(): pass"),
    ):
        lines = ["import pytest", f"pytestmark = pytest.mark.{mark}", text]
        (tmp_path / "tests" / f"test_{name}.py").write_text("\n".join(lines))
    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    found = long_tests.items()

    assert [item.key for item in found] == ["tests/test_right.py", "tests/test_skipped.py", "tests/test_wrong.py"]

    run = campaign(tmp_path, found)
    assert run.run(1) == 1
    rows = {Path(row["key"]).stem: row for row in run.of_this_commit()}
    assert (rows["test_right"]["passed"], rows["test_right"]["facts"]) == (True, {"tests": 2})
    assert rows["test_wrong"]["said"].endswith("FAILED tests/test_wrong.py::test_it - assert 1 == 2")
    assert rows["test_skipped"]["said"].startswith("Difference: code 0: 1 skipped")
