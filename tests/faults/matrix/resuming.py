"""Run a case: the uninterrupted run, the stopped one and the resumed one; compare their results."""

import json
import re
import shutil
import signal
from dataclasses import asdict

from ignite_engine.checkpointing import CheckpointStore
from tests.faults.matrix.cases import Case
from tests.faults.matrix.training import ITERATIONS_PER_EPOCH

MODULES = (
    "ignite_engine.cli",
    "ignite_engine.handlers",
    "tests.faults.matrix.training",
    "torchdata.stateful_dataloader",
)
TRAIN = "tests.faults.matrix.training:train"
NEVER = 10_000


class Difference(AssertionError):
    """A case with an unexpected result; one line."""


class Matrix:
    """Runs cases on fork servers; the uninterrupted run of a setup is done once.

    Args:
        folder: for the runs; those of a case are deleted when it has passed.
        servers: two, so that the processes of one case differ in what is fixed at process start (hashes).
        forget: what the resumed runs do not restore, to show that the comparison detects it.
    """

    def __init__(self, folder, servers, forget=None):
        self.folder = folder
        self.servers = servers
        self.forget = forget
        self._ends = {}

    def run(self, case):
        """Stop, resume and compare one case.

        Returns:
            What happened: where each process was stopped, and from where the next one resumed.

        Raises:
            Difference: it was not stopped as the case says, or its result differs from the uninterrupted run's.
        """
        expected_end, expected_lines = self.reference(case)
        folder = _empty(self.folder / "case")
        resumed_from = []
        for at in _stops(case):
            self._stop(case, folder, at)
            newest = CheckpointStore(folder / "checkpoints").latest()
            if newest.skipped:
                raise Difference(f"skipped: {newest.skipped}")
            found = newest.checkpoint.iteration if newest.checkpoint else None
            resumed_from.append(found)
            _check_where(case, at, found)
        code = self._train(case, folder, None, server=1)
        if code != 0:
            raise Difference(f"the resumed run ended with code {code}: {_tail(folder)}")
        end, lines = _end_of(folder)
        if lines != expected_lines:
            raise Difference(f"metrics.jsonl: {_first_difference(expected_lines, lines)}")
        if end != expected_end:
            raise Difference(f"end: {_first_difference(_flat(expected_end), _flat(end))}")
        left = [each.name for each in (folder / "checkpoints").iterdir() if not each.name.startswith("iteration_")]
        if left:
            raise Difference(f"left behind: {left}")
        _check_progress(case, folder)
        stopped = (folder / "stopped.txt").read_text().splitlines()
        shutil.rmtree(folder)
        return {"stopped": stopped, "resumed_from": resumed_from}

    def reference(self, case):
        """Result and log lines of the uninterrupted run; with workers only if the loader's draws depend on them."""
        workers = case.workers if case.setup.loader == "stateful" else "0"
        if (case.setup, workers) not in self._ends:
            folder = _empty(self.folder / "reference")
            code = self._train(Case(case.setup, "", "", workers=workers), folder, None, server=0)
            if code != 0:
                raise Difference(f"the uninterrupted run ended with code {code}: {_tail(folder)}")
            self._ends[case.setup, workers] = _end_of(folder)
            _check_reference(case.setup, *self._ends[case.setup, workers])
        return self._ends[case.setup, workers]

    def _stop(self, case, folder, at):
        stopped = folder / "stopped.txt"
        before = len(stopped.read_text().splitlines()) if stopped.exists() else 0
        code = self._train(case, folder, {"how": case.how, "at": at}, server=0)
        expected = 130 if case.how == "stop" else -signal.SIGKILL
        said = stopped.read_text().splitlines()[before:] if stopped.exists() else []
        if code != expected or len(said) != 1:
            raise Difference(f"not stopped as intended: code {code}, {said}; {_tail(folder)}")

    def _train(self, case, folder, stop, *, server):
        every = {"kill": 1, "rewind": 3}.get(case.how, NEVER)
        run = {
            "folder": str(folder),
            "workers": case.workers,
            "background": case.background,
            "progress": case.progress,
            "every": every,
            "stop": stop,
            "forget": self.forget,
        }
        return self.servers[server].call(TRAIN, asdict(case.setup), run, output=folder / "output.txt")


def _stops(case):
    epoch = ITERATIONS_PER_EPOCH
    places = {
        "first": [1],
        "late": [NEVER],
        "middle": [epoch + 2],
        "last": [2 * epoch],
        "twice": [epoch + 2, epoch + 3],
        "evaluation": [None],
    }
    return places[case.where]


def _check_where(case, at, found):
    """Check that the newest checkpoint is at the iteration from which the case resumes."""
    end = 2 * ITERATIONS_PER_EPOCH
    if case.how == "rewind":
        right = (found or 0) < (at or end) and (found is None) == (at == 1)
    elif at is not None:
        right = found == at
    elif case.how == "stop":
        right = found == end
    else:  # a background save may not have committed the last one yet
        right = found == end - 1 or (case.background and found == end - 2)
    if not right:
        raise Difference(f"stopped at {at or 'the evaluation'}, the newest checkpoint is of iteration {found}")


def _check_progress(case, folder):
    """Check that an evaluation continued exactly where it was stopped."""
    output = (folder / "output.txt").read_text(errors="replace")
    logged = re.findall(r"The evaluation continues after (\d) batches", output)
    expected = ["2"] if case.progress and case.where == "evaluation" and case.how == "stop" else []
    if logged != expected:
        raise Difference(f"evaluations continued after {logged} batches, expected {expected}")


def _check_reference(setup, end, lines):
    """Check that what a setup is meant to test did happen."""
    iterations = [json.loads(line)["iteration"] for line in lines]
    if iterations != sorted(set(iterations)) or not iterations:
        raise Difference(f"the uninterrupted run has lines of the iterations {iterations}")
    if setup.precision == "fp16" and end["skipped_steps"] < 4:
        raise Difference(f"fp16 overflowed in {end['skipped_steps']} steps only")
    if setup.early_stopping != (end["state"][3] or "").startswith("early stopping"):
        raise Difference(f"it ended by {end['state'][3]}")


def _end_of(folder):
    end = json.loads((folder / "end.json").read_text())
    return end, (folder / "metrics.jsonl").read_text().splitlines()


def _flat(end):
    return [f"{key}.{name} = {value}" for key in end for name, value in _items(end[key])]


def _items(value):
    return value.items() if isinstance(value, dict) else [("", value)]


def _first_difference(expected, found):
    for one, other in zip(expected, found, strict=False):
        if one != other:
            return f"expected {one}, found {other}"
    return f"expected {len(expected)} lines, found {len(found)}"


def _tail(folder):
    output = folder / "output.txt"
    lines = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
    return " / ".join(lines[-3:])


def _empty(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
