"""A run that is broken off and started again, compared with the one that was not, on one process.

Compared are the losses, rates and samples of each iteration, the log, all that the last checkpoint holds, and how each
process has ended.
"""

import gc
import math
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.kit.faults import FileOperations, kill_this_process
from tests.kit.processes import start
from tests.kit.resume import leaves, same_bits, saved_in
from tests.property.program import SIGNALS, Run, notes_of

IN_A_PROCESS = ("SIGKILL", "SIGTERM", "SIGINT", "file operation", "instant")
CODES = {"SIGTERM": 128 + signal.SIGTERM, "SIGINT": 128 + signal.SIGINT}
# data of which a pass need not give each sample once
NOT_ONCE = ("weighted sampler", "unknown length, varying", "endless", "DataLoader list of indices")
ROOM = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where runs are written: the disk is no part of what is compared."""


def resume(case):
    folder = Path(tempfile.mkdtemp(prefix="property_", dir=ROOM))
    try:
        return _judge(case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge(case, folder):
    happened, began = set(), time.monotonic()
    writes = FileOperations(folder / "whole")
    try:
        whole = Run(case, folder / "whole", whole=True)
        with writes:
            whole.train()
    except Exception as error:
        if not lines_of(folder / "whole"):
            return None, {f"refused: {named(error)}"}
        if "NotComputableError" in named(error):  # Ignite's metrics refuse an epoch without a batch
            return None, {"an epoch without a batch"}
        return f"the whole run ended with {named(error)}", happened
    seconds, total = time.monotonic() - began, whole.trainer.state.iteration
    if wrong := not_once(case, [folder / "whole"], whole.trainer.state.reason):
        return wrong, happened
    place, run, at = folder / "case", None, 0
    for stop in case.stops:
        at = min(total, max(at + 1, math.ceil(stop.after * total)))
        try:
            if stop.how in IN_A_PROCESS:
                if stop is not case.stops[0]:
                    run = None
                    gc.collect()  # one that was stopped in this process holds its log, which the other is to write
                run, (broken_off, wrong) = None, _in_a_process(case, place, stop, at, seconds, len(writes.seen))
            else:
                run = run or Run(case, place)
                broken_off, wrong = run.train(stop, at), None
                if run.stopped and not broken_off and run.trainer.state.iteration < total:
                    wrong = f"a {stop.how} after iteration {at} did not end the run"
                run = run if stop.how == "same process" and broken_off else None
        except Exception as error:
            return f"broken off by {stop} it ended with {named(error)}", happened
        if wrong is not None:
            return wrong, happened
        if not broken_off:
            break
        happened.add(f"broken off by {stop.how}")
    if case.damage and run is None and _damage(place / "checkpoints"):
        happened.add("damaged")
    try:
        run = run or Run(case, place)
        happened.add(f"resumed {_where(case, run, total, folder)}")
        run.train()
    except Exception as error:
        return f"resumed it ended with {named(error)}", happened
    wrong = difference(case, whole, run)
    announced = notes_of(place) / "announced_0.txt"
    if wrong is not None and announced.exists():
        return None, happened | {"announced, other bits"}
    if wrong is not None and whole.trainer.state.reason.startswith("terminate") and run.resumed_from == total:
        return None, happened | {"trained on after terminate()"}  # a documented limit
    return wrong, happened


def _where(case, run, total, folder):
    if run.resumed_from is None:
        return "in the same process" if run.trainer.state.iteration else "from nothing"
    ends = {int(line.split()[0]) for line in lines_of(folder / "whole") if " epoch" in line.split("\t")[0]}
    return (
        "at the end" if run.resumed_from == total else f"{'at an epoch end' if run.resumed_from in ends else 'within'}"
    )


def _in_a_process(case, folder, stop, at, seconds, operations):
    """Run in a process of its own until it is ended there; whether it was, and what is wrong."""

    def work():
        if stop.how == "instant":
            signal.setitimer(signal.ITIMER_REAL, max(0.001, stop.after * seconds))
        number = int(stop.after * operations) if stop.how == "file operation" else None
        with FileOperations(folder, number, kill_this_process):
            Run(case, folder).train(stop, at)

    struck = notes_of(folder) / "stopped_0.txt"
    struck.unlink(missing_ok=True)  # of a stop before
    process = start(work)
    code, fired = process.wait(60), struck.exists()
    struck.unlink(missing_ok=True)
    expected = {"SIGKILL": -9, "file operation": -9, "instant": -signal.SIGALRM, **CODES}[stop.how]
    if code == 0:
        return False, "a SIGKILL left exit code 0" if stop.how == "SIGKILL" and fired else None
    if code != expected or (stop.how in SIGNALS and not fired):
        return True, f"broken off by {stop} it ended with code {code}: {process.said()[-600:]}"
    return True, None


def lines_of(folder, rank=0):
    path = notes_of(folder) / f"lines_{rank}.txt"
    return path.read_text().splitlines() if path.exists() else []


def not_once(case, folders, reason, ranks=1, every=None):
    """Whether some epoch of these runs, one after another, does not have each sample once."""
    if case.drop_last or case.length != "max_epochs" or case.data in NOT_ONCE or case.max_updates or case.per_epoch:
        return None
    if "terminate_epoch" in case.handlers or reason != "max_epochs":
        return None
    seen = {}
    for folder in folders:
        for rank in range(ranks):
            for line in lines_of(folder, rank):
                where, ids, _ = line.split("\t")
                if ids:
                    own = seen.setdefault(int(where.split()[1]), Counter())
                    own.update(each for batch in eval(ids) for each in batch)
    if every is None:
        every = range(sum(case.windows) if case.data.startswith("windows") else case.samples)
    for epoch, found in seen.items():
        lost, twice = [each for each in every if each not in found], [at for at, n in found.items() if n > 1]
        if lost or twice:
            return f"epoch {epoch} lost the samples {lost}, and had {sorted(twice)} more than once"
    return None


def difference(case, whole, run, rank=0):
    """What differs first."""
    expected, found = {}, {}
    for lines, kept in ((lines_of(whole.folder, rank), expected), (lines_of(run.folder, rank), found)):
        for line in lines:
            kept.setdefault(line.split("\t")[0], []).append(line)
    for key in sorted({**expected, **found}, key=lambda key: (int(key.split()[0]), key)):
        for line in found.get(key, ["nothing"]):
            if line != (one := expected.get(key, ["nothing"])[-1]):
                return f"iteration {key}: expected {one}, found {line}"
    if rank == 0:
        logs = [_log(each.folder) for each in (whole, run)]
        for one, other in zip([*logs[0], "nothing"], [*logs[1], "nothing"], strict=False):
            if one != other:
                return f"the log: expected {one}, found {other}"
    one, other = ((each.trainer.state.status, each.trainer.state.reason) for each in (whole, run))
    if one != other:
        return f"it ended as {other}, not {one}"
    parts = [saved_in(each.folder / "checkpoints", rank) for each in (whole, run)]
    if not case.whole_saves:  # what a handler of checkpoints knows of those that it has made
        parts = [{name: part for name, part in each.items() if name not in ("checkpoint", "others")} for each in parts]
    if run.resumed_from == whole.trainer.state.iteration:  # at its end: what follows it is done again, and not saved
        parts = [
            {name: part for name, part in each.items() if name.startswith(("model", "optimizer"))} for each in parts
        ]
    one, other = (dict(leaves(each)) for each in parts)
    for path in {**one, **other}:
        if path == ("data", "windows", "over"):  # whether it has looked for another window after its last
            continue
        if path not in one or path not in other or not same_bits(one[path], other[path]):
            return f"in the last checkpoint {path} is {other.get(path)}, not {one.get(path)}"
    weights = [each.model.state_dict() for each in (whole, run)]
    differ = [name for name, value in weights[0].items() if not same_bits(value, weights[1][name])]
    if rank:  # DDP lets each forward begin with the buffers of rank 0
        differ = [name for name in differ if name in dict(run.model.named_parameters())]
    if differ:
        return f"the weights {differ[:3]} differ"
    left = [each.name for each in (run.folder / "checkpoints").iterdir() if not each.name.startswith("iteration_")]
    return f"left behind: {left}" if left and rank == 0 else None


def _log(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _damage(folder):
    """Flip a bit of the newest checkpoint where there is one before it."""
    saved = sorted(path.parent for path in folder.glob("iteration_*/manifest.json"))
    if len(saved) < 2:
        return False
    files = [path for path in saved[-1].iterdir() if path.suffix != ".json"]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return True


def named(error):
    frame, where = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if "/tests/" not in name or not where:
            where = f"{os.path.basename(name)}:{frame.tb_lineno}"
        frame = frame.tb_next
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]} [{where}]"
