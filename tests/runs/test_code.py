"""The commit of the code that runs, and whether files differ from it."""

import subprocess
import sys

from ignite_engine.runs.code import commit_of_code


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_is_known_and_changed_files_make_it_dirty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    assert commit_of_code() == {}
    git(tmp_path, "init", "-q")
    (tmp_path / "task.py").write_text("first = 1\n")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")

    assert commit_of_code() == {"commit": commit, "dirty": False}
    (tmp_path / "task.py").write_text("second = 2\n")
    assert commit_of_code() == {"commit": commit, "dirty": True}
