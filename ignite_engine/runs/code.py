"""The commit of the user's code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_TIMEOUT_S = 3.0


def commit_of_code() -> dict[str, Any]:
    """``commit``, and whether tracked files differ from it (``dirty``); empty without git or a repository.

    The repository is that of the program, or of the working directory if the program is part of a library.
    """
    program = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    is_script = program.suffix == ".py" and "site-packages" not in program.parts and program.name != "__main__.py"
    folder = program.resolve().parent if is_script else Path.cwd()

    command = [*_GIT, "-C", str(folder), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid "))
    if commit == "(initial)":  # there is none yet
        return {}
    return {"commit": commit, "dirty": not all(line.startswith("#") for line in lines)}
