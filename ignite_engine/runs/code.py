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

    def git(*arguments: str) -> str:
        command = [*_GIT, "-C", str(folder), *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}
