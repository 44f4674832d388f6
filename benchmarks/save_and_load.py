"""Saves that are waited for, saves in the background, and restoring: ours and the strongest others, on one disk.

    python -m benchmarks.save_and_load [--rounds N] [--width 2048] [--sections waited,background,restore]
                                       [--directory DIR] [--json PATH]

A model of 50M parameters with AdamW's state (604 MB). In each round every contender has its turn, in an order drawn for
the round, and writes files that are new; deleting them is timed apart. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.background_saves import COPY, OURS, background
from benchmarks.goals import Goal, print_goals
from benchmarks.machine import installed, machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import Times, take_turns
from benchmarks.workload import Training, tensors_of
from ignite_engine import Trainer, Update
from ignite_engine.errors import CheckpointError
from ignite_engine.handlers import Checkpoint

SECTIONS = ("waited", "background", "restore")
SAVE, SAVE_SYNCED, LOAD = "torch.save", "torch.save, fsync", "torch.load"
SAVE_GOAL, RESTORE_GOAL, COMPLETE_GOAL, STALL_GOAL = 1.3, 1.5, 1.2, 0.05
LIGHTNING, ACCELERATE = "lightning", "accelerate"
Prepare = Callable[[Path], Callable[[], object]]
"""Takes a folder, does what is not timed, and returns what is."""


# -- saves that are waited for ----------------------------------------------------------------------------------------


def saves(training: Training) -> dict[str, Prepare]:
    """By name. DCP and ours end with their files on the disk; torch.save, Lightning and Accelerate do not
    wait for it.
    """
    model, optimizer = training.model, training.optimizer

    def plain(folder: Path) -> Callable[[], object]:
        return lambda: torch.save(training.state(), folder / "state.pt")

    def synced(folder: Path) -> Callable[[], object]:
        def save() -> None:
            with open(folder / "state.pt", "wb") as file:
                torch.save(training.state(), file)
                file.flush()
                os.fsync(file.fileno())

        return save

    def distributed(folder: Path) -> Callable[[], object]:
        return lambda: dcp.save(training.state(), checkpoint_id=folder / "dcp", no_dist=True)  # type: ignore[attr-defined]

    def ours(folder: Path) -> Callable[[], object]:
        checkpoint = Checkpoint(folder / "checkpoints", background=False)
        checkpoint.attach(Trainer(Update(model, optimizer, training.loss_fn)))
        return checkpoint.save

    def ignite(folder: Path) -> Callable[[], object]:
        from ignite.handlers import DiskSaver
        from ignite.handlers.checkpoint import Checkpoint as IgniteCheckpoint

        saver = DiskSaver(folder / "ignite", create_dir=True)
        checkpoint = IgniteCheckpoint({"model": model, "optimizer": optimizer}, saver)
        trainer = Trainer(Update(model, optimizer, training.loss_fn))
        return lambda: checkpoint(trainer)

    found: dict[str, Prepare] = {
        SAVE: plain,
        SAVE_SYNCED: synced,
        "DCP": distributed,
        "ours": ours,
        "Ignite Checkpoint": ignite,
    }
    if installed(LIGHTNING):
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        writer = TorchCheckpointIO()
        found["Lightning"] = lambda folder: lambda: writer.save_checkpoint(training.state(), folder / "state.ckpt")
    if installed(ACCELERATE):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        found["Accelerate"] = lambda folder: lambda: accelerator.save_state(str(folder / "state"))
    return found


def measure_saves(training: Training, rounds: int, directory: Path) -> tuple[Times, Times]:
    """Seconds of each save, and of deleting what it wrote; one round before them is not counted.

    Raises:
        RuntimeError: a contender wrote less than the state.
    """
    deleting: Times = {}

    def turn(name: str, prepare: Prepare) -> Callable[[], float]:
        deleting[name] = []

        def timed() -> float:
            folder = Path(tempfile.mkdtemp(dir=directory))
            save = prepare(folder)
            began = time.perf_counter()
            save()
            took = time.perf_counter() - began
            written = sum(path.stat().st_size for path in files_of(folder))
            if written < training.bytes:
                raise RuntimeError(f"{name} wrote {written} bytes of a state of {training.bytes}.")
            began = time.perf_counter()
            shutil.rmtree(folder)
            deleting[name].append(time.perf_counter() - began)
            return took

        return timed

    took = take_turns({name: turn(name, each) for name, each in saves(training).items()}, rounds, warmup=1)
    return took, {name: each[1:] for name, each in deleting.items()}


# -- restoring --------------------------------------------------------------------------------------------------------


def restores(training: Training) -> dict[str, tuple[str, Prepare]]:
    """By name: the save that wrote the files, and how they get into a model and an optimizer that are built."""

    def load(mmap: bool) -> Prepare:
        def prepare(folder: Path) -> Callable[[], object]:
            return lambda: training.load(torch.load(folder / "state.pt", weights_only=True, mmap=mmap))

        return prepare

    def distributed(folder: Path) -> Callable[[], object]:
        def restore() -> None:
            state = training.state()
            dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)  # type: ignore[attr-defined]  # torch hides it
            training.optimizer.load_state_dict(state["optimizer"])  # its tensors were loaded in place

        return restore

    def ours(folder: Path) -> Callable[[], object]:
        checkpoint = Checkpoint(folder / "checkpoints")
        checkpoint.attach(Trainer(Update(training.model, training.optimizer, training.loss_fn)))
        return checkpoint.resume

    return {
        LOAD: (SAVE_SYNCED, load(mmap=False)),
        "torch.load, mmap": (SAVE_SYNCED, load(mmap=True)),
        "DCP": ("DCP", distributed),
        "ours": ("ours", ours),
    }


def measure_restores(training: Training, rounds: int, directory: Path) -> tuple[Times, Times]:
    """Seconds of each restore from files that are in memory, and from files that are not; all bits are compared.

    Each is of a copy that nobody has read: a process that resumes has neither written nor verified its files.
    The second is empty where the file system keeps files in memory.

    Raises:
        RuntimeError: something else was restored.
    """
    contenders, writers = restores(training), saves(training)
    originals = directory / "originals"
    for written_by in dict(contenders.values()):
        (originals / written_by).mkdir(parents=True)
        writers[written_by](originals / written_by)()
    expected = [tensor.detach().clone() for tensor in tensors_of(training.state())]

    def restore(name: str, cold: bool) -> float:
        written_by, prepare = contenders[name]
        folder = Path(tempfile.mkdtemp(dir=directory)) / "copy"
        shutil.copytree(originals / written_by, folder)
        for path in files_of(folder):
            synchronize(path, evict=cold)
        training.forget()
        load = prepare(folder)
        began = time.perf_counter()
        load()
        took = time.perf_counter() - began
        restored = tensors_of(training.state())
        if not all(map(torch.equal, restored, expected)):
            raise RuntimeError(f"{name} restored something else.")
        shutil.rmtree(folder.parent)
        return took

    def turns(cold: bool) -> Mapping[str, Callable[[], float]]:
        return {f"{name}{', cold' * cold}": lambda name=name: restore(name, cold) for name in contenders}  # type: ignore[misc]

    both = take_turns(dict(turns(False)) | (dict(turns(True)) if evicts(directory) else {}), rounds, warmup=1)
    shutil.rmtree(originals)
    warm = {name: both[name] for name in contenders}
    return warm, {name: both[f"{name}, cold"] for name in contenders if f"{name}, cold" in both}


def refuses_a_flipped_byte(training: Training, directory: Path) -> bool:
    """Whether ours resumes from no file of which one byte has changed, even one that it has read in this process."""
    folder = Path(tempfile.mkdtemp(dir=directory))
    saves(training)["ours"](folder)()
    restores(training)["ours"][1](folder)()
    largest = max(files_of(folder), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    try:
        restores(training)["ours"][1](folder)()
    except CheckpointError:
        return True
    finally:
        shutil.rmtree(folder)
    return False


def synchronize(path: Path, *, evict: bool = False) -> None:
    """Write it to the disk, and take it out of memory on request."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if evict:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def evicts(directory: Path) -> bool:
    """Whether files on this file system can be taken out of memory, as a cold restore needs."""
    path = directory / "evicted"
    path.write_bytes(bytes(1 << 20))
    synchronize(path, evict=True)
    try:
        with open(path, "rb", buffering=0) as file:
            os.preadv(file.fileno(), [bytearray(1)], 1 << 19, os.RWF_NOWAIT)
    except BlockingIOError:
        return True  # it would have to be read from the disk
    except (OSError, AttributeError):
        return False  # nobody says
    finally:
        path.unlink()
    return False


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# -- the report -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save_and_load", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=2048, help="of 12 linear layers; 2048: 50M parameters")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--directory", type=Path, help="to save in; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sections = options.sections.split(",")
    if not set(sections) <= set(SECTIONS):
        parser.error(f"--sections must be of {','.join(SECTIONS)}, got {options.sections}.")
    logging.disable(logging.WARNING)  # each resume says where it resumed
    torch.set_num_threads(1)  # of computation, for all; what reads, hashes or writes in threads of its own keeps them
    training = Training(options.width)
    report: dict[str, Any] = {"machine": machine(), "bytes": training.bytes, "rounds": options.rounds}
    goals: list[Goal] = []
    for name in (LIGHTNING, ACCELERATE):
        if not installed(name):
            print(f"{name} is not installed, so it is left out")
    print(f"{machine()}\n{options.rounds} rounds, {training.bytes / 1e6:.0f} MB of state, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder, warnings.catch_warnings(action="ignore"):
        if "waited" in sections:
            report["waited"], report["deleting"] = measure_saves(training, options.rounds, Path(folder))
            goals += of_saves(report["waited"], report["deleting"], training.bytes)
        if "restore" in sections:
            report["refuses_a_flipped_byte"] = refuses_a_flipped_byte(training, Path(folder))
            report["warm"], report["cold"] = measure_restores(training, options.rounds, Path(folder))
            goals += of_restores(report["warm"], report["cold"], training.bytes)
            print(f"ours refuses a file with a flipped byte: {report['refuses_a_flipped_byte']}")
        if "background" in sections:
            measured = background(training, options.rounds, Path(folder))
            report["background"] = asdict(measured)
            goals += of_background(measured.stall, measured.complete, measured.copying, measured.after)
    print()
    print_goals(goals)
    report["goals"] = [asdict(each) for each in goals]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report.get("refuses_a_flipped_byte", True) else 1


def of_saves(took: Times, deleting: Times, size: int) -> list[Goal]:
    print(f"\n{'waited for':<22}{'s':>8}{'MB/s':>8}  {'to torch.save, fsync [95 %]':<30}{'deleting, s':>12}")
    for name, values in took.items():
        ratio = ratio_of_medians(values, took[SAVE_SYNCED])
        rate = size / 1e6 / median(values)
        print(f"{name:<22}{median(values):>8.3f}{rate:>8.0f}  {ratio!s:<30}{median(deleting[name]):>12.3f}")
    return [
        Goal.of("save waited for / torch.save + fsync", ratio_of_medians(took["ours"], took[SAVE_SYNCED]), SAVE_GOAL)
    ]


def of_restores(warm: Times, cold: Times, size: int) -> list[Goal]:
    goals = []
    for temperature, found in (("warm", warm), ("cold", cold)):
        if not found:
            print(f"\n{temperature}: not measured, this file system keeps files in memory")
            continue
        print(f"\n{'restored, ' + temperature:<22}{'s':>8}{'MB/s':>8}  to torch.load [95 %]")
        for name, values in found.items():
            ratio = ratio_of_medians(values, found[LOAD])
            print(f"{name:<22}{median(values):>8.3f}{size / 1e6 / median(values):>8.0f}  {ratio}")
        ratio = ratio_of_medians(found["ours"], found[LOAD])
        goals.append(Goal.of(f"restore, verified, {temperature} / torch.load", ratio, RESTORE_GOAL))
    return goals


def of_background(stall: Times, complete: Times, copying: Times, after: Times) -> list[Goal]:
    head = f"{'stall, ms':>10}  {'to the copy [95 %]':<26}{'lost in it, ms':>15}{'after it, ms':>14}{'complete, s':>13}"
    print(f"\n{'in the background':<34}{head}")
    for name, values in stall.items():
        ended = f"{median(complete[name]):.3f}" if name in complete else "-"
        print(
            f"{name:<34}{1e3 * median(values):>10.1f}  {ratio_of_medians(values, stall[COPY])!s:<26}"
            f"{1e3 * median(copying[name]):>15.0f}{1e3 * median(after[name]):>14.0f}{ended:>13}"
        )
    fastest = min((name for name in complete if name.startswith("DCP")), key=lambda name: median(complete[name]))
    lost = {name: [a + b for a, b in zip(copying[name], after[name], strict=True)] for name in copying}
    return [
        Goal.of(
            f"background save complete / {fastest}", ratio_of_medians(complete[OURS], complete[fastest]), COMPLETE_GOAL
        ),
        Goal.of("stall of a background save / a memory copy", ratio_of_medians(stall[OURS], stall[COPY]), STALL_GOAL),
        Goal.of("all time lost to a background save / a memory copy", ratio_of_medians(lost[OURS], stall[COPY]), None),
    ]


if __name__ == "__main__":
    sys.exit(main())
