"""``make floors``: the tests of a copy of the project without ``ignite_engine/ext`` and ``tests/ext`` pass."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UPPER_FLOOR = (":!ignite_engine/ext", ":!tests/ext")


def main():
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "core"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *UPPER_FLOOR]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and os.path.lexists(ROOT / name):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        venv.create(copy / ".venv", symlinks=True)
        # the installed packages, but for this project itself: a file of paths is not read for further such files
        packages = copy / ".venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        (packages / "core.pth").write_text(f"{copy}\n{sysconfig.get_path('purelib')}\n")
        (copy / ".venv" / ".installed").touch()
        environment = {**os.environ, "PYTEST_ARGS": " ".join(sys.argv[1:])}
        return subprocess.run(["make", "test"], cwd=copy, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
