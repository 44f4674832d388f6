"""Every benchmark, one after the other, and one table of all goals.

    python -m benchmarks [--only a,b] [--quick] [--reports DIR] [--page PATH]

Each one runs in a process of its own. Its report stays in ``--reports``, and the page (``results.md`` there) is made of
all reports there: with ``--only`` some are measured again. The exit code is 1 if a benchmark failed, whether or not
goals are met.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.goals import Goal
from benchmarks.machine import busy_cores, machine

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 2700
BUSY_CORES = 0.5


@dataclass(frozen=True)
class Benchmark:
    """A module of this package that takes ``--json PATH``.

    Args:
        what: one line for the page.
        arguments: of the measurement.
        quick: of the check that it runs.
    """

    name: str
    what: str
    arguments: str
    quick: str


BENCHMARKS = (
    Benchmark(
        "overhead",
        "a training loop, per micro-batch",
        "--rounds 15 --processes 2",
        "--quick --rounds 2 --processes 1 --settings full --contenders plain,ours+10",
    ),
    Benchmark("evaluation", "an evaluation, per batch", "--rounds 30", "--rounds 2 --batches 5"),
    Benchmark("loading", "a loader, per sample", "--rounds 15", "--rounds 2 --samples 200 --large 20"),
    Benchmark(
        "start_and_exit",
        "a process, before and after its run",
        "--rounds 15 --contenders plain,ignite,ours,handlers",
        "--rounds 1 --contenders plain,ours",
    ),
    Benchmark("handler_costs", "handlers, per iteration", "--rounds 15", "--rounds 2 --iterations 100"),
    Benchmark("growth", "with handlers, tensors, accumulation", "--rounds 15", "--rounds 2 --micro-batches 16"),
    Benchmark("captured_update", "the update as one graph", "--rounds 15", "--rounds 2 --micro-batches 48"),
    Benchmark(
        "memory_copies", "copies of the state in memory", "--rounds 45 --iterations 20", "--rounds 2 --iterations 2"
    ),
    Benchmark("long_interval", "a log point in 100,000 iterations", "", "--iterations 2000 --saves 3"),
    Benchmark("save_and_load", "saves and restores of 604 MB", "--rounds 15", "--rounds 2 --width 64"),
    Benchmark("mirror", "training beside uploads", "", "--rounds 1 --iterations 60 --mib 1"),
    Benchmark("follower", "training beside a follower", "", "--rounds 2 --iterations 60 --mib 1"),
    Benchmark("ddp", "a step on two ranks", "--rounds 20", "--rounds 2 --steps 3"),
    Benchmark(
        "rank_invariant", "the same bits on any number of ranks", "--rounds 15 --steps 8", "--rounds 2 --steps 2"
    ),
    Benchmark("agreement", "ranks that agree on stops", "--rounds 15 --steps 100", "--rounds 2 --steps 5"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write the page, print the goals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    names = [each.name for each in BENCHMARKS]
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--quick", action="store_true", help="check in a few minutes that all run; writes no page")
    parser.add_argument("--reports", type=Path, help="folder for what each one found (runs/benchmarks)")
    parser.add_argument("--page", type=Path, help="the results (results.md among the reports)")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(names):
        parser.error(f"--only must be of {','.join(names)}, got {','.join(sorted(unknown))}.")
    reports = options.reports or (Path(tempfile.mkdtemp()) if options.quick else ROOT / "runs" / "benchmarks")
    page = options.page or reports / "results.md"
    reports.mkdir(parents=True, exist_ok=True)
    failed = []
    began = time.perf_counter()
    for benchmark in BENCHMARKS:
        if benchmark.name in options.only:
            report = run(benchmark, options.quick)
            (reports / f"{benchmark.name}.json").write_text(json.dumps(report, indent=1) + "\n")
            if report["code"]:
                failed.append(benchmark.name)
    found = [json.loads(path.read_text()) for each in names if (path := reports / f"{each}.json").exists()]
    page.write_text(page_of(found))
    print("\n" + "\n".join(" | ".join(row) for row in goal_rows(found)))
    print(f"\n{len(options.only)} benchmarks in {(time.perf_counter() - began) / 60:.1f} minutes; {page}")
    for name in failed:
        print(f"{name} FAILED: see {reports / name}.json")
    return 1 if failed else 0


def run(benchmark: Benchmark, quick: bool) -> dict[str, Any]:
    """One benchmark in a process, and what it found."""
    busy = busy_cores()
    print(f"{benchmark.name}: {benchmark.what}", flush=True)
    if busy > BUSY_CORES:
        print(f"  other programs use {busy:.1f} of {os.cpu_count()} cores: figures are worth little", flush=True)
    arguments = (benchmark.quick if quick else benchmark.arguments).split()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", *arguments, "--json", str(target)]
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            code, output, errors = ended.returncode, ended.stdout, ended.stderr
        except subprocess.TimeoutExpired:
            code, output, errors = 124, "", f"It had not ended after {LIMIT_S} s."
        report = json.loads(target.read_text()) if target.exists() else {}
    seconds = time.perf_counter() - began
    print(f"  {seconds:.0f} s" + (f", FAILED with code {code}: {errors[-2000:]}" if code else ""), flush=True)
    return {
        "name": benchmark.name,
        "what": benchmark.what,
        "command": " ".join(["python -m", f"benchmarks.{benchmark.name}", *arguments]),
        "quick": quick,
        "code": code,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": seconds,
        "busy_cores": busy,
        "machine": machine(),
        "output": output,
        "errors": errors,
        "goals": [asdict(goal) for goal in Goal.read(report)],
        "report": report,
    }


def goal_rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Heading and rows of the table of all goals; a benchmark that failed is one of them."""
    rows = [["benchmark", "figure", "measured [95 %]", "goal", ""]]
    for report in found:
        for goal in Goal.read(report):
            most = "-" if goal.goal is None else f"{goal.goal:g}"
            verdict = "not measured" if report["quick"] else goal.verdict
            rows.append([report["name"], goal.what, goal.figure, most, verdict])
        if report["code"]:
            rows.append([report["name"], "**failed**", "-", "-", "missed"])
    return rows


def page_of(found: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    heading, *rows = goal_rows(found)
    lines = [
        "# Results of the benchmarks",
        "",
        "Written by `python -m benchmarks`; do not edit. `benchmarks/README.md` says what is measured, and how. Ratios",
        "are of medians, with their 95 % intervals; a figure above its goal misses it; `-`: no goal is set.",
        "",
    ]
    if any(each["quick"] for each in found):
        lines += ["**This was a check that the benchmarks run. Its figures measure nothing.**", ""]
    busy = [each["name"] for each in found if each["busy_cores"] > BUSY_CORES]
    if busy:
        lines += [f"**The machine was busy with other programs before: {', '.join(busy)}.**", ""]
    table = [heading, ["---"] * len(heading), *rows]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    missed = [f"{row[1]} ({row[2]}, goal {row[3]})" for row in rows if row[4] == "missed"]
    lines += ["", "## Missed", "", *([f"- {each}" for each in missed] or ["None of those that were measured."]), ""]
    for each in found:
        conditions = ", ".join(f"{name} {value}" for name, value in each["machine"].items())
        busy_text = f"other programs used {each['busy_cores']:.1f} cores before it"
        lines += [
            f"## {each['name']}: {each['what']}",
            "",
            f"`{each['command']}`, {each['date']}, {each['seconds']:.0f} s;",
        ]
        lines += [f"{conditions}; {busy_text}.", "", "```text", each["output"].strip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
