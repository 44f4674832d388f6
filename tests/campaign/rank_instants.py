"""SIGINT, SIGTERM or SIGKILL at a random instant to one rank, all processes or the launcher; spawn and torchrun.

What the ranks do then is drawn too, so that short phases (a save) are hit as often as long ones, and noted.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ignite_engine.ranks.launch import free_port
from tests.campaign.resuming import Difference
from tests.campaign.runs import Bench, Item, compare, end_of, newest_iteration, tail, write_config
from tests.faults.fork_server import ROOT
from tests.faults.processes import summary

COUNT = 100
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
TARGETS = ("one rank", "all", "launcher")
PHASES = {  # the most seconds that the signal comes after the beginning of the phase
    "start-up": 0.0,
    "build": 0.6,
    "data wait": 0.1,
    "step": 0.1,
    "evaluation": 0.3,
    "save": 0.06,
    "after the last update": 0.4,
}
ONCE = ("start-up", "build", "after the last update")
TASK = {"step_s": 0.03, "data_s": 0.03, "ballast": 2_000_000}
ENDS_WITHIN_S = 120.0


def items(count: int = COUNT) -> list[Item]:
    """Every combination of signal, target, launcher and 2 or 3 ranks in turn, and the phases; the instant is drawn."""
    return [Item("rank instants", f"instant {number}", partial(_run, number)) for number in range(count)]


def _run(number: int, bench: Bench) -> dict[str, Any]:
    draw = random.Random(number)
    place, signalled = divmod(number, len(NUMBERS))
    place, target = divmod(place, len(TARGETS))
    launcher, ranks = ("spawn", "torchrun")[place % 2], 2 + place // 2 % 2
    phase = list(PHASES)[number % len(PHASES)]
    name = f"{ranks} ranks by {launcher}"
    if name not in bench.kept:
        bench.kept[name] = _reference(bench.folder / "reference", launcher, ranks)
    expected, starts_s = bench.kept[name]
    folder = bench.folder / "run"
    config = _config(folder, background=bool(number // 3 % 2))
    process = _start(launcher, ranks, config)
    _wait(process, folder, phase, draw, starts_s)
    family = _family(process)
    facts = {"signal": NUMBERS[signalled].name, "to": TARGETS[target], "by": launcher, "ranks": ranks, "drawn": phase}
    facts["in"] = _send(NUMBERS[signalled], TARGETS[target], process, family, draw, folder)
    began = time.monotonic()
    code = _end_of(process, family, folder)
    facts |= {"code": code, "seconds": round(time.monotonic() - began, 1), "newest": newest_iteration(folder)}
    sent_to = TARGETS[target] if family else "launcher"  # there was no rank yet
    _check_end(NUMBERS[signalled], sent_to, launcher, code, folder)
    (folder / "fast").touch()
    again = _start(launcher, ranks, config)
    if again.wait(ENDS_WITHIN_S) != 0:
        raise Difference(f"{facts}: the resumed run failed: {tail(folder)}")
    compare(expected, end_of(folder))
    return facts


def _config(folder: Path, *, background: bool) -> Path:
    checkpoint = {"every": 2, "background": background}
    return write_config(folder, task_options={**TASK, "phases": str(folder)}, checkpoint=checkpoint)


def _reference(folder: Path, launcher: str, ranks: int) -> tuple[dict[str, Any], float]:
    """How an uninterrupted run ends, and the seconds until its ranks build."""
    config = _config(folder, background=False)
    (folder / "fast").touch()
    began = time.monotonic()
    process = _start(launcher, ranks, config)
    _poll(process, lambda: bool(_phases(folder)))
    starts_s = time.monotonic() - began
    if process.wait(ENDS_WITHIN_S) != 0:
        raise Difference(f"the uninterrupted run failed: {tail(folder)}")
    return end_of(folder), starts_s


def _start(launcher: str, ranks: int, config: Path) -> subprocess.Popen[bytes]:
    spawn = ["-m", "ignite_engine", "train", str(config), "--backend", "gloo"]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    arguments = [*spawn, f"--nproc-per-node={ranks}"] if launcher == "spawn" else [*torchrun, *spawn]
    with (config.parent / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _phases(folder: Path) -> dict[int, list[str]]:
    """What each process has begun to do, by its id."""
    return {int(path.stem.split("_")[1]): path.read_text().splitlines() for path in folder.glob("phases_*")}


def _wait(process: subprocess.Popen[bytes], folder: Path, phase: str, draw: random.Random, starts_s: float) -> None:
    """Until the drawn instant of the drawn phase, or its end."""
    if phase == "start-up":
        delay = draw.uniform(0.3, 1.0) * starts_s
    else:
        times = 1 if phase in ONCE else draw.randint(1, 3)
        _poll(process, lambda: any(phases.count(phase) >= times for phases in _phases(folder).values()))
        delay = draw.uniform(0.0, PHASES[phase])
    deadline = time.monotonic() + delay
    _poll(process, lambda: time.monotonic() >= deadline)


def _poll(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while process.poll() is None and not condition():
        if time.monotonic() > deadline:
            process.kill()
            raise Difference("what is waited for did not come")
        time.sleep(0.002)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks, but for processes that help Python."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        return [each for each in children if "resource_tracker" not in " ".join(each.cmdline())]
    except psutil.NoSuchProcess:
        return []


def _send(
    number: int,
    target: str,
    process: subprocess.Popen[bytes],
    family: list[psutil.Process],
    draw: random.Random,
    folder: Path,
) -> str:
    """Send it; the phase that the rank was in, the first one if it was not sent to one."""
    launcher = [process.pid] if process.poll() is None else []
    ranks = [each.pid for each in family]
    chosen = {"launcher": launcher, "all": [*ranks, *launcher]}.get(target) or (
        [draw.choice(ranks)] if target == "one rank" and ranks else launcher
    )
    phases = _phases(folder)
    for pid in chosen:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    if not chosen:
        return "the end"
    looked_at = chosen[0] if chosen[0] in ranks else next(iter(ranks), 0)
    return phases.get(looked_at, ["start-up"])[-1]


def _end_of(process: subprocess.Popen[bytes], family: list[psutil.Process], folder: Path) -> int:
    """The exit code, when neither the launcher nor a rank is left."""
    try:
        code = process.wait(ENDS_WITHIN_S)
        _, left = psutil.wait_procs(family, timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        left = family
    if process.poll() is None or left:
        for pid in [process.pid, *(each.pid for each in left)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        raise Difference(f"{len(left)} processes were left after {ENDS_WITHIN_S} s: {tail(folder)}")
    return code


def _check_end(number: int, target: str, launcher: str, code: int, folder: Path) -> None:
    """The code, the summary and the newest checkpoint agree; 0 is only for a run that was complete."""
    has_summary = (folder / "run" / "summary.json").exists()
    ended = summary(folder) if has_summary else {"status": None}
    if ended["status"] == "interrupted" and ended["iteration"] not in (0, newest_iteration(folder)):
        raise Difference(f"stopped at iteration {ended['iteration']}, saved is {newest_iteration(folder)}")
    if (number, target) == (signal.SIGKILL, "one rank") and ended["status"] == "interrupted":
        raise Difference(f"a rank was killed, and the summary says: interrupted, {ended['reason']}")
    if code == 0:
        expected = ended["status"] == "completed"
    elif number == signal.SIGKILL:
        expected = code == (1 if target == "one rank" else -number)
    elif launcher == "spawn":  # -n: before this package's first line, which is the launcher's import
        expected = code == 128 + number or (not has_summary and target != "one rank" and code == -number)
        said = (folder / "output.txt").read_text(errors="replace")
        if code == 128 + number and "Traceback" in said:
            raise Difference(f"a traceback: {tail(folder)}")
    else:
        expected = True  # torchrun's own
    if not expected:
        raise Difference(f"ended with code {code}, summary {ended['status']}: {tail(folder)}")
