"""The code of a run is recorded as git knows it, without secrets, and bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.run_directory import RunDirectory
from ignite_engine.runs import code_record
from ignite_engine.runs.code_record import record_code

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *IDENTITY, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one commit of ``task.py`` and some other files; the working directory is one of its folders."""
    folder = tmp_path / "repository"
    (folder / "deep").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "remote", "add", "origin", "https://user:hunter2@example.org/x.git")
    for name in ("task.py", "secrets.py", ".env", "notes.txt", "deep/config.yaml"):
        (folder / name).write_text("first = 1\n")
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder / "deep")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    return folder


def recorded(run: Path) -> tuple[dict[str, Any], str]:
    directory = RunDirectory(run)
    run.mkdir(exist_ok=True)
    record_code(directory)
    diff = directory.code_diff.read_text() if directory.code_diff.exists() else ""
    return directory.read_code(), diff


def test_commit_and_differences_give_the_code_back(repository: Path, tmp_path: Path) -> None:
    unchanged, diff = recorded(tmp_path / "run")
    assert unchanged == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "branch": "trunk",
        "changed": [],
        "untracked": [],
        "diff_is_cut": False,
    }
    assert diff == ""

    (repository / "task.py").write_text("first = 1\nsecond = 2\n")
    (repository / "deep" / "config.yaml").unlink()
    values, diff = recorded(tmp_path / "run")
    assert values["changed"] == ["deep/config.yaml", "task.py"]

    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(repository), str(other))
    git(other, "apply", str(tmp_path / "run" / "code.diff"))
    assert (other / "task.py").read_text() == "first = 1\nsecond = 2\n" and not (
        other / "deep" / "config.yaml"
    ).exists()


def test_module_that_git_does_not_know_is_in_the_diff(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "fresh_module.py").write_text("value = 3\nlast = 4")
    (repository / "never_imported.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(repository)
    __import__("fresh_module")
    monkeypatch.delitem(sys.modules, "fresh_module", raising=False)
    monkeypatch.setitem(sys.modules, "fresh_module", __import__("fresh_module"))
    values, diff = recorded(tmp_path / "run")

    assert values["untracked"] == ["fresh_module.py"] and "never_imported" not in diff
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(repository), str(other))
    git(other, "apply", str(tmp_path / "run" / "code.diff"))
    assert (other / "fresh_module.py").read_text() == "value = 3\nlast = 4"


def test_module_found_through_a_link_is_in_the_diff(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "linked_module.py").write_text("value = 3\n")
    (tmp_path / "link").symlink_to(repository)
    monkeypatch.syspath_prepend(tmp_path / "link")
    monkeypatch.setitem(sys.modules, "linked_module", __import__("linked_module"))
    assert recorded(tmp_path / "run")[0]["untracked"] == ["linked_module.py"]


def test_repository_of_a_git_that_started_the_run_is_not_taken_for_that_of_the_code(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q", "other")
    git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "another")
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    values, diff = recorded(tmp_path / "run")
    assert (values["commit"], values["changed"], diff) == (commit, [], "")


def test_no_secret_and_no_address_is_written(repository: Path, tmp_path: Path) -> None:
    for name in ("secrets.py", ".env", "notes.txt"):
        (repository / name).write_text("password = 'hunter2'\n")
    (repository / "task.py").write_text(
        "first = 1\napi_key = 'hunter2'\nDB_PASSWORD: hunter2\nkey='hf_hunter2hunter2hunter2'\nmax_tokens = 512\n"
    )
    values, diff = recorded(tmp_path / "run")

    assert values["changed"] == ["task.py"] and "max_tokens = 512" in diff and diff.count("[left out]") == 3
    assert not any(b"hunter2" in path.read_bytes() for path in (tmp_path / "run").iterdir())


def test_secrets_of_several_lines_are_left_out_and_the_diff_stays_one(repository: Path, tmp_path: Path) -> None:
    letters = "".join(f"    {line}\n" for line in ("hunter2hunter2+/hunter2", "", "hunter2=="))
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{letters}    -----END RSA PRIVATE KEY-----\n"
    (repository / "deep" / "config.yaml").write_text(f"first = 1\nprivate_key: |\n    {key}lr: 0.1\n")
    (repository / "task.py").write_text(
        f'first = 1\napi_key = (\n    \'hunter2\'\n)\nif not secret:\n    stop()\nkey = """{key}"""\n'
        "url = 'sql://me:hunter2@host/x'\nlast = 2\n"
    )
    _, diff = recorded(tmp_path / "run")

    assert "hunter2" not in diff and "sql://[left out]@host/x" in diff
    assert "+lr: 0.1\n" in diff and "+last = 2\n" in diff
    git(repository, "stash")
    git(repository, "apply", "--check", str(tmp_path / "run" / "code.diff"))


def test_what_is_written_is_bounded(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_record, "DIFF_BYTES", 5000)
    (repository / "task.py").write_text("".join(f"line = {number}\n" for number in range(100_000)))
    values, diff = recorded(tmp_path / "run")

    assert values["diff_is_cut"] and 4000 < len(diff) <= 5000 and diff.endswith("\n")

    (repository / "task.py").write_text("".join(f"line = 'ééé' + {number}\n" for number in range(300)))
    values, diff = recorded(tmp_path / "run")
    assert values["diff_is_cut"] and 4000 < len(diff.encode()) <= 5000 and diff.endswith("\n")


def test_without_a_repository_or_git_nothing_is_written(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "task.py").write_text("second = 2\n")
    assert recorded(tmp_path / "run")[0] and (tmp_path / "run" / "code.diff").exists()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert recorded(tmp_path / "run") == ({}, "")
    monkeypatch.chdir(tmp_path)
    assert recorded(tmp_path / "run") == ({}, "") and os.listdir(tmp_path / "run") == []


def test_git_that_takes_too_long_is_given_up(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(code_record, "TIMEOUT_S", 0.2)
    assert recorded(tmp_path / "run") == ({}, "")


def test_no_hook_and_no_external_diff_is_run(repository: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {witness}\n")
    script.chmod(0o755)
    for key in ("diff.external", "core.fsmonitor", "diff.py.textconv", "core.pager"):
        git(repository, "config", key, str(script))
    (repository / ".gitattributes").write_text("*.py diff=py\n")
    (repository / "task.py").write_text("second = 2\n")
    _, diff = recorded(tmp_path / "run")

    assert "+second = 2" in diff and not witness.exists()


def test_each_start_is_noted_with_its_commit(repository: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    recorded(directory.path)
    directory.note("started", 0)
    (repository / "task.py").write_text("second = 2\n")
    recorded(directory.path)
    directory.note("resumed", 5)
    commit = git(repository, "rev-parse", "HEAD")

    assert [entry["commit"] for entry in directory.read_history()] == [commit, f"{commit}+"]
    assert json.loads(directory.code.read_text())["commit"] == commit
