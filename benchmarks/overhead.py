"""The overhead of a training loop per micro-batch: ours, hand-written ones, Ignite's engine.

    python -m benchmarks.overhead [--quick] [--rounds N] [--settings bare,full] [--contenders plain,ours]
        [--processes N] [--before CHECKOUT] [--json PATH]

See ``benchmarks/README.md`` for what is measured and how to read it. Exit code 1: the final weights differ, so the
contenders did not do the same work.
"""

from __future__ import annotations

import os

# before torch is imported, here and in the workers, which inherit it
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.machine import machine
from benchmarks.ratios import TARGETS, ratio_of_medians
from benchmarks.rounds import BEFORE, Measured, measure
from benchmarks.workload import LOG_EVERY

LEAST_ROUNDS = 15


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON; returns 0 if all did the same work, otherwise 1."""
    options = _parse(arguments)
    chosen = [
        (setting, name)
        for setting in options.settings
        for name in CONTENDERS[setting]
        if options.contenders is None or name in options.contenders
    ]
    if options.before is not None:
        chosen += [(setting, f"{name}{BEFORE}") for setting, name in chosen if name.startswith("ours")]
    # one after the other: a process may be faster than the next by where its memory lies
    runs = [measure(chosen, options.micro_batches, options.rounds, options.before) for _ in range(options.processes)]
    measured = [Measured.joined(each) for each in zip(*runs, strict=True)]
    report = {
        "machine": machine(),
        "command": " ".join(["python -m benchmarks.overhead", *(sys.argv[1:] if arguments is None else arguments)]),
        "rounds": options.rounds,
        "processes": options.processes,
        "micro_batches_per_round": options.micro_batches,
        "results": [asdict(result) | {"median_us": median(result.cpu_us)} for result in measured],
        "ratios": ratios(measured),
        "targets": targets(measured),
        "equal_work": {setting: equal_work(measured, setting) for setting in options.settings},
    }
    print_report(report, measured)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report["equal_work"].values()) else 1


def equal_work(measured: Sequence[Measured], setting: str) -> bool:
    """Whether all contenders of ``setting`` ended with the same weights and logged as often."""
    done = {(result.digest, result.log_lines) for result in measured if result.setting == setting}
    return len(done) <= 1


def ratios(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Every contender against the plain loop, the cheapest one of its setting, and itself before the change."""
    rows = []
    for result in measured:
        for baseline in measured:
            if baseline.setting == result.setting and baseline.name in ("plain", "cheapest", f"{result.name}{BEFORE}"):
                ratio = ratio_of_medians(result.cpu_us, baseline.cpu_us, processes=result.processes)
                rows.append({"setting": result.setting, "contender": result.name, "to": baseline.name} | asdict(ratio))
    return rows


def targets(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The targets whose two sides were both measured, each with its ratio and verdict."""
    by_name = {(result.setting, result.name): result for result in measured}
    rows = []
    for target in TARGETS:
        contender = by_name.get((target.setting, target.contender))
        baseline = by_name.get((target.setting, target.baseline))
        if contender is not None and baseline is not None:
            ratio = ratio_of_medians(contender.cpu_us, baseline.cpu_us, processes=contender.processes)
            rows.append(asdict(target) | asdict(ratio) | {"verdict": target.verdict(ratio)})
    return rows


def print_report(report: dict[str, Any], measured: Sequence[Measured]) -> None:
    """The tables on stdout."""
    machine_line = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    rounds = f"{report['rounds']} rounds of {report['micro_batches_per_round']} micro-batches"
    print(f"{machine_line}\n{rounds} in each of {report['processes']} processes, CPU time")
    for setting, equal in report["equal_work"].items():
        print(f"\n{setting:20}{'us':>8}  {'to plain [95 %]':24}{'to cheapest [95 %]':24}{'to before':24}weights")
        for result in measured:
            if result.setting == setting:
                sides = {row["to"]: row for row in report["ratios"] if _is_row_of(row, result)}
                cells = "".join(
                    f"{_interval(sides.get(to)):24}" for to in ("plain", "cheapest", f"{result.name}{BEFORE}")
                )
                print(f"{result.name:20}{median(result.cpu_us):8.1f}  {cells}{result.digest[:12]}")
        print("all ended with the same weights" if equal else "THE WEIGHTS OR LOG LINES DIFFER: not the same work")
    if report["targets"]:
        print("\ntargets")
    for row in report["targets"]:
        what = f"{row['setting']}: {row['contender']} / {row['baseline']}"
        goal = f"goal {row['goal']}, limit {row['limit']}"
        print(f"{what:28}{_interval(row):24}{goal:24}{row['verdict']}")
    if report["rounds"] < LEAST_ROUNDS:
        print(f"fewer than {LEAST_ROUNDS} rounds: too few for a measurement")


def _is_row_of(row: dict[str, Any], result: Measured) -> bool:
    return bool(row["setting"] == result.setting and row["contender"] == result.name)


def _interval(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, help="counted rounds of a process (default 20; 3 with --quick)")
    parser.add_argument("--micro-batches", type=int, help=f"per round, a multiple of {LOG_EVERY}")
    parser.add_argument("--quick", action="store_true", help="3 short rounds, to check that it runs")
    parser.add_argument("--settings", type=_names, default=list(CONTENDERS), help="of bare,full")
    parser.add_argument("--contenders", type=_names, help=f"of {','.join(CONTENDERS['full'])}")
    parser.add_argument("--processes", type=int, default=3, help="of each contender, default 3")
    parser.add_argument("--before", type=Path, help="a checkout of another commit: ours is measured with it, too")
    parser.add_argument("--json", type=Path, help="file for all results")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.quick else 20)
    options.micro_batches = options.micro_batches or (LOG_EVERY * (2 if options.quick else 3))
    _check_known(parser, "--settings", options.settings, list(CONTENDERS))
    _check_known(parser, "--contenders", options.contenders or [], list(CONTENDERS["full"]))
    if min(options.rounds, options.processes, options.micro_batches) < 1 or options.micro_batches % LOG_EVERY:
        parser.error(
            f"--rounds and --processes must be at least 1 and --micro-batches a positive multiple of {LOG_EVERY}."
        )
    return options


def _check_known(parser: argparse.ArgumentParser, option: str, given: list[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            parser.error(f"{option} must be one of {', '.join(known)}, got {name!r}.")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
