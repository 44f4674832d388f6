"""The code that a run was started with, as git knows it: commit, changed files, and their differences to it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ignite_engine.errors import one_line
from ignite_engine.run_directory import RunDirectory, write_whole

logger = logging.getLogger(__name__)

DIFF_BYTES = 256 * 1024
"""A longer diff is cut off."""
TIMEOUT_S = 3.0
"""For all that git is asked; a repository that takes longer is not recorded."""
FILES = 100
"""Names of changed files that are recorded."""
_CODE = re.compile(r"\.(?:pyi?|pyx|cc?|cpp|hp?p?|cuh?|rs|go|js|ts|sh|toml|cfg|ini|ya?ml)$", re.I)
_SECRET_NAME = re.compile(
    r"secret|credential|passw|token[^/]*\.(?:ya?ml|toml|ini|cfg|sh)$|(?:^|/)\.|\.env(?:\.|$)|netrc|id_rsa", re.I
)
_SECRET_VALUE = re.compile(  # also one that begins on the next line of the diff
    r"""(?i)((?:secret|credential|passw\w*|(?:api|access|private|auth)[_-]?(?:key|token))\w*["']?[ \t]*+[:=][ \t]*+"""
    r"""(?:[(\[{|>\\]?[-+]?[ \t\r]*+\n[-+ ][ \t]*+)?)\S.*"""
)
_KEY = re.compile(
    r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|AKIA|AIza|xox[abp]-)[\w-]{12,}|(?<=://)[^\s/@:'\"]*:[^\s/@'\"]+(?=@)"
)
_PRIVATE_KEY = re.compile(  # its first line, and those after it of nothing but a key's letters
    r"""-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*"""
    r"""(?:\n[-+ ](?:[ \t"']*+[\w+/=\\]*+["', \t\r\\]*+|[ \t]*(?:Proc-Type|DEK-Info|Version):.*)(?=\n|\Z))*"""
)
_OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
"""What git tells those whom it starts, as a hook, of its repository."""
_LEFT_OUT = "[left out]"


def record_code(directory: RunDirectory) -> None:
    """Write ``code.json`` and ``code.diff`` into a run's folder; outside of a git repository, or without git, neither.

    The repository is that of the program, or else of the working directory. Of files that git does not track those that
    this process has imported are in the diff. Left out are files that are no code or named like a secret, what looks
    like the value of one, and the address of the repository. No hook and no external diff is run.
    """
    for path in (directory.code, directory.code_diff):
        path.unlink(missing_ok=True)
    until = time.monotonic() + TIMEOUT_S
    for folder in _folders():
        git = _Git(folder, until)
        try:
            values, diff = _read(git)
        except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit, or it took too long
            continue
        try:
            if diff:
                write_whole(directory.code_diff, diff)
            write_whole(directory.code, json.dumps(values, indent=1) + "\n")
        except OSError as error:  # a run is worth more than the record of its code
            logger.warning("The code that runs is not recorded in %s: %s.", directory.given, one_line(error))
        return


def _folders() -> list[Path]:
    """Where the program is, unless that is this package, and where it was started."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    ours = Path(__file__).resolve().parents[1]
    folders = [Path.cwd()]
    if program is not None and not (path := Path(program).resolve()).is_relative_to(ours) and path.suffix == ".py":
        folders.insert(0, path.parent)
    return folders


class _Git:
    """Asks git about the repository of a folder, within one limit of time."""

    def __init__(self, folder: Path, until: float) -> None:
        self.folder, self._until = folder, until

    def __call__(self, *arguments: str, limit: int = 1 << 20) -> str:
        """What it prints, at most ``limit`` bytes.

        Raises:
            OSError, subprocess.SubprocessError: there is no git or no repository, or it takes too long.
        """
        safe = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false")
        command = ["git", "--no-optional-locks", "--literal-pathspecs", *safe, "-C", str(self.folder), *arguments]
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
        environment = {**inherited, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat"}
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=max(self._until - time.monotonic(), 0.01),
            check=True,
        )
        return done.stdout[:limit].decode(errors="replace")


def _read(git: _Git) -> tuple[dict[str, Any], str]:
    """The content of both files."""
    top = git("rev-parse", "--show-toplevel").strip()
    commit = git("rev-parse", "HEAD").strip()
    branch = git("rev-parse", "--abbrev-ref", "HEAD").strip()
    git.folder = Path(top)
    changed = _shown(git("diff", "--name-only", "--no-renames", "-z", "HEAD"))
    untracked = _imported(git.folder, _shown(git("ls-files", "--others", "--exclude-standard", "-z")))
    parts = []
    if changed:
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/")
        parts.append(git("diff", *options, "HEAD", "--", *changed[:FILES], limit=DIFF_BYTES + 1))
    parts += [_as_new(git.folder, name) for name in untracked]
    diff, is_cut = "".join(parts), False
    if len(data := diff.encode()) > DIFF_BYTES:
        diff, is_cut = data[: data.rfind(b"\n", 0, DIFF_BYTES) + 1].decode(), True
    values = {
        "commit": commit,
        "branch": None if branch == "HEAD" else branch,
        "changed": changed[:FILES],
        "untracked": untracked[:FILES],
        "diff_is_cut": is_cut or len(changed) > FILES,
    }
    return values, _without_secrets(diff)


def _shown(names: str) -> list[str]:
    """Those of names that end with NUL that are code and not named like a secret."""
    return [name for name in names.split("\0") if _CODE.search(name) and not _SECRET_NAME.search(name)]


def _imported(top: Path, names: Sequence[str]) -> list[str]:
    """Those that are modules of this process, which may have found them through a link."""
    files = (str(getattr(module, "__file__", None)) for module in list(sys.modules.values()))
    last = {os.path.basename(name) for name in names}
    real = {os.path.realpath(file) for file in files if os.path.basename(file) in last}
    return [name for name in names if str(top / name) in real]


def _as_new(top: Path, name: str) -> str:
    """A file as a diff that adds it; empty if it cannot be read or is longer than a diff may be."""
    path = top / name
    try:
        if path.is_symlink() or path.stat().st_size > DIFF_BYTES:
            return ""
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""
    if not text:
        return ""
    lines = text.removesuffix("\n").split("\n")
    end = "" if text.endswith("\n") else "\\ No newline at end of file\n"
    head = (
        f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return head + "".join(f"+{line}\n" for line in lines) + end


def _without_secrets(diff: str) -> str:
    diff = _PRIVATE_KEY.sub(_without_key, diff)
    return _KEY.sub(_LEFT_OUT, _SECRET_VALUE.sub(rf"\g<1>{_LEFT_OUT}", diff))


def _without_key(found: re.Match[str]) -> str:
    """As many lines, with their marks, so that the diff still is one."""
    return "\n".join([_LEFT_OUT, *(line[0] + _LEFT_OUT for line in found[0].split("\n")[1:])])
