"""The judge of resume: a run stopped anywhere and started again ends with the bits of the whole one, or said it won't.

Each case is one program (``resume_plan``), run three times or four, in processes of their own: whole; stopped, perhaps
twice; and from there to its end. What is compared: the loss and the learning rates of every iteration, the log, and at
the end every weight, optimizer state, counter and generator.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fork_server import ForkServer
from tests.search.common import DEVICE, PASSED, REFUSED, Failure, Result, case_seeds
from tests.search.resume_plan import CHOICES, FEATURES, LISTS, described, draw, settled
from tests.search.resume_program import PLANNED, RAISED
from tests.search.resume_program import REFUSED as REFUSED_CODE

MODULES = (
    "ignite_engine.handlers",
    "tests.search.resume_program",
    "torchdata.stateful_dataloader",
    "torch._dynamo",  # torch's foreach optimizers ask it; imported in each child it would cost a second
)
RUN = "tests.search.resume_program:run"
FAILED = "failed"
NOT_STOPPED = "not stopped"
ANNOUNCED, ANNOUNCED_EQUAL = "announced, other bits", "announced, same bits"
TERMINATED = "trained on after terminate()"
"""A handler ended the run, and nothing in its last checkpoint says so: a documented limit."""
NO_FUNCTION = "no function of its seed"
"""Two whole runs differ from each other: nothing can be said about the resumed one."""
TIMEOUT_S = 60.0 if os.environ.get(DEVICE) else 15.0  # a process takes seconds to begin on a GPU
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Verdict:
    """What came of a case."""

    outcome: str
    reason: str = ""
    features: set[str] = field(default_factory=set)
    """What really took part."""


def run(seed, cases, minutes, *, jobs=2):
    """Judge the cases ``seed``, ``seed + 1``, ..., ``jobs`` at a time; each failure is printed as it is found."""
    result, started = Result("resume", seed, FEATURES), time.monotonic()
    seeds, lock, errors = case_seeds(seed, cases, minutes), threading.Lock(), queue.SimpleQueue[BaseException]()

    def work():
        try:
            with Judge() as judge:
                while (number := _next(seeds, lock)) is not None:
                    verdict = judge.judge(draw(number))
                    with lock:
                        _count(result, number, verdict)
        except BaseException as error:
            errors.put(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(jobs if cases is None else min(jobs, cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():  # so that Ctrl-C is delivered
            worker.join(0.5)
    if not errors.empty():
        raise errors.get()
    result.failures.sort(key=lambda each: each.case)
    result.seconds = time.monotonic() - started
    return result


def _next(seeds, lock):
    with lock:
        return next(seeds, None)


def _count(result, number, verdict):
    if verdict.outcome == FAILED:
        result.failures.append(Failure("resume", number, verdict.reason))
        print(f"[{result.cases}] {result.failures[-1]}", flush=True)
    else:
        result.outcomes[verdict.outcome] += 1
        if verdict.reason and verdict.outcome in (REFUSED, NO_FUNCTION):
            result.reasons[f"{verdict.outcome}: {verdict.reason}"] += 1
    if verdict.outcome in (FAILED, PASSED, ANNOUNCED, ANNOUNCED_EQUAL):
        result.exercised.update(verdict.features)


def show(number):
    """What a case is, in a line."""
    return described(draw(number))


def simplified(number):
    """A failing case with all that can be made plain and still fails, and what differs then."""
    plan, tried = draw(number), 0
    with Judge() as judge:
        verdict = judge.judge(plan)
        if verdict.outcome != FAILED:
            return f"{verdict.outcome}: nothing to make simpler"
        for candidate in _simpler(json.loads(json.dumps(plan))):
            simpler = settled(json.loads(json.dumps({**plan, **candidate})))
            if simpler == plan:
                continue
            tried += 1
            if (found := judge.judge(simpler)).outcome == FAILED:
                plan, verdict = simpler, found
    return f"{described(plan)}\n  {verdict.reason}\n  ({tried} cases tried)"


def _simpler(plan):
    if len(plan["stops"]) > 1:
        yield {"stops": plan["stops"][:1]}
        yield {"stops": plan["stops"][1:]}
    for name in LISTS:
        yield {name: []}
        for value in plan[name]:
            yield {name: [each for each in plan[name] if each != value]}
    for name, values in CHOICES.items():
        if plan[name] != values[0]:
            yield {name: values[0]}


class Judge:
    """Runs cases on two fork servers, so that processes of one case do not share what a process fixes at its start."""

    def __enter__(self):
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="search-", dir=parent, ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.servers = (ForkServer(MODULES), ForkServer(MODULES))
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.close()
        self._folder.cleanup()

    def judge(self, plan):
        """Run the case and compare."""
        whole, began = self._fresh("whole"), time.monotonic()
        code = self._run(plan, whole, "whole", None)
        seconds = time.monotonic() - began
        # Ignite's metrics refuse an epoch without a batch
        if code == REFUSED_CODE or "NotComputableError" in _error(whole):
            return Verdict(REFUSED, _error(whole))
        if code != 0:
            return Verdict(FAILED, f"the whole run ended with code {code}: {_error(whole)}")
        case = self._fresh("case")
        expected, verdict = _lines(whole), Verdict(PASSED)
        total = max((int(key.split()[1]) for key in expected if key.startswith("iteration")), default=0)
        at, stopped = 0, 0
        for stop in plan["stops"]:
            at = min(total, max(at + 1, 1 + int(stop["after"] * total)))
            error = self._stop(plan, case, {**stop, "at": at}, seconds)
            if error is not None:
                # a checkpoint's own conditions are checked where there is one, which the whole run has not
                refused = not _lines(case)
                return Verdict(REFUSED if refused else FAILED, error, _features(case, expected, total))
            if not _ended(case, "stopped"):
                stopped += 1
            else:
                break
        if plan["damage"] != "none":
            _damage(case)
        code = self._run(plan, case, "resumed", None, server=1)
        verdict.features = _features(case, expected, total) | ({"happened: stopped twice"} if stopped > 1 else set())
        announced = _notes(case, "stopped", "announced ") + _notes(case, "resumed", "announced in the checkpoint")
        if code == REFUSED_CODE and not _lines(case):  # killed before it was refused
            return Verdict(REFUSED, _error(case), verdict.features)
        if code != 0:
            verdict.outcome, verdict.reason = FAILED, f"the resumed run ended with code {code}: {_error(case)}"
            return verdict
        difference = _difference(whole, case, expected)
        if difference is None:
            verdict.outcome = ANNOUNCED_EQUAL if announced else PASSED if stopped else NOT_STOPPED
        elif _resumed_after_terminate(whole, case, total):
            verdict.outcome = TERMINATED
        elif announced:
            verdict.outcome, verdict.reason = ANNOUNCED, difference
        elif differs_from_itself(plan):
            verdict.outcome, verdict.reason = NO_FUNCTION, "torch's fused SGD over bf16 weights differs from itself"
        else:
            unsure = self._differs_from_itself(plan, whole, expected)
            verdict.outcome, verdict.reason = (FAILED, difference) if unsure is None else (NO_FUNCTION, unsure)
        return verdict

    def _differs_from_itself(self, plan, whole, expected):
        """In what other whole runs differ from this one; some of torch's fused kernels depend on where memory lies."""
        for _ in range(4):
            again = self._fresh("again")
            self._run(plan, again, "whole", None, server=1)
            if (unsure := _difference(whole, again, expected, role="whole")) is not None:
                return unsure
        return None

    def _stop(self, plan, folder, stop, seconds):
        """Run until the stop; what went wrong, if it ended in another way."""
        if stop["how"] != "SIGKILL at an instant":
            code = self._run(plan, folder, "stopped", stop)
            expected = {"exception": (0, PLANNED), "SIGKILL": (0, -signal.SIGKILL)}.get(stop["how"], (0,))
            told = "" if code in expected else f"stopped by {stop['how']} it ended with code {code}: {_error(folder)}"
            return told or None
        child = self._start(plan, folder, "stopped", None)
        code = child.poll(seconds * stop["after"])
        if code is None:
            child.signal(signal.SIGKILL)
            code = child.wait()
        if code == -signal.SIGKILL:
            with (folder / "notes.txt").open("a") as file:
                file.write("stopped\tstop: SIGKILL at an instant\n")
        return None if code in (0, -signal.SIGKILL) else f"before a SIGKILL it ended with {code}: {_error(folder)}"

    def _start(self, plan, folder, role, stop, server=0):
        (folder / "stopped_end.json").unlink(missing_ok=True)
        return self.servers[server].start(RUN, plan, str(folder), role, stop, output=folder / "output.txt")

    def _run(self, plan, folder, role, stop, server=0):
        try:
            code = self._start(plan, folder, role, stop, server).wait(TIMEOUT_S)
        except TimeoutError:
            stuck = re.findall(r'File ".*?/([^/]*)", line (\d+) in (\w+)', (folder / "output.txt").read_text())
            where = " < ".join(f"{name}:{line} {function}" for name, line, function in stuck[-60:][:6])
            (folder / "error.txt").write_text(f"it did not end within {TIMEOUT_S:.0f} s [{where}]")
            return RAISED
        return code

    def _fresh(self, name):
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder


