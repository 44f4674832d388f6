"""Commands and programs in a forked process, and their ranks too: none of them imports torch anew."""

import os
import resource
import runpy
import sys
import tempfile
from pathlib import Path

from ignite_engine import cli
from ignite_engine.cli import verify_resume
from ignite_engine.ranks import launch
from tests.faults.fork_server import shared


def main(arguments):
    """The command; ranks that it starts are forked instead of spawned."""
    launch._start_method = lambda: "fork"
    return cli.main(arguments)


def main_on_a_full_disk(arguments):
    """As ``main``, and no file may grow above 8 KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    return main(arguments)


def script(arguments):
    """``python FILE ...``; ranks that it starts are forked instead of spawned."""
    launch._start_method = lambda: "fork"
    script_that_spawns(arguments)


def script_that_spawns(arguments):
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def fork_the_runs_of_verify_resume(patch):
    """Its three processes are forked too."""

    def start(runs, command):
        output = runs.folder / "output.txt"
        output.unlink(missing_ok=True)
        child = shared().start("ignite_engine.cli:main", command[3:], output=output, folder=Path.cwd())
        return child.wait(), output.read_text()

    patch.setattr(verify_resume._ThreeRuns, "_start", start)


class Command:
    """A command in a process group of its own, as a terminal starts it, with what tests use of a ``Popen``.

    Args:
        folder: its working directory.
        function: what runs it, of this module, given ``arguments``.

    Attributes:
        output: the file of what it prints; ``errors`` that of its standard error.
    """

    def __init__(self, folder, *arguments, function="main"):
        said = Path(tempfile.mkdtemp(prefix="said_"))
        self.output, self.errors = said / "output.txt", said / "errors.txt"
        files = {"output": self.output, "errors": self.errors}
        for path in files.values():
            path.touch()  # it may be read before the process has begun
        self._child = shared().start(f"tests.faults.commands:{function}", arguments, folder=folder, **files)
        self.pid = self._child.pid

    @property
    def returncode(self):
        return self._child.poll()

    def poll(self):
        return self._child.poll()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=120.0):
        """Its output and its errors, when it has ended."""
        self._child.wait(timeout)
        return self.output.read_text(), self.errors.read_text()


def program(folder, code, *arguments, spawns=False):
    """``python -c CODE ...`` with the repository to import from; the ranks that it starts are forked or spawned."""
    path = Path(tempfile.mkdtemp(prefix="program_")) / "program.py"
    path.write_text(code)
    return Command(folder, str(path), *arguments, function="script_that_spawns" if spawns else "script")