def differs_from_itself(plan):
    """Torch's fused SGD with momentum does over bf16 weights."""
    return bool(plan["optimizer"] == "SGD fused" and "bf16 weights" in plan["layers"])


def _damage(folder):
    """Flip a bit of the newest checkpoint where there is one before it."""
    saved = sorted(path.parent for path in (folder / "checkpoints").glob("iteration_*/manifest.json"))
    if len(saved) > 1:
        largest = max(
            (path for path in saved[-1].iterdir() if path.suffix != ".json"), key=lambda path: path.stat().st_size
        )
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
        with (folder / "notes.txt").open("a") as file:
            file.write("resumed\tdamage: newest checkpoint\n")


def _ended(folder, role):
    """The run came to its own end before its stop."""
    path = folder / f"{role}_end.json"
    return path.exists() and json.loads(path.read_text())["status.0"] != "'interrupted'"


def _resumed_after_terminate(whole, case, total):
    """The whole run was ended by ``terminate()``, and a process resumed from the checkpoint of that end."""
    end = json.loads((whole / "whole_end.json").read_text())
    notes = [note for role in ("stopped", "resumed") for note in _notes(case, role, "resumed from ")]
    return end["status.1"].startswith("'terminate") and any(int(note.split()[-1]) >= total for note in notes)


def _lines(folder):
    """All that was written for each iteration and epoch, by the processes one after another."""
    found = {}
    path = folder / "lines.txt"
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, _ = line.partition("\t")
        key = " ".join(key.split()[:2]) if key.startswith("iteration") else key
        found.setdefault(key, []).append(line)
    return found


def _notes(folder, role, prefix):
    path = folder / "notes.txt"
    rows = [line.partition("\t") for line in path.read_text().splitlines()] if path.exists() else []
    return [text for who, _, text in rows if who == role and text.startswith(prefix)]


def _features(folder, expected, total):
    """What took part: of the drawn features those that the resumed run used, too."""
    found = {each for each in _notes(folder, "resumed", "") if each in FEATURES}
    for role in ("stopped", "resumed"):
        found.update(each for each in _notes(folder, role, "") if each.startswith(("happened", "stop")))
        for note in _notes(folder, role, "resumed from "):
            iteration = int(note.split()[-1])
            ends = {int(key.split()[3]) for key in expected if key.startswith("epoch")}
            where = (
                "at the end" if iteration == total else "at an epoch's end" if iteration in ends else "within an epoch"
            )
            found.add(f"happened: resumed {where}")
    if not _notes(folder, "resumed", "resumed from "):
        found.add("happened: began again without a checkpoint")
    return found & set(FEATURES)


def _difference(whole, case, expected, role="resumed"):
    """What differs first: an iteration's line, else a line of the log, else a part of the end."""
    found = _lines(case)
    for key in sorted({**expected, **found}, key=_order):
        (line,), others = expected.get(key, ["nothing"])[-1:], found.get(key, ["nothing"])
        for other in others:
            if other != line:
                return f"{key}: expected {_values(line, other)}"
    logs = [_log(folder) for folder in (whole, case)]
    for one, other in zip([*logs[0], "nothing"], [*logs[1], "nothing"], strict=False):
        if one != other:
            return f"metrics.jsonl: expected {one}, found {other}"
    ends = [
        json.loads((folder / name).read_text())
        for folder, name in ((whole, "whole_end.json"), (case, f"{role}_end.json"))
    ]
    for name in {**ends[0], **ends[1]}:
        if ends[0].get(name) != ends[1].get(name):
            return f"at the end {name}: expected {ends[0].get(name)}, found {ends[1].get(name)}"
    return None


def _order(key):
    words = key.split()
    return (int(words[1]), 0) if words[0] == "iteration" else (int(words[3]), 1)


def _values(line, other):
    """The first word that differs in two lines, numbers as people read them."""
    words = zip(line.split(), other.split(), strict=False)
    index = next((at for at, (one, two) in enumerate(words) if one != two), None)
    if index is None:
        return f"{line!r}, found {other!r}"
    name = next((word for word in reversed(line.split()[:index]) if not re.fullmatch(r"[-\d.x+a-fpinN]+", word)), "")
    one, two = (_plain(each.split()[index]) for each in (line, other))
    return f"{name} {one}, found {two}"


def _plain(word):
    return repr(float.fromhex(word)) if "0x" in word else word


def _log(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _error(folder):
    path = folder / "error.txt"
    return path.read_text() if path.exists() else ""
